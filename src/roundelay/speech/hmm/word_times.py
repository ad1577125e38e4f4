"""Reference word times of a corpus, and the deviation of alignments from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import DataError
from roundelay.speech.hmm.align import Alignments
from roundelay.speech.hmm.model import seconds

FILE = "word_times"
"""File in a data directory: one line per word, in spoken order, with utterance, word, start and end in seconds."""


@dataclass(frozen=True)
class WordStartOffsets:
    """Aligned minus reference word starts."""

    words: int
    median_ms: float
    median_absolute_ms: float
    within_100_ms: float
    first_words_within_100_ms: float
    """Fraction of the first words of utterances, which follow the initial silence."""

    def line(self) -> str:
        """Return a one-line summary."""
        return (
            f"starts of {self.words} words: median {self.median_ms:+.0f} ms, {100 * self.within_100_ms:.1f} % within 100 ms "
            f"(first words {100 * self.first_words_within_100_ms:.1f} %)"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values rounded to 4 digits."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def read_word_times(path: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Return (word, start, end) of each word by utterance."""
    times: dict[str, list[tuple[str, float, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            utterance, word, start, end = line.split()
            times.setdefault(utterance, []).append((word, float(start), float(end)))
        except ValueError:
            raise DataError("a line must be 'utterance word start end'", where=f"{path}, line {number}") from None
    return times


def compare(alignments: Alignments, times: dict[str, list[tuple[str, float, float]]]) -> WordStartOffsets:
    """Compare word starts with the reference; DataError if an utterance has other words, or no word has a time."""
    offsets: list[float] = []
    firsts: list[float] = []
    for utterance in alignments.ids:
        expected, aligned = times.get(utterance, []), alignments.words(utterance)
        if [word for word, *_ in expected] != [word for word, *_ in aligned]:
            raise DataError(
                f"utterance {utterance} has different words in its alignment and its word times", where=str(alignments.folder)
            )
        differences = [seconds(frame) - start for (_, frame, _), (_, start, _) in zip(aligned, expected, strict=True)]
        offsets += differences
        firsts += differences[:1]
    if not offsets:
        raise DataError("no aligned word has a time to compare with", where=str(alignments.folder))
    values = np.array(offsets)
    return WordStartOffsets(
        len(offsets),
        1e3 * float(np.median(values)),
        1e3 * float(np.median(np.abs(values))),
        float((np.abs(values) <= 0.1).mean()),
        float((np.abs(firsts) <= 0.1).mean()),
    )
