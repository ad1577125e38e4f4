"""Write an archive to a temporary folder and rename it when it is complete. A failure leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.data.archive import PAGE, Archive, ArchiveMetadata, write_index
from roundelay.errors import DataError

SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class EncodedBlock:
    """An encoded block, as a packing process returns it."""

    data: bytes
    examples: int
    frames: int
    counted: int


def write(folder: Path, metadata: ArchiveMetadata, blocks: Iterable[EncodedBlock], shard_bytes: int = SHARD_BYTES) -> Archive:
    """Write an archive and open it. An existing one is replaced when the new one is complete. Raises DataError on failure."""
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        rows, shards = _write_shards(partial, blocks, shard_bytes)
        if not rows:
            raise DataError("the archive must have at least one example (got 0)", where=str(folder))
        table = np.array([row[:6] for row in rows], np.int64)
        counted = sum(row[6] for row in rows)
        metadata = replace(metadata, examples=int(table[:, 3].sum()), counted=counted, shards=shards)
        write_index(partial, metadata, table)
        _sync(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"writing the archive failed: {error.strerror or error}",
            where=str(folder),
            hint="free space or choose another disk; the incomplete archive was deleted",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Archive(folder)


def require_free_space(folder: Path, needed: float) -> None:
    """Raise DataError if the disk of `folder` has less than `needed` bytes free."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"the archive needs {needed / 1e6:.1f} MB of free space (got {free / 1e6:.1f} MB)",
            where=str(folder),
            hint="free space, choose another disk, or pack with one byte per value",
        )


def _write_shards(
    folder: Path, blocks: Iterable[EncodedBlock], shard_bytes: int
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    rows: list[list[int]] = []
    shards: list[dict[str, Any]] = []
    out: Any = None
    try:
        for block in blocks:
            if out is None or (out.tell() and out.tell() + len(block.data) > shard_bytes):
                if out is not None:
                    _close(out, shards)
                out = open(folder / f"shard-{len(shards):05d}.bin", "wb")  # noqa: SIM115
                shards.append({"file": f"shard-{len(shards):05d}.bin", "bytes": 0})
            out.write(b"\0" * (-out.tell() % PAGE))
            row = [len(shards) - 1, out.tell(), len(block.data), block.examples, block.frames, zlib.crc32(block.data)]
            rows.append([*row, block.counted])
            out.write(block.data)
        if out is not None:
            _close(out, shards)
            out = None
    finally:
        if out is not None:
            out.close()
    return rows, shards


def _close(out: Any, shards: list[dict[str, Any]]) -> None:
    out.flush()
    os.fsync(out.fileno())
    shards[-1]["bytes"] = out.tell()
    out.close()


def _sync(folder: Path) -> None:
    """Flush all files and the folder to disk before the rename."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
