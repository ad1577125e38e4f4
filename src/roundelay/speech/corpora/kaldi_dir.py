"""Read and write Kaldi data directories: wav.scp, text, utt2spk, spk2utt, segments.

Files may be in any order; utterances are returned sorted by id. Every error names the file and the line. A wav.scp that
contains commands ("sph2pipe ... |") is rejected unless pipes are allowed: reading a data directory must not execute its
content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from roundelay.errors import DataError, reading
from roundelay.speech.corpora.utterance import Corpus, Sets, Utterance

# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Line:
    value: str
    where: str


def prepare_kaldi_dirs(folder: Path) -> Sets:
    """Return one set for each data directory in `folder`, named after it. Without any, return no sets."""
    return {p.parent.name: read_data_dir(p.parent, root=folder).utterances for p in sorted(folder.glob("*/wav.scp"))}


def read_data_dir(folder: Path, *, allow_pipes: bool = False, need_text: bool = True, root: Path | None = None) -> Corpus:
    """Return the utterances of a Kaldi data directory.

    Paths in wav.scp are absolute, or relative to `root`, to `folder` or to its parent: the first that exists is used. With
    `need_text` every utterance needs a line in `text`, which may be empty. Otherwise `text` may be missing.

    Raises DataError for a missing file, an inconsistent line, or a command in wav.scp unless `allow_pipes` is set.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"no data directory {folder}", hint="name a folder with wav.scp, text and utt2spk")
    recordings = _table(folder / "wav.scp")
    segments = _table(folder / "segments") if (folder / "segments").exists() else None
    ids = segments if segments is not None else recordings
    if not ids:
        name = "wav.scp" if segments is None else "segments"
        raise DataError("the data directory contains no utterance", where=str(folder / name))
    sources = {id: _source(id, line, folder, root, allow_pipes) for id, line in recordings.items()}
    speakers = _speakers(folder, ids)
    text = _table(folder / "text", empty=True) if need_text or (folder / "text").exists() else {}
    _require_listed(text, ids, "text")
    utterances = []
    for id, line in ids.items():
        if need_text and id not in text:
            raise DataError(
                f"utterance {id} has no transcript",
                where=f"{folder / 'text'} (the utterance is in {line.where})",
                hint=f"add a line '{id} THE WORDS', or remove the utterance",
            )
        recording, start, end = (id, 0.0, None) if segments is None else _segment(id, line, recordings)
        audio, command = sources[recording]
        words = tuple(text[id].value.split()) if id in text else ()
        utterances.append(Utterance(id, speakers[id], words, audio, start, end, command))
    return Corpus(folder, utterances)


