"""LibriSpeech and mini-LibriSpeech: SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac and SPEAKER-CHAPTER.trans.txt."""

from __future__ import annotations

from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.corpora.utterance import Sets, Utterance


def prepare_librispeech(folder: Path) -> Sets:
    """Return the subsets in `folder`, merged by the first part of their names: train, dev, test.

    A chapter of a speaker counts as one speaker, as in Kaldi. Raises DataError if a transcript or a recording is missing.
    """
    sets: Sets = {"train": [], "dev": [], "test": []}
    for transcripts in sorted(folder.glob("*/*/*/*.trans.txt")):
        part = transcripts.parents[2].name.split("-")[0]
        if part not in sets:
            continue
        for number, line in enumerate(transcripts.read_text(encoding="utf-8").splitlines(), 1):
            id, _, text = line.partition(" ")
            audio = transcripts.parent / f"{id}.flac"
            where = f"{transcripts}:{number}"
            if not text.strip():
                raise DataError(f"utterance {id} has no transcript", where=where, hint="correct or remove the line")
            if not audio.is_file():
                raise DataError(f"utterance {id} has no recording {audio.name}", where=where, hint="unpack the corpus again")
            sets[part].append(Utterance(id, id.rsplit("-", 1)[0], tuple(text.split()), audio))
    return sets
