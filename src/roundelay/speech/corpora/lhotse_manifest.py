"""Read lhotse manifests without the lhotse package: recordings with supervisions, or cuts, as .jsonl or .jsonl.gz.

A folder of manifests is searched for the file names that lhotse's recipes write: PREFIX_recordings_PART.jsonl.gz with
PREFIX_supervisions_PART.jsonl.gz, or PREFIX_cuts_PART.jsonl.gz. PREFIX and PART may be missing. PART selects the set: train,
dev or test. Every supervision becomes an utterance.

Only the audio that the manifest describes literally is read: one file, one channel, no transforms. Mixed, padded and
multi-channel cuts are rejected.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from roundelay.errors import DataError
from roundelay.speech.corpora.utterance import Corpus, Sets, Utterance

FILE_NAME = re.compile(
    r"(?:(?P<prefix>.+)[_-])?(?P<manifest>recordings|supervisions|cuts)(?:[_-](?P<part>.+))?\.jsonl(?:\.gz)?"
)
SET_OF_PART = {
    "": "train", "train": "train", "dev": "dev", "val": "dev", "valid": "dev", "validation": "dev",
    "test": "test", "eval": "test",
}  # fmt: skip
"""Set of a manifest by the leading letters of its PART, such as "train" of "train-clean-100". Without PART it is train."""

_Source = tuple[Path, str]


def prepare_lhotse(folder: Path) -> Sets:
    """Return the sets described by the manifests in `folder`; manifests of the same set are merged.

    Relative audio paths start from `folder` or its parent. If a part has recordings with supervisions as well as cuts, the cuts
    are ignored. Raises DataError for an unknown PART, recordings without supervisions, or a malformed manifest.
    """
    manifests: dict[tuple[str, str], dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = FILE_NAME.fullmatch(path.name)
        if match:
            manifests.setdefault((match["prefix"] or "", match["part"] or ""), {})[match["manifest"]] = path
    sets: Sets = {}
    for (_, part), files in manifests.items():
        name = _set_of(part, next(iter(files.values())))
        if "recordings" in files and "supervisions" in files:
            corpus = read_manifests(files["recordings"], files["supervisions"])
        elif "cuts" in files:
            corpus = read_cuts(files["cuts"])
        else:
            (present, path), *_ = files.items()
            missing = "supervisions" if present == "recordings" else "recordings"
            raise DataError(
                f"the {present} manifest has no {missing} manifest",
                where=str(path),
                hint=f"add {path.name.replace(present, missing)}",
            )
        sets.setdefault(name, []).extend(corpus.utterances)
    return sets


def _set_of(part: str, path: Path) -> str:
    letters = "".join(takewhile(str.isalpha, part.lower()))
    name = SET_OF_PART.get(letters)
    if name is None or (part and not letters):
        raise DataError(
            f"the set of part '{part}' is unknown",
            where=str(path),
            hint="name manifests after their set, such as PREFIX_cuts_train.jsonl.gz; sets are train, dev and test",
        )
    return name


def read_manifests(recordings: Path, supervisions: Path, *, root: Path | None = None, allow_pipes: bool = False) -> Corpus:
    """Return the supervisions of a manifest as utterances.

    Audio paths are absolute, or relative to `root` if it is set, else to the folder of the manifest or its parent. Recordings
    of type `command` need `allow_pipes`. Raises DataError for other types, several channels, transforms, and inconsistent
    entries.
    """
    recordings, supervisions = Path(recordings), Path(supervisions)
    sources: dict[str, _Source] = {}
    for where, item in _lines(recordings):
        sources[_token(item, "id", where)] = _source(item, recordings, root, allow_pipes, where)
    utterances: dict[str, Utterance] = {}
    for where, item in _lines(supervisions):
        recording = _token(item, "recording_id", where)
        if recording not in sources:
            raise DataError(
                f"supervision {item.get('id')} refers to recording {recording}, which is not in the recordings manifest",
                where=where,
                hint=f"add the recording to {recordings.name}",
            )
        _add(utterances, item, sources[recording], 0.0, where)
    return _corpus(utterances, supervisions)


def read_cuts(cuts: Path, *, root: Path | None = None, allow_pipes: bool = False) -> Corpus:
    """Return the supervisions of a manifest of cuts as utterances. Cuts must be of type MonoCut and contain their recording.

    `root`, `allow_pipes` and errors are those of `read_manifests`.
    """
    cuts = Path(cuts)
    utterances: dict[str, Utterance] = {}
    for where, cut in _lines(cuts):
        id, kind, recording = _token(cut, "id", where), cut.get("type", "MonoCut"), cut.get("recording")
        if kind != "MonoCut" or not isinstance(recording, dict):
            what = f"is a {kind}" if kind != "MonoCut" else "has no recording"
            raise DataError(
                f"cut {id} must be a MonoCut with a recording (it {what})",
                where=where,
                hint="save the audio first: cuts.save_audios(...) in lhotse",
            )
        source = _source(recording, cuts, root, allow_pipes, where)
        start = _seconds(cut, "start", f"cut {id}", where)
        supervisions = cut.get("supervisions") or []
        if not isinstance(supervisions, list) or not all(isinstance(item, dict) for item in supervisions):
            raise DataError(f"the supervisions of cut {id} must be a list of objects", where=where)
        for item in supervisions:
            _add(utterances, item, source, start, where)
    return _corpus(utterances, cuts)


def _corpus(utterances: dict[str, Utterance], manifest: Path) -> Corpus:
    if not utterances:
        raise DataError("the manifest contains no supervision", where=str(manifest))
    return Corpus(manifest.parent, list(utterances.values()))


def _add(utterances: dict[str, Utterance], item: dict[str, Any], source: _Source, offset: float, where: str) -> None:
    """Add a supervision whose start is relative to `offset` seconds of the recording."""
    id = _token(item, "id", where)
    if id in utterances:
        raise DataError(f"duplicate supervision {id}", where=where, hint="remove one of the entries")
    start = offset + _seconds({"start": 0.0, **item}, "start", f"supervision {id}", where)
    duration = _seconds(item, "duration", f"supervision {id}", where)
    if not (start >= 0 and duration > 0):
        raise DataError(f"supervision {id} must have start >= 0 and duration > 0 (got {start} s and {duration} s)", where=where)
    words = str(item.get("text") or "").split()
    speaker = str(item.get("speaker") or id)
    audio, command = source
    utterances[id] = Utterance(id, speaker, tuple(words), audio, start, start + duration, command)


def _source(item: dict[str, Any], manifest: Path, root: Path | None, allow_pipes: bool, where: str) -> _Source:
    """Return the audio file of a recording, or the manifest and the command that prints the recording."""
    id, sources = _token(item, "id", where), item.get("sources")
    if (
        not isinstance(sources, list)
        or len(sources) != 1
        or not isinstance(sources[0], dict)
        or sources[0].get("channels") != [0]
    ):
        raise DataError(
            f"recording {id} must have one source with one channel", where=where, hint="write each channel to its own file"
        )
    if item.get("transforms"):
        raise DataError(
            f"recording {id} has transforms, which are not applied here",
            where=where,
            hint="save the transformed audio to files, or remove these entries and set speed_perturb in the recipe",
        )
    kind, source = sources[0].get("type"), str(sources[0].get("source", ""))
    if kind == "command" and allow_pipes:
        return manifest, source.rstrip("| ")
    if kind != "file":
        pipes = ", or allow pipes if you trust the manifest" if kind == "command" else ""
        raise DataError(
            f"recording {id} must be of type file (got {kind})", where=where, hint=f"save the audio to files first{pipes}"
        )
    bases = [Path(root)] if root else [manifest.parent, manifest.resolve().parent.parent]
    for base in bases:
        if (base / source).is_file():
            return base / source, ""
    raise DataError(
        f"no audio file {source} (recording {id})",
        where=where,
        hint="use absolute paths, or paths relative to the folder of the manifest or its parent",
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the object of every line of a manifest."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                if not line.strip():
                    continue
                item = json.loads(line)
                if not isinstance(item, dict):
                    raise DataError("a line of a manifest must be a JSON object", where=where)
                yield where, item
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"cannot read the manifest: {error}", where=str(path), hint="write it as .jsonl or .jsonl.gz") from None


def _token(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or value.split() != [value]:
        raise DataError(f"'{key}' must be one word (got {value!r})", where=where)
    return value


def _seconds(item: dict[str, Any], key: str, owner: str, where: str) -> float:
    try:
        return float(item[key])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{key} of {owner} must be in seconds (got {item.get(key)!r})", where=where) from None
