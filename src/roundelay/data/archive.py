"""Archives: training examples packed once, shuffled as a whole, in shards of which any stretch can be mapped into memory.

An archive is a folder. `archive.json` says what is in it and is written last; `blocks.npy` has a row for every block of
examples (shard, offset, bytes, examples, stored frames, checksum); shard-00000.bin and so on hold the blocks, each beginning on
a page of its own. A block is

    head     int32 [n, 4]            number of the example before shuffling; output frames; of these repeated at left; at right
    ranges   float32 [n, 2, dim]     low and step of the bytes (only where features are compressed)
    targets  int32 [...]             of the frames between the margins, example after example
    values   uint8 | float32 [...]   frames of static features, with what margins and deltas need on both sides

Frames before the first and after the last of an utterance are stored as repetitions of these, so an example stands alone.
Every block is checked against its checksum whenever it is mapped; nothing is unpickled.
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

from roundelay.errors import DataError

FORMAT = 1
INDEX, BLOCKS = "archive.json", "blocks.npy"
COLUMNS = 6
SHARD, OFFSET, BYTES, EXAMPLES, FRAMES, CHECKSUM = range(COLUMNS)
PAGE = mmap.ALLOCATIONGRANULARITY
IGNORE = -100
"""torch's cross-entropy leaves these targets out."""


@dataclass(frozen=True)
class Layout:
    """What the examples of an archive look like.

    window      frames that count in an example; 0: whole utterances of any length
    context      frames of context on both sides that do not count
    dim         static features of a frame
    deltas      orders of slopes that are computed when an example is delivered; each reaches two frames further
    compressed  one byte per value, with a range per example and feature; otherwise float32
    """

    window: int
    context: int
    dim: int
    deltas: int
    compressed: bool

    @property
    def reach(self) -> int:
        """Stored frames beyond the delivered ones on each side."""
        return 2 * self.deltas

    @property
    def delivered(self) -> int:
        """Features of a delivered frame."""
        return self.dim * (self.deltas + 1)

    def sections(self, examples: int, frames: int) -> list[tuple[str, Any, tuple[int, ...]]]:
        """Name, type and shape of a block's parts; `frames` are the stored ones of all its examples."""
        ranges = [("ranges", np.float32, (examples, 2, self.dim))] if self.compressed else []
        targets = frames - examples * 2 * (self.reach + self.context)
        return [
            ("head", np.int32, (examples, 4)),
            *ranges,
            ("targets", np.int32, (targets,)),
            ("values", np.uint8 if self.compressed else np.float32, (frames, self.dim)),
        ]


@dataclass(frozen=True)
class About:
    """archive.json"""

    layout: Layout
    seed: int
    block: int
    """Examples of a block; the last one may have fewer."""
    features: dict[str, Any]
    """How the features were made: training from an archive of others is refused."""
    outputs: int
    """Targets are below this number."""
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
    """The bytes of a block and its stored frames. `repeated` [n, 2]: delivered frames outside the utterance, left and right."""
    head = np.empty((len(numbers), 4), np.int32)
    head[:, 0] = numbers
    head[:, 1] = [len(v) - 2 * layout.reach for v in values]
    head[:, 2:] = repeated
    parts: dict[str, np.ndarray] = {"head": head, "targets": np.concatenate(targets), "values": np.concatenate(values)}
    if layout.compressed:
        parts["ranges"] = np.stack(ranges)
    frames = len(parts["values"])
    made = []
    for name, kind, shape in layout.sections(len(numbers), frames):
        part = np.ascontiguousarray(parts[name], kind)
        assert part.shape == shape, f"{name} of a block: {part.shape}, not {shape}"
        made.append(part.tobytes())
    return b"".join(made), frames


class ArchiveBlock:
    """Some examples, mapped into memory; they go with the last reference to it."""

    def __init__(self, layout: Layout, memory: Any, skip: int, examples: int, frames: int) -> None:
        self.examples = examples
        found: dict[str, np.ndarray] = {}
        at = skip
        for name, kind, shape in layout.sections(examples, frames):
            count = int(np.prod(shape))
            found[name] = np.frombuffer(memory, kind, count, at).reshape(shape)
            at += found[name].nbytes
        self.head, self.targets, self.values = found["head"], found["targets"], found["values"]
        self.ranges = found.get("ranges", np.zeros((0, 2, layout.dim), np.float32))
        stored = self.head[:, 1].astype(np.int64) + 2 * layout.reach
        self.value_starts = np.cumsum(stored) - stored
        counted = self.head[:, 1].astype(np.int64) - 2 * layout.context
        self.target_starts = np.cumsum(counted) - counted


