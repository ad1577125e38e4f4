"""Word error rate: error counts, bootstrap intervals over speakers, paired comparison, confusions, transcript files.

Counts agree with sclite; `costs="kaldi"` gives those of Kaldi's compute-wer, which differ only where a long shift has two
explanations. A reference without a hypothesis counts as deletions and is listed in `missing`.

Intervals resample speakers, not utterances: errors of one speaker's utterances are correlated, and an interval that ignores
this is several times too narrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roundelay.errors import DataError
from roundelay.speech.edit_distance import EPSILON_WORD, Costs, align

Words = Sequence[str]
Texts = dict[str, tuple[str, ...]]

REPLICATIONS = 10_000


@dataclass(frozen=True)
class Errors:
    """Error counts of one utterance, or the sum over several."""

    words: int = 0
    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    utterances: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            self.words + other.words,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.substitutions + other.substitutions,
            self.utterances + other.utterances,
        )

    @property
    def total(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def wer(self) -> float:
        """Word error rate in percent; infinite if there are errors but no reference words."""
        if self.words:
            return 100.0 * self.total / self.words
        return float("inf") if self.total else 0.0


@dataclass(frozen=True)
class Interval:
    """A confidence interval of the word error rate, and the units that were resampled."""

    low: float
    high: float
    level: float
    units: Literal["speakers", "utterances"]
    count: int

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f} ({100 * self.level:g} %, over {self.count} {self.units})"


@dataclass(frozen=True)
class Confusion:
    """A confused pair of words; `ref` is empty for an insertion, `hyp` for a deletion."""

    ref: str
    hyp: str
    count: int

    def __str__(self) -> str:
        return f"{self.count:6d}  {self.ref or '(nothing)'} -> {self.hyp or '(nothing)'}"


@dataclass(frozen=True)
class Score:
    """The errors of a system on a set of utterances.

    missing: references without a hypothesis; extra: hypotheses without a reference, which are not counted.
    """

    by_utterance: dict[str, Errors]
    speakers: dict[str, str]
    pairs: Counter[tuple[str, str]] = field(repr=False)
    missing: list[str]
    extra: list[str]

    @cached_property
    def errors(self) -> Errors:
        return sum(self.by_utterance.values(), Errors())

    @property
    def words(self) -> int:
        return self.errors.words

    @property
    def utterances(self) -> int:
        return self.errors.utterances

    @property
    def insertions(self) -> int:
        return self.errors.insertions

    @property
    def deletions(self) -> int:
        return self.errors.deletions

    @property
    def substitutions(self) -> int:
        return self.errors.substitutions

    @property
    def wer(self) -> float:
        return self.errors.wer

    def line(self) -> str:
        """Return Kaldi's %WER line."""
        e = self.errors
        return (
            f"%WER {e.wer:.2f} [ {e.total} / {e.words}, {e.insertions} ins, {e.deletions} del, {e.substitutions} sub ]"
            f"{self._missing_note()}"
        )

    def _missing_note(self) -> str:
        return f" [{len(self.missing)} utterances without hypothesis]" if self.missing else ""

    def by_speaker(self) -> dict[str, Errors]:
        """Return the errors of each speaker, sorted by name."""
        return _by_speaker(self.by_utterance, self.speakers)

    def interval(self, level: float = 0.95, *, seed: int = 0, replications: int = REPLICATIONS) -> Interval:
        """Return the percentile bootstrap interval over speakers; over utterances if there is only one speaker."""
        units, grouped = _units(self.by_utterance, self.speakers)
        wrong = np.array([e.total for e in grouped.values()], np.float64)
        words = np.array([e.words for e in grouped.values()], np.float64)
        draws = _draws(len(words), seed, replications)
        low, high = _percentiles(_rates(draws, wrong, words), level)
        return Interval(low, high, level, units, len(words))

    def confusions(self, count: int = 20) -> list[Confusion]:
        """Return the most frequent errors, including insertions and deletions."""
        worst = sorted(self.pairs.items(), key=lambda pair: (-pair[1], pair[0]))[:count]
        return [Confusion(ref, hyp, times) for (ref, hyp), times in worst]

    def table(self) -> str:
        """Return a table with one line per speaker, highest error rate first, and the sum."""
        rows = sorted(self.by_speaker().items(), key=lambda row: (-row[1].wer, row[0]))
        width = max([len("speaker"), *(len(name) for name, _ in rows)])
        lines = [f"{'speaker':<{width}}  utts   words    ins    del    sub     WER"]
        for name, e in [*rows, ("all", self.errors)]:
            kinds = f"{e.insertions:6d} {e.deletions:6d} {e.substitutions:6d}"
            lines.append(f"{name:<{width}} {e.utterances:5d} {e.words:7d} {kinds} {e.wer:7.2f}")
        return "\n".join(lines)

    def as_json(self, *, level: float = 0.95, seed: int = 0) -> dict[str, Any]:
        """Return rate, interval and counts with plain keys."""
        interval = self.interval(level, seed=seed)
        return {
            "wer": round(self.wer, 4),
            "low": round(interval.low, 4),
            "high": round(interval.high, 4),
            "words": self.words,
            "utterances": self.utterances,
            "speakers": len(set(self.speakers.values())),
            "insertions": self.insertions,
            "deletions": self.deletions,
            "substitutions": self.substitutions,
            "missing": len(self.missing),
        }


