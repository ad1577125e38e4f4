"""Archives: training examples, packed and shuffled once, in shards that are memory-mapped block by block.

An archive is a folder. `archive.json` describes it and is written last. `blocks.npy` has one row per block of examples (shard,
offset, bytes, examples, stored frames, checksum). shard-00000.bin and so on hold the blocks, each aligned to a page. A block
has the sections

    head     int32 [n, 4]            index of the example before shuffling; output frames; repeated frames at the left and right
    ranges   float32 [n, 2, dim]     minimum and step of the bytes (only with compression)
    targets  int32 [...]             targets of the frames inside the context, example after example
    values   uint8 | float32 [...]   frames of static features, extended on both sides for context and deltas

Frames beyond the ends of an utterance are stored as copies of its first or last frame, so every example is self-contained. The
checksum of a block is verified whenever it is mapped. Nothing is unpickled.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import zlib
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import PARSE_ERRORS, DataError, reading

FORMAT = 1
INDEX, BLOCKS = "archive.json", "blocks.npy"
COLUMNS = 6
SHARD, OFFSET, BYTES, EXAMPLES, FRAMES, CHECKSUM = range(COLUMNS)
PAGE = mmap.ALLOCATIONGRANULARITY
IGNORE = -100
"""Target that torch's cross-entropy ignores."""


@dataclass(frozen=True)
class Layout:
    """Shape of the examples of an archive.

    window      frames with a target in an example; 0 for whole utterances of any length
    context     frames without a target on both sides
    dim         static features per frame
    deltas      orders of delta features that are computed on loading; each needs two more frames on both sides
    compressed  one byte per value, with a range per example and feature; otherwise float32
    """

    window: int
    context: int
    dim: int
    deltas: int
    compressed: bool

    @property
    def reach(self) -> int:
        """Stored frames beyond the output frames on each side."""
        return 2 * self.deltas

    @property
    def delivered(self) -> int:
        """Features per output frame, deltas included."""
        return self.dim * (self.deltas + 1)

    def sections(self, examples: int, frames: int) -> list[tuple[str, Any, tuple[int, ...]]]:
        """Return name, type and shape of the sections of a block with `frames` stored frames."""
        ranges = [("ranges", np.float32, (examples, 2, self.dim))] if self.compressed else []
        targets = frames - examples * 2 * (self.reach + self.context)
        return [
            ("head", np.int32, (examples, 4)),
            *ranges,
            ("targets", np.int32, (targets,)),
            ("values", np.uint8 if self.compressed else np.float32, (frames, self.dim)),
        ]


