"""Read and write Kaldi's files: archives of matrices, pdf alignments, and the transition table of a text model.

No library is used: an archive is data and must neither unpickle an object nor run a command. Lists (.scp) with pipes are
rejected. Supported are float, double and compressed matrices, integer vectors, and the text forms of both.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from roundelay.errors import PARSE_ERRORS, DataError, reading

MAX_VALUES = 1 << 31
"""A header that announces more values is corrupt."""
LARGE = 1 << 24
"""Bytes above which the size of the file is checked before reading."""


class _Malformed(Exception):
    """Reason why an archive is malformed. Callers that know the file convert it to a DataError."""


# ------------------------------------------------------------------------------------------------ matrices, one by one


def _exactly(stream: BinaryIO, count: int) -> bytes:
    if count > LARGE:  # read() allocates the memory before it reaches the end of the file
        here = stream.tell()
        if stream.seek(0, io.SEEK_END) - here < count:
            raise _Malformed("the file ends in the middle of a value")
        stream.seek(here)
    content = stream.read(count)
    if len(content) != count:
        raise _Malformed("the file ends in the middle of a value")
    return content


def _integer(stream: BinaryIO) -> int:
    if _exactly(stream, 1) != b"\x04":
        raise _Malformed("a number has an unknown size")
    return int(struct.unpack("<i", _exactly(stream, 4))[0])


def _token(stream: BinaryIO) -> str:
    token = b""
    while not token.endswith(b" "):
        if len(token) > 8:
            raise _Malformed(f"unknown kind of value {token!r}")
        token += _exactly(stream, 1)
    return token[:-1].decode("ascii", errors="replace")


def _checked(rows: int, columns: int) -> tuple[int, int]:
    if rows < 0 or columns < 0 or rows * columns > MAX_VALUES:
        raise _Malformed(f"impossible matrix size {rows} x {columns}")
    return rows, columns


def _binary_shape(stream: BinaryIO) -> tuple[str, tuple[int, int], tuple[float, float]]:
    kind = _token(stream)
    if kind in ("FM", "DM"):
        return kind, _checked(_integer(stream), _integer(stream)), (0.0, 0.0)
    if kind in ("FV", "DV"):
        return kind, _checked(1, _integer(stream)), (0.0, 0.0)
    if kind in ("CM", "CM2", "CM3"):
        low, span, rows, columns = struct.unpack("<ffii", _exactly(stream, 16))
        return kind, _checked(rows, columns), (low, span)
    raise _Malformed(f"unknown kind of value '{kind}'")


def _read_matrix(stream: BinaryIO) -> np.ndarray:
    """Return the value at the position of the stream, float32 [rows, columns]; a vector is one row."""
    if _exactly(stream, 1) != b"\0":
        stream.seek(-1, io.SEEK_CUR)
        return _text_matrix(stream)
    if _exactly(stream, 1) != b"B":
        raise _Malformed("no value begins at this position")
    kind, (rows, columns), (low, span) = _binary_shape(stream)
    if kind in ("FM", "FV"):
        return np.frombuffer(_exactly(stream, 4 * rows * columns), "<f4").reshape(rows, columns).copy()
    if kind in ("DM", "DV"):
        return np.frombuffer(_exactly(stream, 8 * rows * columns), "<f8").reshape(rows, columns).astype(np.float32)
    if kind == "CM2":
        values = np.frombuffer(_exactly(stream, 2 * rows * columns), "<u2").reshape(rows, columns)
        return (low + span / 65535 * values).astype(np.float32)
    if kind == "CM3":
        values = np.frombuffer(_exactly(stream, rows * columns), np.uint8).reshape(rows, columns)
        return (low + span / 255 * values).astype(np.float32)
    corners = low + span / 65535 * np.frombuffer(_exactly(stream, 8 * columns), "<u2").reshape(columns, 4).astype(np.float32)
    values = np.frombuffer(_exactly(stream, rows * columns), np.uint8).reshape(columns, rows).astype(np.float32)
    return np.ascontiguousarray(_between_corners(values, corners).T, dtype=np.float32)


def _between_corners(values: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Decompress bytes: piecewise linear between four percentiles of each column, as in Kaldi's CompressedMatrix."""
    p0, p25, p75, p100 = (corners[:, k : k + 1] for k in range(4))
    first = p0 + (p25 - p0) * values / 64
    middle = p25 + (p75 - p25) * (values - 64) / 128
    last = p75 + (p100 - p75) * (values - 192) / 63
    return np.where(values <= 64, first, np.where(values <= 192, middle, last))