def _table(path: Path, empty: bool = False) -> dict[str, _Line]:
    """Return the lines of a Kaldi file by their first word. With `empty` the rest of a line may be empty."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(
            f"{path.name} is missing", where=str(path.parent), hint=f"write {path.name}, one line per entry"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path.name}: {error}", where=str(path), hint="encode the file as UTF-8 text") from None
    lines: dict[str, _Line] = {}
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        id, value = (*line.split(None, 1), "")[:2]
        value = value.strip()
        if not value and not empty:
            raise DataError(
                f"'{id}' has no value", where=where, hint="write an identifier, a space and its value on every line"
            )
        if id in lines:
            raise DataError(
                f"duplicate entry '{id}'", where=f"{where} (first {lines[id].where})", hint="remove one of the lines"
            )
        lines[id] = _Line(value, where)
    return lines


def _source(id: str, line: _Line, folder: Path, root: Path | None, allow_pipes: bool) -> tuple[Path, str]:
    """Return the audio file of a recording, or wav.scp and the command that prints the recording."""
    if line.value.endswith("|"):
        if not allow_pipes:
            raise DataError(
                f"recording {id} is a command, and pipes are not allowed",
                where=line.where,
                hint="write the audio to files, or allow pipes if you trust this file",
            )
        return folder / "wav.scp", line.value[:-1].strip()
    bases = [folder, folder.resolve().parent] if root is None else [Path(root), folder, folder.resolve().parent]
    with reading(f"the path of recording {id}", line.where, "correct the path"):
        for base in bases:
            if (base / line.value).is_file():
                return base / line.value, ""
    raise DataError(
        f"no audio file {line.value} (recording {id})",
        where=line.where,
        hint="use absolute paths, or paths relative to root, to the data directory or to its parent",
    )


def _speakers(folder: Path, ids: dict[str, _Line]) -> dict[str, str]:
    """Return the speaker of every utterance from utt2spk, or from spk2utt if there is no utt2spk."""
    by_speaker = _table(folder / "spk2utt") if (folder / "spk2utt").exists() else None
    if by_speaker is not None and not (folder / "utt2spk").exists():
        table = {id: _Line(speaker, line.where) for speaker, line in by_speaker.items() for id in line.value.split()}
    else:
        table = _table(folder / "utt2spk")
    _require_listed(table, ids, "utt2spk")
    for id, line in ids.items():
        if id not in table:
            raise DataError(
                f"utterance {id} has no speaker",
                where=f"{folder / 'utt2spk'} (the utterance is in {line.where})",
                hint=f"add a line '{id} SPEAKER'; if the speaker is unknown, '{id} {id}'",
            )
        if len(table[id].value.split()) != 1:
            raise DataError(
                f"the speaker of utterance {id} must be one word (got '{table[id].value}')",
                where=table[id].where,
                hint="write 'UTTERANCE SPEAKER'",
            )
    for speaker, line in (by_speaker or {}).items():
        for id in line.value.split():
            if id not in table or table[id].value != speaker:
                raise DataError(
                    f"spk2utt assigns utterance {id} to {speaker}, utt2spk does not",
                    where=line.where,
                    hint="delete spk2utt, which is derived from utt2spk",
                )
    return {id: line.value for id, line in table.items()}


def _segment(id: str, line: _Line, recordings: dict[str, _Line]) -> tuple[str, float, float | None]:
    """Return recording, start and end of a segment in seconds. An end of -1 is the end of the recording."""
    parts = line.value.split()
    try:
        recording, start, end = parts[0], float(parts[1]), float(parts[2])
    except (IndexError, ValueError):
        raise DataError(
            f"segment {id} must be 'RECORDING START END' (got '{line.value}')", where=line.where, hint="write times in seconds"
        ) from None
    if recording not in recordings:
        raise DataError(f"segment {id} refers to recording {recording}, which is not in wav.scp", where=line.where)
    if end == -1.0 and 0 <= start < math.inf:
        return recording, start, None
    if not (0 <= start < end < math.inf):
        raise DataError(
            f"segment {id} must satisfy 0 <= start < end (got {start} s to {end} s)",
            where=line.where,
            hint="write times in seconds",
        )
    return recording, start, end


def _require_listed(table: dict[str, _Line], ids: dict[str, _Line], name: str) -> None:
    """Raise DataError if the file `name` has a line for an utterance without audio."""
    for id, line in table.items():
        if id not in ids:
            raise DataError(
                f"{name} names utterance {id}, which has no audio",
                where=line.where,
                hint="remove the line, or add its audio",
            )


# ---------------------------------------------------------------------------------------------------------- writing


def write_data_dir(folder: Path, utterances: Iterable[Utterance]) -> Corpus:
    """Write a Kaldi data directory and return its corpus.

    Audio below `folder` or its parent is written as a relative path. Raises DataError for duplicate ids and for names that a
    Kaldi file cannot contain.
    """
    corpus = Corpus(Path(folder), list(utterances))
    if len(corpus.by_id) != len(corpus):
        duplicate = next(a.id for a, b in zip(corpus.utterances, corpus.utterances[1:], strict=False) if a.id == b.id)
        raise DataError(f"duplicate utterance {duplicate}", where=str(folder))
    folder = corpus.folder
    folder.mkdir(parents=True, exist_ok=True)
    segmented = any(utterance.start > 0 or utterance.end is not None for utterance in corpus.utterances)
    recordings: dict[str, str] = {}
    wav: dict[str, str] = {}
    segments = []
    for utterance in corpus.utterances:
        _check_writable(utterance)
        source = utterance.command + " |" if utterance.command else _relative_path(utterance.audio, folder)
        if segmented:
            recording = recordings.setdefault(source, f"recording-{utterance.id}")
            segments.append(f"{utterance.id} {recording} {utterance.start:.4f} {_end(utterance)}")
        wav[recording if segmented else utterance.id] = source
    _write(folder / "wav.scp", (f"{id} {source}" for id, source in sorted(wav.items())))
    if segmented:
        _write(folder / "segments", segments)
    else:
        (folder / "segments").unlink(missing_ok=True)
    _write(folder / "text", (" ".join((u.id, *u.words)) for u in corpus.utterances))
    _write(folder / "utt2spk", (f"{u.id} {u.speaker}" for u in corpus.utterances))
    _write(folder / "spk2utt", (" ".join((s, *(u.id for u in us))) for s, us in sorted(corpus.speakers.items())))
    return corpus


def _end(utterance: Utterance) -> str:
    return "-1" if utterance.end is None else f"{utterance.end:.4f}"


def _relative_path(audio: Path, folder: Path) -> str:
    """Return the path of `audio` relative to `folder` or its parent if it is below one of them, else the absolute path."""
    absolute = audio.resolve()
    for base in (folder.resolve(), folder.resolve().parent):
        if absolute.is_relative_to(base):
            return str(absolute.relative_to(base))
    return str(absolute)


def _check_writable(utterance: Utterance) -> None:
    for token in (utterance.id, utterance.speaker, *utterance.words):
        if not token or token.split() != [token]:
            raise DataError(
                f"'{token}' cannot be written to a Kaldi file",
                where=f"utterance {utterance.id}",
                hint="use names and words that are not empty and contain no space",
            )
    if "\n" in str(utterance.audio) + utterance.command:
        raise DataError("a file name with a line break cannot be written to wav.scp", where=f"utterance {utterance.id}")


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
