"""Pronunciation lexicons: Kaldi's lexicon.txt and lexiconp.txt, and pronunciations of new words by espeak-ng.

A line holds a word and its phones, in lexiconp.txt with a probability between them. A word may have several lines.
Probabilities follow Kaldi: 1 for the most likely pronunciation of a word, less for the alternatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.hmm.arpabet import from_ipa

SILENCE = "SIL"
SILENCE_INDEX = 0
"""The index of silence among the phones of a model."""
MIN_RELATIVE_FREQUENCY = 0.15
"""`from_counts` drops pronunciations less frequent than this, relative to the word's most frequent one."""

Pronunciation = tuple[tuple[str, ...], float]


@dataclass
class Lexicon:
    """Words with their pronunciations and the probability of each."""

    entries: dict[str, list[Pronunciation]]

    @classmethod
    def read(cls, path: Path) -> Lexicon:
        """Read lexicon.txt or lexiconp.txt; DataError names the line of a mistake."""
        path = Path(path)
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the lexicon: {error}", where=str(path)) from None
        rows = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise DataError("the lexicon is empty", where=str(path))
        weighted = all(len(row) > 1 and _probability(row[1]) is not None for _, row in rows)
        entries: dict[str, list[Pronunciation]] = {}
        for number, (word, *rest) in rows:
            where = f"{path}, line {number}"
            probability = _probability(rest[0]) if weighted else 1.0
            phones = tuple(rest[1:] if weighted else rest)
            if not phones:
                raise DataError(f"the word '{word}' has no phones", where=where, hint="write WORD PHONE PHONE ...")
            if not weighted and any(_probability(phone) is not None for phone in phones):
                raise DataError(
                    f"'{word}' has a number among its phones", where=where, hint="give every line a probability, or none"
                )
            if probability is None or not 0 < probability <= 1:
                raise DataError(f"the probability of '{word}' must be above 0 and at most 1 (got {rest[0]})", where=where)
            variants = entries.setdefault(word, [])
            if any(phones == other for other, _ in variants):
                raise DataError(
                    f"the word '{word}' has the same pronunciation twice", where=where, hint="remove one of the lines"
                )
            variants.append((phones, probability))
        return cls(entries)

    def write(self, path: Path) -> None:
        """Write lexicon.txt, or lexiconp.txt if any probability differs from 1."""
        weighted = any(p != 1.0 for rows in self.entries.values() for _, p in rows)
        lines = [
            " ".join((word, *([f"{p:.4g}"] if weighted else []), *phones))
            for word, rows in sorted(self.entries.items())
            for phones, p in rows
        ]
        Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    @property
    def phones(self) -> list[str]:
        """All phones in use, sorted, without silence."""
        return sorted({phone for rows in self.entries.values() for phones, _ in rows for phone in phones} - {SILENCE})

    def missing(self, words: Iterable[str]) -> list[str]:
        """Return the words without pronunciation, sorted."""
        return sorted(set(words) - self.entries.keys())

    def require(self, words: Iterable[str], where: str) -> None:
        """Raise a DataError that names the words without pronunciation, if there are any."""
        absent = self.missing(words)
        if absent:
            more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
            raise DataError(
                f"{len(absent)} words have no pronunciation: {', '.join(absent[:10])}{more}",
                where=where,
                hint="add them to the lexicon; roundelay.speech.hmm.lexicon.pronounce makes entries for English words",
            )

    def merged(self, other: Lexicon) -> Lexicon:
        """Return these entries plus the other lexicon's entries for words that are not in this one."""
        return Lexicon({**other.entries, **self.entries})


def _probability(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def from_counts(
    counts: dict[str, dict[tuple[str, ...], int]], min_relative_frequency: float = MIN_RELATIVE_FREQUENCY
) -> Lexicon:
    """Build a lexicon from observed pronunciations; each word's most frequent one comes first, with probability 1."""
    entries: dict[str, list[Pronunciation]] = {}
    for word, variants in counts.items():
        most = max(variants.values())
        rows = sorted(((phones, n / most) for phones, n in variants.items()), key=lambda row: (-row[1], row[0]))
        entries[word] = [(phones, round(share, 3)) for phones, share in rows if share >= min_relative_frequency]
    return Lexicon(entries)


def pronounce(words: Iterable[str], accents: Sequence[str] = ("en-us",)) -> Lexicon:
    """Return pronunciations of English words by espeak-ng (extra `synth`), in isolation and within a sentence.

    Accents are voices of espeak-ng: en-us, en (British), en-gb-scotland, ... Several accents give words several variants.
    Raises DataError for a word that espeak-ng cannot pronounce, UsageError if espeak-ng is not installed.
    """
    from roundelay.speech.synth.espeak import phonemes

    unique = sorted(set(words))
    counts: dict[str, dict[tuple[str, ...], int]] = {word: {} for word in unique}
    for accent in accents:
        isolated = phonemes([word.lower() for word in unique], accent)
        embedded = phonemes([f"say {word.lower()} again" for word in unique], accent)
        for word, first, second in zip(unique, isolated, embedded, strict=True):
            parts = second.split()
            for ipa in [first.replace(" ", "")] + ([parts[1]] if len(parts) == 3 else []):
                phones = from_ipa(ipa)
                if not phones:
                    raise DataError(
                        f"espeak-ng does not know how to say '{word}'", where=f"accent {accent}", hint="write it by hand"
                    )
                counts[word][phones] = counts[word].get(phones, 0) + 1
    return from_counts(counts)