@dataclass(frozen=True)
class PairedComparison:
    """System b compared with system a on the same utterances, in points of word error rate, b minus a."""

    difference: float
    low: float
    high: float
    better_probability: float
    """Fraction of the resampled sets of speakers where b has fewer errors than a; ties count one half."""
    level: float
    units: Literal["speakers", "utterances"]
    count: int

    def __str__(self) -> str:
        return (
            f"{self.difference:+.2f} points ({self.low:+.2f} to {self.high:+.2f}, {100 * self.level:g} %, over {self.count} "
            f"{self.units}), better with probability {self.better_probability:.3f}"
        )


def score(
    refs: Mapping[str, Words],
    hyps: Mapping[str, Words],
    speakers: Mapping[str, str] | None = None,
    *,
    costs: Costs = "sclite",
) -> Score:
    """Score hypotheses against references. Without `speakers` each utterance counts as its own speaker.

    Raises DataError without any reference word, or if `speakers` lacks an utterance.
    """
    if not refs:
        raise DataError("there are no references to score against", hint="pass the transcripts of the decoded set")
    if not any(refs.values()):
        raise DataError(
            "the references contain no words, so the word error rate is undefined",
            where=f"{len(refs)} empty transcripts",
            hint="check the text",
        )
    speaker_of = _speakers_of(refs, speakers)
    pairs: Counter[tuple[str, str]] = Counter()
    by_utterance: dict[str, Errors] = {}
    for utterance in sorted(refs):
        by_utterance[utterance] = _errors(refs[utterance], hyps.get(utterance, ()), pairs, costs)
    missing = sorted(set(refs) - set(hyps))
    extra = sorted(set(hyps) - set(refs))
    return Score(by_utterance, speaker_of, pairs, missing, extra)


def paired(
    refs: Mapping[str, Words],
    hyps_a: Mapping[str, Words] | Sequence[Mapping[str, Words]],
    hyps_b: Mapping[str, Words] | Sequence[Mapping[str, Words]],
    speakers: Mapping[str, str] | None = None,
    seed: int = 0,
    *,
    level: float = 0.95,
    replications: int = REPLICATIONS,
    costs: Costs = "sclite",
) -> PairedComparison:
    """Compare system b with system a by a paired bootstrap: both systems are scored on the same resampled speakers.

    A system may consist of several runs (for example seeds); their errors are averaged per utterance. The interval then holds
    for these runs: it covers the variation between speakers, not between seeds.
    """
    runs_a = [hyps_a] if isinstance(hyps_a, Mapping) else list(hyps_a)
    runs_b = [hyps_b] if isinstance(hyps_b, Mapping) else list(hyps_b)
    if not runs_a or not runs_b:
        raise DataError("a comparison needs at least one run of each system (got none)")
    scores_a = [score(refs, run, speakers, costs=costs) for run in runs_a]
    scores_b = [score(refs, run, speakers, costs=costs) for run in runs_b]
    units, grouped = _units(scores_a[0].by_utterance, scores_a[0].speakers)
    words = np.array([e.words for e in grouped.values()], np.float64)
    wrong_a, wrong_b = _mean_errors(scores_a), _mean_errors(scores_b)
    draws = _draws(len(words), seed, replications)
    differences = _rates(draws, wrong_b - wrong_a, words)
    low, high = _percentiles(differences, level)
    better = float(np.mean(differences < 0) + 0.5 * np.mean(differences == 0))
    observed = 100.0 * float((wrong_b - wrong_a).sum() / words.sum())
    return PairedComparison(observed, low, high, better, level, units, len(words))


