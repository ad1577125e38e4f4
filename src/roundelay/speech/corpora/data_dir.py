"""Utterances, and Kaldi data directories in and out: wav.scp, text, utt2spk, spk2utt, segments.

Files may stand in any order; what is read is sorted by utterance. Every mistake names the file and the line. A `wav.scp` that
holds commands ("sph2pipe ... |") is refused unless pipes are allowed: reading a data directory must not run what stands in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.features.audio import read_audio

__all__ = ["Corpus", "Utterance", "read_audio", "read_data_dir", "write_data_dir"]


@dataclass(frozen=True)
class Utterance:
    """A stretch of a recording and the words said in it; `end` is None where it ends with the recording."""

    id: str
    speaker: str
    words: tuple[str, ...]
    audio: Path
    start: float = 0.0
    end: float | None = None
    command: str = field(default="", repr=False)
    """Prints the recording instead of `audio` (which then names the wav.scp); only where pipes are allowed."""


@dataclass
class Corpus:
    folder: Path
    utterances: list[Utterance]

    def __post_init__(self) -> None:
        self.utterances = sorted(self.utterances, key=lambda utterance: utterance.id)
        self.by_id = {utterance.id: utterance for utterance in self.utterances}
        self.speakers: dict[str, list[Utterance]] = {}
        for utterance in self.utterances:
            self.speakers.setdefault(utterance.speaker, []).append(utterance)

    def __len__(self) -> int:
        return len(self.utterances)

    @property
    def wordless(self) -> list[str]:
        """Utterances whose transcript is empty: scoring takes them, training leaves them out."""
        return [utterance.id for utterance in self.utterances if not utterance.words]

    def subset(self, keep: Callable[[Utterance], bool]) -> Corpus:
        return Corpus(self.folder, [utterance for utterance in self.utterances if keep(utterance)])


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Line:
    value: str
    where: str


def read_data_dir(folder: Path, *, allow_pipes: bool = False, need_text: bool = True, root: Path | None = None) -> Corpus:
    """The utterances of a Kaldi data directory.

    Paths in wav.scp are absolute, or relative to `root`, to the folder, or to its parent: the first that exists. With
    `need_text` every utterance must have a line in `text` (it may be empty); without, `text` may be missing altogether.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"there is no data directory {folder}", hint="give a folder with wav.scp, text and utt2spk")
    recordings = _table(folder / "wav.scp")
    segments = _table(folder / "segments") if (folder / "segments").exists() else None
    ids = segments if segments is not None else recordings
    if not ids:
        name = "wav.scp" if segments is None else "segments"
        raise DataError("the data directory holds no utterance", where=str(folder / name))
    sources = {id: _source(id, line, folder, root, allow_pipes) for id, line in recordings.items()}
    speakers = _speakers(folder, ids)
    text = _table(folder / "text", empty=True) if need_text or (folder / "text").exists() else {}
    _no_strangers(text, ids, "text")
    utterances = []
    for id, line in ids.items():
        if need_text and id not in text:
            raise DataError(
                f"utterance {id} has no transcript",
                where=f"{folder / 'text'} (the utterance is in {line.where})",
                hint=f"add a line '{id} THE WORDS', or take the utterance out",
            )
        recording, start, end = (id, 0.0, None) if segments is None else _segment(id, line, recordings)
        audio, command = sources[recording]
        words = tuple(text[id].value.split()) if id in text else ()
        utterances.append(Utterance(id, speakers[id], words, audio, start, end, command))
    return Corpus(folder, utterances)


