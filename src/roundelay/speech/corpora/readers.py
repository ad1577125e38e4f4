"""Corpora as their publishers lay them out: a folder in, sets of utterances out.

Every reader also takes a folder that holds Kaldi data directories (`train/wav.scp`, `test/wav.scp`, …) in place of the
publisher's own layout. Where a publisher gives no development set, `hold_out` takes one from the training set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from roundelay.errors import DataError, UsageError, did_you_mean
from roundelay.speech.corpora.data_dir import Utterance, read_data_dir

Sets = dict[str, list[Utterance]]

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
FSDD_TEST_TAKES = 5
"""The free-spoken-digit-dataset sets its first takes aside for testing."""
AUDIOMNIST_TEST_FROM = 49
"""Speakers from this number on are the test set here; the publisher gives cross-validation folds only."""


def read(kind: str, folder: Path) -> Sets:
    """The sets of a corpus."""
    if kind not in PUBLISHERS:
        raise UsageError(f"no reader for a corpus '{kind}'", where="corpus", hint=did_you_mean(kind, PUBLISHERS))
    if not folder.is_dir():
        raise DataError(
            "the corpus is not there",
            where=str(folder),
            hint=f"download it ({ADDRESSES[kind]}) and give its folder with root=…",
        )
    kaldi = sorted(p.parent for p in folder.glob("*/wav.scp"))
    if kaldi:
        return {p.name: read_data_dir(p, root=folder).utterances for p in kaldi}
    if kind == "kaldi":
        raise DataError(
            "no data directories (DIR/wav.scp) in this folder", where=str(folder), hint="make train/ and test/ in it"
        )
    sets = PUBLISHERS[kind](folder)
    if not any(sets.values()):
        raise DataError(
            f"this folder does not look like {kind} as its publisher lays it out",
            where=str(folder),
            hint=f"see {ADDRESSES[kind]}",
        )
    return {name: sorted(utterances, key=lambda u: u.id) for name, utterances in sets.items()}


def fsdd(folder: Path) -> Sets:
    """recordings/DIGIT_SPEAKER_TAKE.wav"""
    sets: Sets = {"train": [], "test": []}
    for path, match in files(folder, r"([0-9])_([a-z]+)_([0-9]+)\.wav"):
        digit, speaker, take = match.groups()
        where = "test" if int(take) < FSDD_TEST_TAKES else "train"
        sets[where].append(Utterance(f"{speaker}-{digit}-{int(take):02d}", speaker, (DIGITS[int(digit)],), path))
    return sets


def audiomnist(folder: Path) -> Sets:
    """data/SPEAKER/DIGIT_SPEAKER_TAKE.wav"""
    sets: Sets = {"train": [], "test": []}
    for path, match in files(folder, r"([0-9])_([0-9]{2})_([0-9]+)\.wav"):
        digit, speaker, take = match.groups()
        where = "test" if int(speaker) >= AUDIOMNIST_TEST_FROM else "train"
        sets[where].append(Utterance(f"am{speaker}-{digit}-{int(take):02d}", f"am{speaker}", (DIGITS[int(digit)],), path))
    return sets


def speech_commands(folder: Path) -> Sets:
    """WORD/SPEAKER_nohash_TAKE.wav, with validation_list.txt and testing_list.txt; the ten command words"""
    sets: Sets = {"train": [], "dev": [], "test": []}
    lists = {
        name: set((folder / file).read_text().split()) if (folder / file).is_file() else set()
        for name, file in (("dev", "validation_list.txt"), ("test", "testing_list.txt"))
    }
    if not lists["test"]:
        return sets
    for path, match in files(folder, r"([0-9a-f]+)_nohash_([0-9]+)\.wav"):
        word, (speaker, take) = path.parent.name, match.groups()
        if word not in COMMANDS:
            continue
        member = f"{word}/{path.name}"
        where = next((name for name, members in lists.items() if member in members), "train")
        sets[where].append(Utterance(f"{speaker}-{word}-{take}", speaker, (word.upper(),), path))
    return sets


def librispeech(folder: Path) -> Sets:
    """SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac with SPEAKER-CHAPTER.trans.txt beside"""
    sets: Sets = {"train": [], "dev": [], "test": []}
    for listing in sorted(folder.glob("*/*/*/*.trans.txt")):
        subset = listing.parents[2].name
        where = subset.split("-")[0]
        if where not in sets:
            continue
        for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
            name, _, text = line.partition(" ")
            audio = listing.parent / f"{name}.flac"
            if not text.strip():
                raise DataError(
                    f"utterance {name} has no transcript", where=f"{listing}:{number}", hint="mend or remove the line"
                )
            if not audio.is_file():
                raise DataError(
                    f"utterance {name} has no recording {audio.name}", where=f"{listing}:{number}", hint="unpack it again"
                )
            sets[where].append(Utterance(name, name.rsplit("-", 1)[0], tuple(text.split()), audio))
    return sets


def files(folder: Path, pattern: str) -> Iterator[tuple[Path, re.Match[str]]]:
    """Files below a folder whose name fits."""
    for path in sorted(folder.rglob("*.wav")):
        match = re.fullmatch(pattern, path.name)
        if match:
            yield path, match


PUBLISHERS: dict[str, Callable[[Path], Sets]] = {
    "kaldi": lambda folder: {},
    "fsdd": fsdd,
    "audiomnist": audiomnist,
    "speech_commands": speech_commands,
    "speechocean762": lambda folder: {},  # its publisher ships Kaldi data directories
    "librispeech": librispeech,
}
ADDRESSES = {
    "kaldi": "any folder of Kaldi data directories",
    "fsdd": "github.com/Jakobovski/free-spoken-digit-dataset",
    "audiomnist": "github.com/soerenab/AudioMNIST",
    "speech_commands": "Speech Commands v0.02, arXiv:1804.03209",
    "speechocean762": "openslr.org/101",
    "librispeech": "openslr.org/12, or openslr.org/31 for mini-LibriSpeech",
}


def hold_out(
    utterances: list[Utterance], share: float, seed: int, by: str = "speaker"
) -> tuple[list[Utterance], list[Utterance]]:
    """(kept, held out): whole speakers, or single utterances where speakers are few."""
    dice = np.random.default_rng([seed, 0xDE5])
    speakers = sorted({u.speaker for u in utterances})
    if by == "speaker" and len(speakers) >= 10:
        chosen = set(dice.permutation(speakers)[: max(1, round(share * len(speakers)))].tolist())
        held = {u.id for u in utterances if u.speaker in chosen}
    else:
        names = sorted(u.id for u in utterances)
        held = set(dice.permutation(names)[: max(1, round(share * len(names)))].tolist())
    return [u for u in utterances if u.id not in held], [u for u in utterances if u.id in held]