@dataclass(frozen=True)
class ArchiveMetadata:
    """Content of archive.json."""

    layout: Layout
    seed: int
    block: int
    """Examples per block; the last block may have fewer."""
    features: dict[str, Any]
    """How the features were computed; `Archive.require` compares it."""
    outputs: int
    """Number of target classes."""
    examples: int = 0
    counted: int = 0
    """Frames with a target."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    blocks_crc32: int = 0
    source: dict[str, Any] = field(default_factory=dict)


def encode(
    layout: Layout,
    numbers: np.ndarray,
    repeated: np.ndarray,
    values: list[np.ndarray],
    ranges: list[np.ndarray],
    targets: list[np.ndarray],
) -> tuple[bytes, int]:
    """Return the bytes of a block and its number of stored frames. `repeated` [n, 2]: output frames outside the utterance."""
    head = np.empty((len(numbers), 4), np.int32)
    head[:, 0] = numbers
    head[:, 1] = [len(v) - 2 * layout.reach for v in values]
    head[:, 2:] = repeated
    parts: dict[str, np.ndarray] = {"head": head, "targets": np.concatenate(targets), "values": np.concatenate(values)}
    if layout.compressed:
        parts["ranges"] = np.stack(ranges)
    frames = len(parts["values"])
    sections = []
    for name, kind, shape in layout.sections(len(numbers), frames):
        part = np.ascontiguousarray(parts[name], kind)
        assert part.shape == shape, f"section {name} must have shape {shape} (got {part.shape})"
        sections.append(part.tobytes())
    return b"".join(sections), frames


class ArchiveBlock:
    """One block of examples, mapped into memory until the last reference to it is dropped."""

    def __init__(self, layout: Layout, memory: Any, skip: int, examples: int, frames: int) -> None:
        self.examples = examples
        sections: dict[str, np.ndarray] = {}
        offset = skip
        for name, kind, shape in layout.sections(examples, frames):
            count = int(np.prod(shape))
            sections[name] = np.frombuffer(memory, kind, count, offset).reshape(shape)
            offset += sections[name].nbytes
        self.head, self.targets, self.values = sections["head"], sections["targets"], sections["values"]
        self.ranges = sections.get("ranges", np.zeros((0, 2, layout.dim), np.float32))
        stored = self.head[:, 1].astype(np.int64) + 2 * layout.reach
        self.value_starts = np.cumsum(stored) - stored
        counted = self.head[:, 1].astype(np.int64) - 2 * layout.context
        self.target_starts = np.cumsum(counted) - counted
        if (self.head[:, 1:] < 0).any() or (counted < 0).any() or stored.sum() != frames or counted.sum() != len(self.targets):
            raise ValueError("the frames of its examples do not add up")


class Archive:
    """An archive opened for reading. Thread-safe.

    Opening reads the index and checks the sizes of the shards. Blocks are read on demand and at most `max_mapped` of them stay
    mapped, so memory does not grow with the corpus.
    """

    def __init__(self, folder: Path | str, max_mapped: int = 24) -> None:
        self.folder = Path(folder)
        self.metadata, self.blocks = _read_index(self.folder)
        self.layout = self.metadata.layout
        self._max_mapped = max_mapped
        self._mapped: OrderedDict[int, ArchiveBlock] = OrderedDict()
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()
        for number, shard in enumerate(self.metadata.shards):
            self._check_size(number, shard, self.folder / shard["file"])

    def __len__(self) -> int:
        return self.metadata.examples

    def __reduce__(self) -> tuple[Any, ...]:
        return Archive, (self.folder, self._max_mapped)

    def __del__(self) -> None:
        for number in self.__dict__.get("_files", {}).values():
            os.close(number)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of examples of every block."""
        return np.asarray(self.blocks[:, EXAMPLES])

    def block(self, number: int) -> ArchiveBlock:
        """Return a block whose checksum has been verified. Raises DataError if it is damaged."""
        with self._lock:
            block = self._mapped.get(number)
            if block is not None:
                self._mapped.move_to_end(number)
                return block
        block = self._map(number)
        with self._lock:
            self._mapped[number] = block
            while len(self._mapped) > self._max_mapped:
                self._mapped.popitem(last=False)
        return block

    def verify(self) -> None:
        """Read all blocks once and verify their checksums."""
        for number in range(len(self.blocks)):
            self._map(number)

    def _map(self, number: int) -> ArchiveBlock:
        row = self.blocks[number]
        shard = self.metadata.shards[row[SHARD]]
        where = self.folder / shard["file"]
        file = self._file(int(row[SHARD]))
        if os.fstat(file).st_size < row[OFFSET] + row[BYTES]:  # the file may have been truncated after it was opened
            raise damaged(where, f"its size must be {shard['bytes']} bytes (got {os.fstat(file).st_size})")
        memory = mmap.mmap(file, int(row[BYTES]), access=mmap.ACCESS_READ, offset=int(row[OFFSET]))
        # reads the whole block at once and without the GIL, which matters on slow storage
        if zlib.crc32(memory) != row[CHECKSUM]:
            raise damaged(where, f"wrong checksum of block {number} at byte {row[OFFSET]}")
        with reading(f"block {number} of the archive", where, "pack the archive again"):
            return ArchiveBlock(self.layout, memory, 0, int(row[EXAMPLES]), int(row[FRAMES]))

    def _file(self, shard: int) -> int:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = os.open(self.folder / self.metadata.shards[shard]["file"], os.O_RDONLY)
            return self._files[shard]

    def _check_size(self, number: int, shard: dict[str, Any], path: Path) -> None:
        try:
            size = path.stat().st_size
        except OSError:
            raise damaged(path, f"shard {number} of {len(self.metadata.shards)} is missing") from None
        if size != shard["bytes"]:
            raise damaged(path, f"its size must be {shard['bytes']} bytes (got {size})")

    def require(self, features: dict[str, Any], outputs: int, window: int, context: int) -> None:
        """Raise DataError if the archive was packed from other features, targets or windows than these."""
        archived = {
            **self.metadata.features,
            "outputs": self.metadata.outputs,
            "window": self.layout.window,
            "context": self.layout.context,
        }
        wanted = {**features, "outputs": outputs, "window": window, "context": context}
        differing = [key for key in sorted({*archived, *wanted}) if archived.get(key) != wanted.get(key)]
        if differing:
            differences = "; ".join(f"{key} must be {wanted.get(key)!r} (got {archived.get(key)!r})" for key in differing)
            raise DataError(
                f"the archive was packed with another configuration: {differences}",
                where=str(self.folder),
                hint="pack these features with roundelay pack, or use the archive that belongs to them",
            )


