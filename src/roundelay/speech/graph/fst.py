"""Transducers as arrays: OpenFst's `const` files, read and written with numpy, so that millions of arcs take no loop.

A const file holds a header, 20 bytes per state (final cost, first arc, number of arcs, number of input and of output
epsilons) and 16 bytes per arc (input label, output label, cost, next state). Kaldi's tools read what is written here.
"""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np

from roundelay.errors import DataError

MAGIC = 2125659606
UNALIGNED_VERSION = 2
EXPANDED = 1
STATE = np.dtype([("final", "<f4"), ("first", "<u4"), ("arcs", "<u4"), ("in_epsilons", "<u4"), ("out_epsilons", "<u4")])
ARC = np.dtype([("reads", "<i4"), ("writes", "<i4"), ("cost", "<f4"), ("target", "<i4")])


@dataclass
class Arrays:
    """A transducer: `source` and `arcs` run in parallel, `final` is infinite where a state is not final."""

    start: int
    final: np.ndarray
    source: np.ndarray
    arcs: np.ndarray

    @property
    def states(self) -> int:
        return len(self.final)


def arrays_of(fst: Any) -> Arrays:
    """The states and arcs of any transducer of the library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "const.fst"
        kaldifst.StdConstFst(fst).write(str(path))
        content = path.read_bytes()
    _, _, start, states, arcs, _ = header(content, "a graph in memory")
    # Symbol tables may stand between header and states; what is wanted is the end of the file.
    tail = memoryview(content)[len(content) - STATE.itemsize * states - ARC.itemsize * arcs :]
    table = np.frombuffer(tail, STATE, states)
    found = np.frombuffer(tail, ARC, arcs, STATE.itemsize * states).copy()
    return Arrays(start, table["final"].copy(), np.repeat(np.arange(states), table["arcs"]), found)


def write_arrays(path: str | Path, made: Arrays) -> None:
    """A const file; arcs are sorted by their source."""
    order = np.argsort(made.source, kind="stable")
    source, arcs = made.source[order], made.arcs[order]
    table = np.zeros(made.states, STATE)
    table["final"] = made.final
    table["arcs"] = np.bincount(source, minlength=made.states)
    table["first"] = np.cumsum(table["arcs"]) - table["arcs"]
    table["in_epsilons"] = np.bincount(source[arcs["reads"] == 0], minlength=made.states)
    table["out_epsilons"] = np.bincount(source[arcs["writes"] == 0], minlength=made.states)
    header = struct.pack("<i", MAGIC) + _text(b"const") + _text(b"standard")
    header += struct.pack("<iiQqqq", UNALIGNED_VERSION, 0, EXPANDED, made.start, made.states, len(arcs))
    with Path(path).open("wb") as out:
        out.write(header)
        out.write(table.tobytes())
        out.write(arcs.tobytes())


def fst_of(made: Arrays) -> Any:
    """The library's transducer (mutable) with these states and arcs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "const.fst"
        write_arrays(path, made)
        return kaldifst.StdVectorFst(kaldifst.StdConstFst.read(str(path)))


def read_fst(path: str | Path) -> Any:
    """A transducer of type vector or const from a file; DataError for anything else."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            beginning = stream.read(256)
    except OSError as error:
        raise DataError(f"the graph cannot be read: {error.strerror}", where=str(path), hint="check the path") from None
    kind, arc, start, states, _, _ = header(beginning, str(path))
    if kind not in ("vector", "const") or arc != "standard":
        raise DataError(
            f"a graph of type {kind}, {arc}", where=str(path), hint="convert it: fstconvert --fst_type=const HCLG.fst"
        )
    if start < 0 or states == 0:
        raise DataError("the graph is empty", where=str(path), hint="build it again")
    if kind == "const" and path.stat().st_size < STATE.itemsize * states:
        raise DataError("the graph is cut off", where=str(path), hint="build it or copy it again")
    found = (kaldifst.StdConstFst if kind == "const" else kaldifst.StdVectorFst).read(str(path))
    if found is None:
        raise DataError("the graph cannot be read", where=str(path), hint="build it or copy it again")
    return found


def header(content: bytes, where: str) -> tuple[str, str, int, int, int, int]:
    """Type, arc type, start, states, arcs, and where the header ends."""
    try:
        (magic,) = struct.unpack_from("<i", content, 0)
        if magic != MAGIC:
            raise DataError("not a transducer of OpenFst", where=where, hint="give HCLG.fst in binary form")
        kind, at = _read_text(content, 4)
        arc, at = _read_text(content, at)
        _, _, _, start, states, arcs = struct.unpack_from("<iiQqqq", content, at)
    except struct.error:
        raise DataError("the graph is cut off", where=where, hint="build it or copy it again") from None
    return kind, arc, start, states, arcs, at + struct.calcsize("<iiQqqq")


def _text(value: bytes) -> bytes:
    return struct.pack("<i", len(value)) + value


def _read_text(content: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<i", content, at)
    if not 0 <= length <= 64:
        raise struct.error
    return content[at + 4 : at + 4 + length].decode("ascii", errors="replace"), at + 4 + length
