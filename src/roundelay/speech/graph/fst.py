"""FSTs as numpy arrays: OpenFst's `const` files, read and written without a loop over arcs.

A const file holds a header, 20 bytes per state (final weight, first arc, number of arcs, number of input and of output
epsilons) and 16 bytes per arc (input label, output label, weight, next state). Kaldi's tools read these files.
"""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np

from roundelay.errors import DataError, reading

MAGIC = 2125659606
UNALIGNED_VERSION = 2
EXPANDED = 1
STATE = np.dtype([("final", "<f4"), ("first", "<u4"), ("arcs", "<u4"), ("in_epsilons", "<u4"), ("out_epsilons", "<u4")])
ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4"), ("nextstate", "<i4")])


@dataclass
class FstArrays:
    """An FST: `source[i]` is the source state of `arcs[i]`; `final` is infinite for states that are not final."""

    start: int
    final: np.ndarray
    source: np.ndarray
    arcs: np.ndarray

    @property
    def states(self) -> int:
        return len(self.final)


def fst_to_arrays(fst: Any) -> FstArrays:
    """Return the states and arcs of a kaldifst FST."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "const.fst"
        kaldifst.StdConstFst(fst).write(str(path))
        content = path.read_bytes()
    _, _, start, states, arcs, _ = header(content, "a graph in memory")
    # Symbol tables may follow the header, so take states and arcs from the end of the file.
    tail = memoryview(content)[len(content) - STATE.itemsize * states - ARC.itemsize * arcs :]
    table = np.frombuffer(tail, STATE, states)
    arc_table = np.frombuffer(tail, ARC, arcs, STATE.itemsize * states).copy()
    return FstArrays(start, table["final"].copy(), np.repeat(np.arange(states), table["arcs"]), arc_table)


def write_const_fst(path: str | Path, fst: FstArrays) -> None:
    """Write a const file; arcs are sorted by their source state."""
    order = np.argsort(fst.source, kind="stable")
    source, arcs = fst.source[order], fst.arcs[order]
    table = np.zeros(fst.states, STATE)
    table["final"] = fst.final
    table["arcs"] = np.bincount(source, minlength=fst.states)
    table["first"] = np.cumsum(table["arcs"]) - table["arcs"]
    table["in_epsilons"] = np.bincount(source[arcs["ilabel"] == 0], minlength=fst.states)
    table["out_epsilons"] = np.bincount(source[arcs["olabel"] == 0], minlength=fst.states)
    header = struct.pack("<i", MAGIC) + _text(b"const") + _text(b"standard")
    header += struct.pack("<iiQqqq", UNALIGNED_VERSION, 0, EXPANDED, fst.start, fst.states, len(arcs))
    with Path(path).open("wb") as out:
        out.write(header)
        out.write(table.tobytes())
        out.write(arcs.tobytes())


def arrays_to_fst(fst: FstArrays) -> Any:
    """Return a mutable kaldifst FST with these states and arcs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "const.fst"
        write_const_fst(path, fst)
        return kaldifst.StdVectorFst(kaldifst.StdConstFst.read(str(path)))