def damaged(path: Path, what: str) -> DataError:
    """Return the error for a damaged shard."""
    return DataError(f"shard {path.name} of the archive is damaged: {what}", where=str(path), hint="pack the archive again")


def _read_index(folder: Path) -> tuple[ArchiveMetadata, np.ndarray]:
    hint = "pack the archive again"
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise DataError(f"the archive must have format {FORMAT} (got {index['format']})", where=str(folder), hint=hint)
        metadata = ArchiveMetadata(
            layout=Layout(**index["layout"]), **{k: v for k, v in index.items() if k not in ("format", "layout")}
        )
        if zlib.crc32((folder / BLOCKS).read_bytes()) != metadata.blocks_crc32:
            raise DataError("the archive's table of blocks is damaged", where=str(folder / BLOCKS), hint=hint)
        blocks = np.load(folder / BLOCKS, allow_pickle=False)
        if blocks.dtype != np.int64 or blocks.ndim != 2 or blocks.shape[1] != COLUMNS:
            raise ValueError(f"{BLOCKS} holds {blocks.dtype} {blocks.shape}")
        if int(blocks[:, EXAMPLES].sum()) != metadata.examples:
            raise ValueError(f"{BLOCKS} has {int(blocks[:, EXAMPLES].sum())} examples, {INDEX} has {metadata.examples}")
        _check_index(metadata, blocks)
    except FileNotFoundError as error:
        raise DataError("the archive is missing or incomplete", where=str(error.filename or folder), hint=hint) from None
    except PARSE_ERRORS as error:
        raise DataError(f"reading the archive failed: {error}", where=str(folder), hint=hint) from None
    return metadata, blocks


def _check_index(metadata: ArchiveMetadata, blocks: np.ndarray) -> None:
    """Raise ValueError if a field has a wrong type, a block lies outside its shard, or a shard outside the folder."""
    layout = metadata.layout
    numbers = (layout.window, layout.context, layout.dim, layout.deltas, metadata.block, metadata.outputs, metadata.counted)
    if not all(type(n) is int and 0 <= n < 1 << 31 for n in numbers) or layout.dim < 1 or type(layout.compressed) is not bool:
        raise ValueError(f"{INDEX} holds a size that is not a number from 0 to 2^31")
    if layout.deltas > 8 or not isinstance(metadata.features, dict) or not isinstance(metadata.source, dict):
        raise ValueError(f"{INDEX} holds a wrong layout")
    if not isinstance(metadata.seed, int) or not isinstance(metadata.shards, list):
        raise ValueError(f"{INDEX} holds a wrong seed or list of shards")
    for shard in metadata.shards:
        name, size = shard["file"], shard["bytes"]
        if type(name) is not str or type(size) is not int or Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise ValueError(f"a shard must be a file in the folder of the archive (got {name!r})")
    if not len(blocks):
        return
    if blocks.min() < 0 or blocks[:, SHARD].max() >= len(metadata.shards) or blocks[:, EXAMPLES].min() < 1:
        raise ValueError(f"{BLOCKS} holds an impossible block")
    ends = np.array([shard["bytes"] for shard in metadata.shards], np.int64)[blocks[:, SHARD]]
    # subtract, because a sum could overflow
    if (blocks[:, BYTES] > ends).any() or (blocks[:, OFFSET] > ends - blocks[:, BYTES]).any() or (blocks[:, BYTES] < 1).any():
        raise ValueError(f"{BLOCKS} holds a block outside its shard")
    if (blocks[:, OFFSET] % PAGE).any() or blocks[:, EXAMPLES].max() > 1 << 40 or blocks[:, FRAMES].max() > 1 << 40:
        raise ValueError(f"{BLOCKS} holds a block that is not aligned or too large")


def write_index(folder: Path, metadata: ArchiveMetadata, blocks: np.ndarray) -> None:
    """Write blocks.npy, then archive.json, which makes the folder an archive."""
    np.save(folder / BLOCKS, blocks, allow_pickle=False)
    metadata = replace(metadata, blocks_crc32=zlib.crc32((folder / BLOCKS).read_bytes()))
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, **asdict(metadata)}), encoding="utf-8")
