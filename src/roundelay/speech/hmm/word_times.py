"""Where words really begin, for corpora that know it, and how far alignments are from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import DataError
from roundelay.speech.hmm.align import Alignments
from roundelay.speech.hmm.hmm import seconds

FILE = "word_times"
"""In a data directory: utterance, word, seconds of its start and end, a line each in spoken order."""


@dataclass(frozen=True)
class Offsets:
    """Aligned minus true word starts."""

    words: int
    median_ms: float
    median_absolute_ms: float
    within_100_ms: float
    first_words_within_100_ms: float
    """Share of the utterances' first words: those that follow the pause at the beginning."""

    def line(self) -> str:
        return (
            f"starts of {self.words} words: median {self.median_ms:+.0f} ms, {100 * self.within_100_ms:.1f} % within 100 ms "
            f"(first words {100 * self.first_words_within_100_ms:.1f} %)"
        )

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def read_word_times(path: Path) -> dict[str, list[tuple[str, float, float]]]:
    """(word, start, end) of every word by utterance."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            utterance, word, start, end = line.split()
            found.setdefault(utterance, []).append((word, float(start), float(end)))
        except ValueError:
            raise DataError("a line is not 'utterance word start end'", where=f"{path}, line {number}") from None
    return found


def compare(alignments: Alignments, times: dict[str, list[tuple[str, float, float]]]) -> Offsets:
    """How far the words' starts are from where they should be, over the utterances that have both."""
    offsets: list[float] = []
    firsts: list[float] = []
    for utterance in alignments.ids:
        true, aligned = times.get(utterance, []), alignments.words(utterance)
        if [word for word, *_ in true] != [word for word, *_ in aligned]:
            raise DataError(f"utterance {utterance} has other words than its word times", where=str(alignments.folder))
        found = [seconds(frame) - start for (_, frame, _), (_, start, _) in zip(aligned, true, strict=True)]
        offsets += found
        firsts += found[:1]
    if not offsets:
        raise DataError("no aligned word has a time to compare with", where=str(alignments.folder))
    all_of_them = np.array(offsets)
    return Offsets(
        len(offsets),
        1e3 * float(np.median(all_of_them)),
        1e3 * float(np.median(np.abs(all_of_them))),
        float((np.abs(all_of_them) <= 0.1).mean()),
        float((np.abs(firsts) <= 0.1).mean()),
    )
