"""The free spoken digit dataset: recordings/DIGIT_SPEAKER_TAKE.wav."""

from __future__ import annotations

from pathlib import Path

from roundelay.speech.corpora.layout import DIGITS, matching_files
from roundelay.speech.corpora.utterance import Sets, Utterance

TEST_TAKES = 5
"""Takes 0 to 4 of every digit and speaker are the official test set."""


def prepare_fsdd(folder: Path) -> Sets:
    """Return the train and test sets of the corpus in `folder`. Sets without a matching file are empty."""
    sets: Sets = {"train": [], "test": []}
    for path, match in matching_files(folder, r"([0-9])_([a-z]+)_([0-9]+)\.wav"):
        digit, speaker, take = match.groups()
        part = "test" if int(take) < TEST_TAKES else "train"
        sets[part].append(Utterance(f"{speaker}-{digit}-{int(take):02d}", speaker, (DIGITS[int(digit)],), path))
    return sets