def read_fst(path: str | Path) -> Any:
    """Read an FST of type vector or const with standard arcs; DataError for anything else."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            start_of_file = stream.read(256)
    except OSError as error:
        raise DataError(f"the graph cannot be read: {error.strerror}", where=str(path), hint="check the path") from None
    kind, arc, start, states, arcs, size = header(start_of_file, str(path))
    if kind not in ("vector", "const") or arc != "standard":
        raise DataError(
            f"the graph must be of type vector or const with standard arcs (got {kind}, {arc})",
            where=str(path),
            hint="convert it: fstconvert --fst_type=const HCLG.fst",
        )
    if start < 0 or states == 0:
        raise DataError("the graph is empty", where=str(path), hint="build it again")
    with reading("the graph", path, "build it or copy it again"):
        _check_tables(path.read_bytes(), kind, start, states, arcs, size)
    try:
        fst = (kaldifst.StdConstFst if kind == "const" else kaldifst.StdVectorFst).read(str(path))
    except (RuntimeError, MemoryError):
        fst = None
    if fst is None:
        raise DataError("the graph cannot be read", where=str(path), hint="build it or copy it again")
    return fst


def _check_tables(content: bytes, kind: str, start: int, states: int, arcs: int, at: int) -> None:
    """Raise ValueError if counts, arcs or states of a file exceed it: OpenFst believes them and allocates or crashes."""
    version, flags = struct.unpack_from("<ii", content, at - struct.calcsize("<iiQqqq"))
    if not 0 <= start < states or flags & ~7:
        raise ValueError("the start state is not a state, or a flag is unknown")
    for flag in (1, 2):
        at = _after_symbols(content, at) if flags & flag else at
    room = len(content) - at
    if kind == "const":
        if version not in (1, UNALIGNED_VERSION) or arcs < 0:
            raise ValueError("the header is damaged")
        if STATE.itemsize * states + ARC.itemsize * arcs > room:
            raise ValueError("the file is truncated")
        aligned = version == 1 or bool(flags & 4)
        first_state = -(-at // 16) * 16 if aligned else at
        first_arc = first_state + STATE.itemsize * states
        first_arc = -(-first_arc // 16) * 16 if aligned else first_arc
        table = np.frombuffer(content, STATE, states, first_state)
        arc_table = np.frombuffer(content, ARC, arcs, first_arc)
        ends = table["first"].astype(np.int64) + table["arcs"]
        if (ends > arcs).any() or _out_of_range(arc_table, states):
            raise ValueError("a state refers to arcs, or an arc to a state, that the file does not have")
        return
    for _ in range(states):  # vector: final weight, number of arcs, arcs; state after state
        _, count = struct.unpack_from("<fq", content, at)
        at += 12
        if not 0 <= count <= (len(content) - at) // ARC.itemsize:
            raise ValueError("the file is truncated")
        if _out_of_range(np.frombuffer(content, ARC, count, at), states):
            raise ValueError("an arc refers to a state that the file does not have")
        at += ARC.itemsize * count


def _after_symbols(content: bytes, at: int) -> int:
    """Return the position after a symbol table: magic, name, next key, count, then a text and a key for each symbol."""
    _, length = struct.unpack_from("<ii", content, at)
    if not 0 <= length <= len(content):
        raise ValueError("a symbol table is damaged")
    _, count = struct.unpack_from("<qq", content, at + 8 + length)
    at += 24 + length
    if not 0 <= count <= len(content):
        raise ValueError("a symbol table is damaged")
    for _ in range(count):
        (length,) = struct.unpack_from("<i", content, at)
        if not 0 <= length <= len(content) - at:
            raise ValueError("a symbol table is damaged")
        at += 12 + length
    return at


def _out_of_range(arcs: np.ndarray, states: int) -> bool:
    next_state = arcs["nextstate"]
    return bool(
        (next_state < 0).any() or (next_state >= states).any() or (arcs["ilabel"] < 0).any() or (arcs["olabel"] < 0).any()
    )


def header(content: bytes, where: str) -> tuple[str, str, int, int, int, int]:
    """Return FST type, arc type, start state, number of states, number of arcs, and the length of the header."""
    try:
        (magic,) = struct.unpack_from("<i", content, 0)
        if magic != MAGIC:
            raise DataError("not an OpenFst file", where=where, hint="pass HCLG.fst in binary form")
        kind, at = _read_text(content, 4)
        arc, at = _read_text(content, at)
        _, _, _, start, states, arcs = struct.unpack_from("<iiQqqq", content, at)
    except struct.error:
        raise DataError("the graph file is truncated", where=where, hint="build it or copy it again") from None
    return kind, arc, start, states, arcs, at + struct.calcsize("<iiQqqq")


def _text(value: bytes) -> bytes:
    return struct.pack("<i", len(value)) + value


def _read_text(content: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<i", content, at)
    if not 0 <= length <= 64:
        raise struct.error
    return content[at + 4 : at + 4 + length].decode("ascii", errors="replace"), at + 4 + length