def _table(path: Path, empty: bool = False) -> dict[str, _Line]:
    """The lines of a Kaldi file by their first word."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path.name} is missing", where=str(path.parent), hint=f"write {path.name}, one line each") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path.name}: {error}", where=str(path), hint="it must be a text file in UTF-8") from None
    found: dict[str, _Line] = {}
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        id, value = (*line.split(None, 1), "")[:2]
        value = value.strip()
        if not value and not empty:
            raise DataError(f"'{id}' stands alone", where=where, hint="every line is an identifier, a space and its value")
        if id in found:
            raise DataError(f"'{id}' stands there twice", where=f"{where} (first {found[id].where})", hint="remove one of them")
        found[id] = _Line(value, where)
    return found


def _source(id: str, line: _Line, folder: Path, root: Path | None, allow_pipes: bool) -> tuple[Path, str]:
    if line.value.endswith("|"):
        if not allow_pipes:
            raise DataError(
                f"the recording {id} is a command, and nothing in a data directory is run unless you allow it",
                where=line.where,
                hint="write the audio to files, or allow pipes if you trust this file",
            )
        return folder / "wav.scp", line.value[:-1].strip()
    bases = [folder, folder.resolve().parent] if root is None else [Path(root), folder, folder.resolve().parent]
    for base in bases:
        if (base / line.value).is_file():
            return base / line.value, ""
    raise DataError(
        f"there is no audio file {line.value} (recording {id})",
        where=line.where,
        hint="paths are absolute, or relative to the root you give, the data directory or its parent",
    )


def _speakers(folder: Path, ids: dict[str, _Line]) -> dict[str, str]:
    by_speaker = _table(folder / "spk2utt") if (folder / "spk2utt").exists() else None
    if by_speaker is not None and not (folder / "utt2spk").exists():
        table = {id: _Line(speaker, line.where) for speaker, line in by_speaker.items() for id in line.value.split()}
    else:
        table = _table(folder / "utt2spk")
    _no_strangers(table, ids, "utt2spk")
    for id, line in ids.items():
        if id not in table:
            raise DataError(
                f"utterance {id} has no speaker",
                where=f"{folder / 'utt2spk'} (the utterance is in {line.where})",
                hint=f"add a line '{id} SPEAKER'; where speakers are not known, '{id} {id}'",
            )
        if len(table[id].value.split()) != 1:
            raise DataError(f"'{table[id].value}' is not one speaker", where=table[id].where, hint="write 'UTTERANCE SPEAKER'")
    for speaker, line in (by_speaker or {}).items():
        for id in line.value.split():
            if id not in table or table[id].value != speaker:
                raise DataError(
                    f"spk2utt gives utterance {id} to {speaker}, utt2spk does not",
                    where=line.where,
                    hint="delete spk2utt: it is made from utt2spk",
                )
    return {id: line.value for id, line in table.items()}


def _segment(id: str, line: _Line, recordings: dict[str, _Line]) -> tuple[str, float, float | None]:
    parts = line.value.split()
    try:
        recording, start, end = parts[0], float(parts[1]), float(parts[2])
    except (IndexError, ValueError):
        raise DataError(f"segment {id} is not 'recording start end'", where=line.where, hint="times in seconds") from None
    if recording not in recordings:
        raise DataError(f"segment {id} is of recording {recording}, which wav.scp lacks", where=line.where)
    if end == -1.0:
        return recording, start, None
    if not (0 <= start < end < math.inf):
        raise DataError(f"segment {id} goes from {start} s to {end} s", where=line.where, hint="0 <= start < end, in seconds")
    return recording, start, end


def _no_strangers(table: dict[str, _Line], ids: dict[str, _Line], name: str) -> None:
    for id, line in table.items():
        if id not in ids:
            raise DataError(
                f"{name} speaks of utterance {id}, which has no audio",
                where=line.where,
                hint="remove the line, or add its audio",
            )


# ---------------------------------------------------------------------------------------------------------- writing


def write_data_dir(folder: Path, utterances: Iterable[Utterance]) -> Corpus:
    """Writes a Kaldi data directory; audio below the folder or its parent is named by relative paths."""
    corpus = Corpus(Path(folder), list(utterances))
    if len(corpus.by_id) != len(corpus):
        twice = [a.id for a, b in zip(corpus.utterances, corpus.utterances[1:], strict=False) if a.id == b.id]
        raise DataError(f"utterance {twice[0]} is there twice", where=str(folder))
    folder = corpus.folder
    folder.mkdir(parents=True, exist_ok=True)
    cut = any(utterance.start > 0 or utterance.end is not None for utterance in corpus.utterances)
    recordings: dict[str, str] = {}
    wav: dict[str, str] = {}
    segments = []
    for utterance in corpus.utterances:
        _writable(utterance)
        where = utterance.command + " |" if utterance.command else _named(utterance.audio, folder)
        if cut:
            recording = recordings.setdefault(where, f"recording-{utterance.id}")
            segments.append(f"{utterance.id} {recording} {utterance.start:.4f} {_end(utterance)}")
        wav[recording if cut else utterance.id] = where
    _write(folder / "wav.scp", (f"{id} {where}" for id, where in sorted(wav.items())))
    if cut:
        _write(folder / "segments", segments)
    else:
        (folder / "segments").unlink(missing_ok=True)
    _write(folder / "text", (" ".join((u.id, *u.words)) for u in corpus.utterances))
    _write(folder / "utt2spk", (f"{u.id} {u.speaker}" for u in corpus.utterances))
    _write(folder / "spk2utt", (" ".join((s, *(u.id for u in us))) for s, us in sorted(corpus.speakers.items())))
    return corpus


def _end(utterance: Utterance) -> str:
    return "-1" if utterance.end is None else f"{utterance.end:.4f}"


def _named(audio: Path, folder: Path) -> str:
    absolute = audio.resolve()
    for base in (folder.resolve(), folder.resolve().parent):
        if absolute.is_relative_to(base):
            return str(absolute.relative_to(base))
    return str(absolute)


def _writable(utterance: Utterance) -> None:
    for what in (utterance.id, utterance.speaker, *utterance.words):
        if not what or what.split() != [what]:
            raise DataError(
                f"'{what}' cannot stand in a Kaldi file", where=f"utterance {utterance.id}", hint="no empty names or spaces"
            )
    if "\n" in str(utterance.audio) + utterance.command:
        raise DataError("a file name with a line break cannot stand in wav.scp", where=f"utterance {utterance.id}")


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
