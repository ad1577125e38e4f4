"""Pronunciations: Kaldi's lexicon.txt and lexiconp.txt in and out, and new words pronounced by espeak-ng.

Each line is a word and its phones, in lexiconp.txt with a probability between; a word may have several lines. Probabilities are
Kaldi's: 1 for the likeliest pronunciation of a word, less for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roundelay.errors import DataError
from roundelay.speech.hmm.arpabet import from_ipa

SILENCE = "SIL"
LEAST_SHARE = 0.15
"""A pronunciation heard less often than this, as a share of its word's likeliest, is left out of a lexicon made by counting."""

Pronunciation = tuple[tuple[str, ...], float]


@dataclass
class Lexicon:
    entries: dict[str, list[Pronunciation]]

    @classmethod
    def read(cls, path: Path) -> Lexicon:
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
                raise DataError(f"the probability {rest[0]} of '{word}' is not between 0 and 1", where=where)
            known = entries.setdefault(word, [])
            if any(phones == other for other, _ in known):
                raise DataError(
                    f"the word '{word}' has the same pronunciation twice", where=where, hint="remove one of the lines"
                )
            known.append((phones, probability))
        return cls(entries)

    def write(self, path: Path) -> None:
        """lexicon.txt, or lexiconp.txt if any pronunciation is less likely than another."""
        weighted = any(p != 1.0 for rows in self.entries.values() for _, p in rows)
        lines = [
            " ".join((word, *([f"{p:.4g}"] if weighted else []), *phones))
            for word, rows in sorted(self.entries.items())
            for phones, p in rows
        ]
        Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    @property
    def phones(self) -> list[str]:
        """Every phone in use, sorted, without silence."""
        return sorted({phone for rows in self.entries.values() for phones, _ in rows for phone in phones} - {SILENCE})

    def missing(self, words: Iterable[str]) -> list[str]:
        """Words without pronunciation, sorted."""
        return sorted(set(words) - self.entries.keys())

    def require(self, words: Iterable[str], where: str) -> None:
        """DataError that names the words without pronunciation, if there are any."""
        absent = self.missing(words)
        if absent:
            more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
            raise DataError(
                f"{len(absent)} words have no pronunciation: {', '.join(absent[:10])}{more}",
                where=where,
                hint="add them to the lexicon; roundelay.speech.hmm.lexicon.pronounce makes entries for English words",
            )

    def prune(self, words: Iterable[str]) -> Lexicon:
        """Only these words (those of them it has)."""
        kept = set(words)
        return Lexicon({word: rows for word, rows in self.entries.items() if word in kept})

    def merged(self, other: Lexicon) -> Lexicon:
        """These entries, and those of the other for words that are not here."""
        return Lexicon({**other.entries, **self.entries})


def _probability(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def from_counts(counts: dict[str, dict[tuple[str, ...], int]], least_share: float = LEAST_SHARE) -> Lexicon:
    """Pronunciations as often as they were heard, the likeliest of each word first."""
    entries: dict[str, list[Pronunciation]] = {}
    for word, heard in counts.items():
        most = max(heard.values())
        rows = sorted(((phones, n / most) for phones, n in heard.items()), key=lambda row: (-row[1], row[0]))
        entries[word] = [(phones, round(share, 3)) for phones, share in rows if share >= least_share]
    return Lexicon(entries)


def pronounce(words: Iterable[str], accents: Sequence[str] = ("en-us",)) -> Lexicon:
    """Pronunciations of English words by espeak-ng (extra `synth`): each as it sounds alone and within a sentence.

    Accents are voices of espeak-ng: en-us, en (British), en-gb-scotland, ...; with several, words get their variants.
    """
    from roundelay.speech.synth.espeak import phonemes

    wanted = sorted(set(words))
    counts: dict[str, dict[tuple[str, ...], int]] = {word: {} for word in wanted}
    for accent in accents:
        alone = phonemes([word.lower() for word in wanted], accent)
        within = phonemes([f"say {word.lower()} again" for word in wanted], accent)
        for word, first, second in zip(wanted, alone, within, strict=True):
            parts = second.split()
            for ipa in [first.replace(" ", "")] + ([parts[1]] if len(parts) == 3 else []):
                phones = from_ipa(ipa)
                if not phones:
                    raise DataError(
                        f"espeak-ng does not know how to say '{word}'", where=f"accent {accent}", hint="write it by hand"
                    )
                counts[word][phones] = counts[word].get(phones, 0) + 1
    return from_counts(counts)
