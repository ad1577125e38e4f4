"""AudioMNIST: data/SPEAKER/DIGIT_SPEAKER_TAKE.wav."""

from __future__ import annotations

from pathlib import Path

from roundelay.speech.corpora.layout import DIGITS, matching_files
from roundelay.speech.corpora.utterance import Sets, Utterance

FIRST_TEST_SPEAKER = 49
"""Speakers from this number on are the test set. The corpus itself defines cross-validation folds only."""


def prepare_audiomnist(folder: Path) -> Sets:
    """Return the train and test sets of the corpus in `folder`. Sets without a matching file are empty."""
    sets: Sets = {"train": [], "test": []}
    for path, match in matching_files(folder, r"([0-9])_([0-9]{2})_([0-9]+)\.wav"):
        digit, speaker, take = match.groups()
        part = "test" if int(speaker) >= FIRST_TEST_SPEAKER else "train"
        sets[part].append(Utterance(f"am{speaker}-{digit}-{int(take):02d}", f"am{speaker}", (DIGITS[int(digit)],), path))
    return sets