def _mean_errors(scores: list[Score]) -> np.ndarray:
    per_run = [[e.total for e in _units(s.by_utterance, s.speakers)[1].values()] for s in scores]
    return np.mean(np.array(per_run, np.float64), axis=0)


def _errors(ref: Words, hyp: Words, pairs: Counter[tuple[str, str]], costs: Costs) -> Errors:
    insertions = deletions = substitutions = 0
    for ref_word, hyp_word in align(ref, hyp, costs):
        if ref_word == hyp_word:
            continue
        pairs[ref_word, hyp_word] += 1
        if ref_word == EPSILON_WORD:
            insertions += 1
        elif hyp_word == EPSILON_WORD:
            deletions += 1
        else:
            substitutions += 1
    return Errors(len(ref), insertions, deletions, substitutions, 1)


def _speakers_of(refs: Mapping[str, Words], speakers: Mapping[str, str] | None) -> dict[str, str]:
    if speakers is None:
        return {utterance: utterance for utterance in refs}
    unknown = [utterance for utterance in refs if utterance not in speakers]
    if unknown:
        raise DataError(
            f"utterance '{unknown[0]}' has no speaker ({len(unknown)} such utterances)",
            hint="complete utt2spk, or score without speakers",
        )
    return {utterance: speakers[utterance] for utterance in refs}


def _by_speaker(by_utterance: dict[str, Errors], speakers: dict[str, str]) -> dict[str, Errors]:
    sums: dict[str, Errors] = {}
    for utterance, errors in by_utterance.items():
        speaker = speakers[utterance]
        sums[speaker] = sums.get(speaker, Errors()) + errors
    return dict(sorted(sums.items()))


def _units(
    by_utterance: dict[str, Errors], speakers: dict[str, str]
) -> tuple[Literal["speakers", "utterances"], dict[str, Errors]]:
    """Return the units to resample: speakers, or utterances if there is only one speaker."""
    grouped = _by_speaker(by_utterance, speakers)
    if len(grouped) < 2 or list(grouped) == sorted(by_utterance):
        return "utterances", dict(sorted(by_utterance.items()))
    return "speakers", grouped


def _draws(units: int, seed: int, replications: int) -> np.ndarray:
    """Return how often each unit occurs in each resampled set, [replications, units]."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.multinomial(units, np.full(units, 1.0 / units), size=replications).astype(np.float64)


def _rates(draws: np.ndarray, errors: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the error rate of each resampled set in percent; sets without any word are left out."""
    totals = draws @ words
    nonempty = totals > 0
    return 100.0 * (draws @ errors)[nonempty] / totals[nonempty]


def _percentiles(values: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


# --------------------------------------------------------------------------------------------------- transcript files


def read_text(path: str | Path) -> Texts:
    """Read Kaldi's text file; a line with only an id is an empty transcript. DataError names the line of a mistake."""
    texts: Texts = {}
    for number, line in _lines(path):
        name, *words = line.split()
        if name in texts:
            raise DataError(
                f"utterance '{name}' occurs twice",
                where=f"{path}, line {number}",
                hint="keep one transcript of each utterance",
            )
        texts[name] = tuple(words)
    return texts


def write_text(path: str | Path, texts: Mapping[str, Sequence[str]]) -> None:
    """Write Kaldi's text file, sorted by utterance."""
    lines = (" ".join([name, *words]) for name, words in sorted(texts.items()))
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the transcripts cannot be read: {error.strerror}", where=str(path), hint="check the path") from None
    except UnicodeDecodeError as error:
        raise DataError("the transcripts are not UTF-8", where=f"{path}, byte {error.start}", hint="convert the file") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line
