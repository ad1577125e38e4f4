"""Writing an archive: beside its place, and moved there when it is whole. Whatever fails on the way leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.data.archive import PAGE, About, Archive, write_index
from roundelay.errors import DataError

SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class Encoded:
    """A block as a packing process hands it over."""

    data: bytes
    examples: int
    frames: int
    counted: int


def write(folder: Path, about: About, blocks: Iterable[Encoded], shard_bytes: int = SHARD_BYTES) -> Archive:
    """Writes an archive. An existing one is replaced when the new one is whole."""
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        rows, shards = _write_shards(partial, blocks, shard_bytes)
        if not rows:
            raise DataError("there is nothing to pack", where=str(folder))
        table = np.array([row[:6] for row in rows], np.int64)
        counted = sum(row[6] for row in rows)
        about = replace(about, examples=int(table[:, 3].sum()), counted=counted, shards=shards)
        write_index(partial, about, table)
        _sync(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"the archive cannot be written: {error.strerror or error}",
            where=str(folder),
            hint="make room or choose another disk; nothing of the archive was kept",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Archive(folder)


def require_room(folder: Path, needed: float) -> None:
    """DataError before a long packing that could not end well."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise DataError(
            f"the archive would take {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free",
            where=str(folder),
            hint="make room, choose another disk, or pack with one byte per value",
        )


def _write_shards(folder: Path, blocks: Iterable[Encoded], shard_bytes: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
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
            here = [len(shards) - 1, out.tell(), len(block.data), block.examples, block.frames, zlib.crc32(block.data)]
            rows.append([*here, block.counted])
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
    """The names, too, are on the disk before the folder gets its own."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
