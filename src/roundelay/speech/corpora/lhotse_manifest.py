"""lhotse manifests in: recordings and supervisions as JSON lines (.jsonl or .jsonl.gz), read without lhotse itself."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundelay.errors import DataError
from roundelay.speech.corpora.data_dir import Corpus, Utterance


def import_lhotse(recordings: Path, supervisions: Path, *, root: Path | None = None, allow_pipes: bool = False) -> Corpus:
    """The supervisions as utterances. Audio paths are absolute, or relative to `root` (given none: to the manifest's folder).

    Recordings must be single files of one channel; commands are refused unless pipes are allowed, addresses always.
    """
    sources: dict[str, tuple[Path, str]] = {}
    for where, item in _lines(Path(recordings)):
        sources[_text(item, "id", where)] = _source(item, Path(recordings), root, allow_pipes, where)
    utterances: dict[str, Utterance] = {}
    for where, item in _lines(Path(supervisions)):
        id, recording = _text(item, "id", where), _text(item, "recording_id", where)
        if recording not in sources:
            raise DataError(f"supervision {id} is of recording {recording}, which the manifest lacks", where=where)
        if id in utterances:
            raise DataError(f"supervision {id} stands there twice", where=where, hint="remove one of them")
        try:
            start, length = float(item.get("start", 0.0)), float(item["duration"])
        except (KeyError, TypeError, ValueError):
            raise DataError(f"supervision {id} has no start and duration in seconds", where=where) from None
        if not (start >= 0 and length > 0):
            raise DataError(f"supervision {id} starts at {start} s and lasts {length} s", where=where)
        words = str(item.get("text") or "").split()
        audio, command = sources[recording]
        utterances[id] = Utterance(id, str(item.get("speaker") or id), tuple(words), audio, start, start + length, command)
    if not utterances:
        raise DataError("the manifest holds no supervision", where=str(supervisions))
    return Corpus(Path(supervisions).parent, list(utterances.values()))


def _source(item: dict[str, Any], manifest: Path, root: Path | None, allow_pipes: bool, where: str) -> tuple[Path, str]:
    id, found = item["id"], item.get("sources")
    if not isinstance(found, list) or len(found) != 1 or found[0].get("channels") != [0]:
        raise DataError(
            f"recording {id} is not one file of one channel", where=where, hint="write its channels to files of their own"
        )
    kind, source = found[0].get("type"), str(found[0].get("source", ""))
    if kind == "command" and allow_pipes:
        return manifest, source.rstrip("| ")
    if kind != "file":
        raise DataError(
            f"recording {id} is a {kind}, not a file",
            where=where,
            hint="save the audio to files first" + (", or allow pipes if you trust the manifest" if kind == "command" else ""),
        )
    path = (root or manifest.parent) / source
    if not path.is_file():
        raise DataError(
            f"there is no audio file {path} (recording {id})", where=where, hint="name the folder its path starts from"
        )
    return path, ""


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                if not line.strip():
                    continue
                item = json.loads(line)
                if not isinstance(item, dict):
                    raise DataError("a line of a manifest must be an object", where=where)
                yield where, item
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"cannot read the manifest: {error}", where=str(path), hint="give a .jsonl or .jsonl.gz file") from None


def _text(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or value.split() != [value]:
        raise DataError(f"'{key}' is missing, or not one word", where=where)
    return value