def _text_matrix(stream: BinaryIO) -> np.ndarray:
    text = b""
    while b"]" not in text:
        line = stream.readline()
        if not line:
            raise _Malformed("a matrix in text form has no end")
        text += line
    before, _, inside = text.partition(b"[")
    if before.strip():
        raise _Malformed("no matrix begins at this position")
    try:
        rows = [[float(v) for v in row.split()] for row in inside.partition(b"]")[0].splitlines() if row.strip()]
        return np.array(rows, np.float32).reshape(len(rows), -1)
    except ValueError as error:
        raise _Malformed(f"malformed matrix in text form: {error}") from None


# ------------------------------------------------------------------------------------------------------------ lists


class Matrices(Mapping[str, np.ndarray]):
    """Matrices of a Kaldi list (.scp) by key. Every access reads the file."""

    def __init__(self, scp: Path) -> None:
        self.scp = Path(scp)
        self._locations: dict[str, tuple[Path, int, str]] = {}
        try:
            lines = self.scp.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the list: {error}", where=str(scp)) from None
        for number, line in enumerate(lines, 1):
            where = f"{scp}, line {number}"
            if not line.strip():
                continue
            id, location = (*line.split(None, 1), "")[:2]
            if id in self._locations:
                raise DataError(f"duplicate entry '{id}'", where=where, hint="remove one of the lines")
            self._locations[id] = (*_location(location.strip(), self.scp.parent, where), where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, id: object) -> bool:
        return id in self._locations

    def __getitem__(self, id: str) -> np.ndarray:
        path, offset, where = self._locations[id]
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                return _read_matrix(stream)
        except (_Malformed, *PARSE_ERRORS) as error:
            raise DataError(f"the matrix of {id} cannot be read: {error}", where=f"{path} at byte {offset} ({where})") from None

    def shape(self, id: str) -> tuple[int, int]:
        """Return rows and columns. Only the header is read, if there is one."""
        path, offset, where = self._locations[id]
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                if stream.read(2) == b"\0B":
                    return _binary_shape(stream)[1]
        except (_Malformed, *PARSE_ERRORS) as error:
            raise DataError(f"the matrix of {id} cannot be read: {error}", where=f"{path} at byte {offset} ({where})") from None
        rows, columns = self[id].shape
        return rows, columns


def _location(text: str, folder: Path, where: str) -> tuple[Path, int]:
    """Return file and byte offset of a list entry."""
    if not text or text.endswith("|") or text.startswith("|"):
        raise DataError(
            "an entry of the list must be a file (got a command or nothing)",
            where=where,
            hint="write the matrices to an archive first",
        )
    if text.endswith("]"):
        raise DataError("ranges of rows are not supported", where=where, hint="write the matrices out with copy-feats")
    name, _, offset = text.rpartition(":")
    path, at = (Path(name), int(offset)) if name and offset.isdecimal() and len(offset) < 19 else (Path(text), 0)
    with reading("the entry of the list", where):
        return (path if path.is_absolute() or path.exists() else folder / path), at


def read_matrices(scp: Path) -> Matrices:
    """Open a Kaldi list. Relative paths start from the working directory or, if there is no such file, from the list's folder.

    Raises DataError if the list is unreadable or contains commands, ranges or duplicate keys.
    """
    return Matrices(scp)


def write_matrices(ark: Path, scp: Path, matrices: Iterable[tuple[str, np.ndarray]]) -> int:
    """Write an archive of float matrices and its list. Returns the number of matrices."""
    count = 0
    ark = Path(ark).resolve()
    with ark.open("wb") as out, Path(scp).open("w", encoding="utf-8") as index:
        for id, matrix in matrices:
            x = np.ascontiguousarray(matrix, dtype="<f4")
            if x.ndim != 2:
                raise DataError(f"the matrix of {id} must have 2 dimensions (got {x.ndim})", where=str(ark))
            out.write(id.encode() + b" ")
            index.write(f"{id} {ark}:{out.tell()}\n")
            out.write(b"\0BFM \x04" + struct.pack("<i", x.shape[0]) + b"\x04" + struct.pack("<i", x.shape[1]))
            out.write(x.tobytes())
            count += 1
    return count


# ------------------------------------------------------------------------------------------------------- alignments