class Archive:
    """An archive opened for reading. Opening reads the index and looks at the sizes of the shards; blocks are read when asked
    for, and at most `kept` of them stay mapped: memory does not grow with the corpus."""

    def __init__(self, folder: Path | str, kept: int = 24) -> None:
        self.folder = Path(folder)
        self.about, self.blocks = _read_index(self.folder)
        self.layout = self.about.layout
        self._kept = kept
        self._open: OrderedDict[int, ArchiveBlock] = OrderedDict()
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()
        for number, shard in enumerate(self.about.shards):
            self._check_size(number, shard, self.folder / shard["file"])

    def __len__(self) -> int:
        return self.about.examples

    def __reduce__(self) -> tuple[Any, ...]:
        return Archive, (self.folder, self._kept)

    def __del__(self) -> None:
        for number in self.__dict__.get("_files", {}).values():
            os.close(number)

    @cached_property
    def sizes(self) -> np.ndarray:
        return np.asarray(self.blocks[:, EXAMPLES])

    def block(self, number: int) -> ArchiveBlock:
        """A block, checked. Loaders call this from several threads."""
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                return found
        made = self._map(number)
        with self._lock:
            self._open[number] = made
            while len(self._open) > self._kept:
                self._open.popitem(last=False)
        return made

    def verify(self) -> None:
        """Reads everything once and checks it."""
        for number in range(len(self.blocks)):
            self._map(number)

    def _map(self, number: int) -> ArchiveBlock:
        row = self.blocks[number]
        shard = self.about.shards[row[SHARD]]
        where = self.folder / shard["file"]
        file = self._file(int(row[SHARD]))
        if os.fstat(file).st_size < row[OFFSET] + row[BYTES]:  # it may have been cut while we were reading
            raise damaged(where, f"it ends after {os.fstat(file).st_size} bytes; {shard['bytes']} were written")
        memory = mmap.mmap(file, int(row[BYTES]), access=mmap.ACCESS_READ, offset=int(row[OFFSET]))
        # reads the whole stretch in one go, and without the interpreter's lock: storage may be slow
        if zlib.crc32(memory) != row[CHECKSUM]:
            raise damaged(where, f"the checksum of block {number} (byte {row[OFFSET]}) is wrong")
        return ArchiveBlock(self.layout, memory, 0, int(row[EXAMPLES]), int(row[FRAMES]))

    def _file(self, shard: int) -> int:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = os.open(self.folder / self.about.shards[shard]["file"], os.O_RDONLY)
            return self._files[shard]

    def _check_size(self, number: int, shard: dict[str, Any], path: Path) -> None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise damaged(path, f"shard {number} of {len(self.about.shards)} is missing") from None
        if size != shard["bytes"]:
            raise damaged(path, f"it has {size} bytes; {shard['bytes']} were written")

    def require(self, features: dict[str, Any], outputs: int, window: int, context: int) -> None:
        """DataError unless the archive holds what the caller would make from these features and targets now."""
        mine = {
            **self.about.features,
            "outputs": self.about.outputs,
            "window": self.layout.window,
            "context": self.layout.context,
        }
        wanted = {**features, "outputs": outputs, "window": window, "context": context}
        differing = [key for key in sorted({*mine, *wanted}) if mine.get(key) != wanted.get(key)]
        if differing:
            told = "; ".join(f"{key} is {mine.get(key)!r} there and {wanted.get(key)!r} here" for key in differing)
            raise DataError(
                f"the archive holds examples of another configuration: {told}",
                where=str(self.folder),
                hint="pack these features again (roundelay pack), or name the archive that belongs to them",
            )


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"shard {path.name} of the archive is damaged: {what}", where=str(path), hint="pack the archive again")


def _read_index(folder: Path) -> tuple[About, np.ndarray]:
    do = "pack the archive again"
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise DataError(
                f"the archive has format {index['format']}, this version reads {FORMAT}", where=str(folder), hint=do
            )
        about = About(layout=Layout(**index["layout"]), **{k: v for k, v in index.items() if k not in ("format", "layout")})
        if zlib.crc32((folder / BLOCKS).read_bytes()) != about.blocks_crc32:
            raise DataError("the archive's list of blocks is damaged", where=str(folder / BLOCKS), hint=do)
        blocks = np.load(folder / BLOCKS, allow_pickle=False)
        if blocks.dtype != np.int64 or blocks.ndim != 2 or blocks.shape[1] != COLUMNS:
            raise ValueError(f"{BLOCKS} holds {blocks.dtype} {blocks.shape}")
        if int(blocks[:, EXAMPLES].sum()) != about.examples:
            raise ValueError(f"{BLOCKS} speaks of {int(blocks[:, EXAMPLES].sum())} examples, {INDEX} of {about.examples}")
    except FileNotFoundError as error:
        raise DataError("there is no archive here, or not all of it", where=str(error.filename or folder), hint=do) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the archive cannot be read: {error}", where=str(folder), hint=do) from None
    return about, blocks


def write_index(folder: Path, about: About, blocks: np.ndarray) -> None:
    """blocks.npy, then archive.json: what makes a folder an archive."""
    np.save(folder / BLOCKS, blocks, allow_pickle=False)
    about = replace(about, blocks_crc32=zlib.crc32((folder / BLOCKS).read_bytes()))
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, **asdict(about)}), encoding="utf-8")