def read_pdf_alignments(path: Path, transitions: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return int32 pdf ids by utterance from the output of `ali-to-pdf`: binary or text, compressed (.gz) or not.

    If `path` is a folder, all its ali.* files are read. With `transitions` (from `read_transitions`) the files contain
    transition-ids, as Kaldi's own ali.*.gz do. Raises DataError for corrupt files and duplicate utterances.
    """
    path = Path(path)
    files = sorted(path.glob("ali.*")) if path.is_dir() else [path]
    if not files:
        raise DataError("the folder contains no alignments (ali.*)", where=str(path))
    alignments: dict[str, np.ndarray] = {}
    for file in files:
        for id, values in _integer_vectors(file):
            if id in alignments:
                raise DataError(f"utterance {id} is aligned twice", where=str(file))
            if transitions is not None:
                if len(values) and (values.min() < 1 or values.max() >= len(transitions)):
                    raise DataError(
                        f"utterance {id} has a transition-id that is not in the model",
                        where=str(file),
                        hint="use the final.mdl that made the alignments",
                    )
                values = transitions[values]
            elif len(values) and values.min() < 0:
                raise DataError(f"utterance {id} has a negative pdf id", where=str(file))
            alignments[id] = values
    return alignments


def _integer_vectors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except PARSE_ERRORS as error:
        raise DataError(f"cannot read the alignments: {error}", where=str(path)) from None
    at = 0
    while at < len(content):
        gap = content.find(b" ", at)
        end_of_line = content.find(b"\n", at)
        stop = end_of_line if end_of_line >= 0 else len(content)
        binary = 0 <= gap and content[gap + 1 : gap + 3] == b"\0B" and gap < stop
        try:
            if binary:
                id, values, at = content[at:gap].decode(), *_binary_vector(content, gap + 3)
            else:
                words = content[at:stop].split()
                at = stop + 1
                if not words:
                    continue
                id, values = words[0].decode(), np.array([int(w) for w in words[1:] if w not in (b"[", b"]")], np.int32)
        except (_Malformed, ValueError, OverflowError) as error:
            raise DataError(f"the alignments are corrupt: {error}", where=f"{path} near byte {at}") from None
        yield id, values


def _binary_vector(content: bytes, at: int) -> tuple[np.ndarray, int]:
    if content[at : at + 1] != b"\x04" or at + 5 > len(content):
        raise _Malformed("no vector of integers begins at this position")
    count = struct.unpack_from("<i", content, at + 1)[0]
    at += 5
    if count < 0 or at + 5 * count > len(content):
        raise _Malformed("a vector is truncated")
    packed = np.frombuffer(content, np.dtype([("size", "u1"), ("value", "<i4")]), count, at)
    if (packed["size"] != 4).any():
        raise _Malformed("a number has an unknown size")
    return packed["value"].astype(np.int32), at + 5 * count


# ------------------------------------------------------------------------------------------------- transition tables


def read_transitions(model: Path) -> np.ndarray:
    """Return the pdf id of every transition-id, int32, from a text model (`gmm-copy --binary=false final.mdl final.txt`).

    Transition-ids count from 1: for each (phone, state, pdf) row in order, one for each transition of that state in the
    topology of its phone. Entry 0 is -1. Raises DataError if the model is binary or malformed.
    """
    try:
        content = Path(model).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the model: {error}", where=str(model)) from None
    if b"\0" in content[:64]:
        raise DataError(
            "the model must be in text form (got binary)", where=str(model), hint="gmm-copy --binary=false final.mdl final.txt"
        )
    text = content.decode("utf-8", errors="replace")
    try:
        return _transition_pdfs(text)
    except PARSE_ERRORS as error:
        raise DataError(f"the transition table cannot be read: {error}", where=str(model)) from None


def _transition_pdfs(text: str) -> np.ndarray:
    topology = re.search(r"<Topology>(.*?)</Topology>", text, re.DOTALL)
    rows = re.search(r"<(Triples|Tuples)>\s+(\d+)(.*?)</\1>", text, re.DOTALL)
    if topology is None or rows is None:
        raise ValueError("no <Topology> or no <Triples>")
    transitions: dict[tuple[int, int], list[int]] = {}
    for entry in re.findall(r"<TopologyEntry>(.*?)</TopologyEntry>", topology[1], re.DOTALL):
        phones = re.search(r"<ForPhones>(.*?)</ForPhones>", entry, re.DOTALL)
        if phones is None:
            raise ValueError("a topology entry names no phones")
        for state, body in re.findall(r"<State>\s+(\d+)(.*?)</State>", entry, re.DOTALL):
            targets = [int(t) for t in re.findall(r"<Transition>\s+(\d+)", body)]
            for phone in phones[1].split():
                transitions[int(phone), int(state)] = targets
    width = 3 if rows[1] == "Triples" else 4
    table = np.array(rows[3].split(), np.int64).reshape(-1, width)
    if len(table) != int(rows[2]):
        raise ValueError(f"{rows[2]} rows are announced, {len(table)} are present")
    pdfs = [-1]
    for phone, state, forward, *own in table.tolist():
        for target in transitions[phone, state]:
            pdfs.append(own[0] if own and target == state else forward)
    return np.array(pdfs, np.int32)
