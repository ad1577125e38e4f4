"""Word error rate: errors by kind, intervals over speakers, paired comparison, confusions, tables, and transcripts in files.

The counts are those sclite prints; `costs="kaldi"` gives those of Kaldi's compute-wer, which differ only where a long shift
can be explained in two ways. A reference without a hypothesis counts as deletions and is listed.

Intervals resample speakers, not utterances: the utterances of one speaker are easy or hard together, and an interval
that ignores this is several times too narrow.
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
from roundelay.speech.edit_distance import NOTHING, Costs, align

Words = Sequence[str]
Texts = dict[str, tuple[str, ...]]

REPLICATIONS = 10_000


@dataclass(frozen=True)
class Errors:
    """What went wrong in one utterance, or in many added up."""

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
        """Percent; infinite where words were inserted into nothing."""
        if self.words:
            return 100.0 * self.total / self.words
        return float("inf") if self.total else 0.0


@dataclass(frozen=True)
class Interval:
    """A range that holds the figure with the given level, and what was resampled to find it."""

    low: float
    high: float
    level: float
    units: Literal["speakers", "utterances"]
    count: int

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f} ({100 * self.level:g} %, over {self.count} {self.units})"


@dataclass(frozen=True)
class Confusion:
    """A word that was taken for another; `said` is empty for an insertion, `heard` for a deletion."""

    said: str
    heard: str
    count: int

    def __str__(self) -> str:
        return f"{self.count:6d}  {self.said or '(nothing)'} -> {self.heard or '(nothing)'}"


@dataclass(frozen=True)
class Score:
    """The errors of a system on a set of utterances."""

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
        e = self.errors
        return (
            f"%WER {e.wer:.2f} [ {e.total} / {e.words}, {e.insertions} ins, {e.deletions} del, {e.substitutions} sub ]"
            f"{self._missing_note()}"
        )

    def _missing_note(self) -> str:
        return f" [{len(self.missing)} utterances without hypothesis]" if self.missing else ""

    def by_speaker(self) -> dict[str, Errors]:
        """Each speaker's errors, sorted by name."""
        return _by_speaker(self.by_utterance, self.speakers)

    def interval(self, level: float = 0.95, *, seed: int = 0, replications: int = REPLICATIONS) -> Interval:
        """The percentile interval of the word error rate over resampled speakers (utterances where there is only one)."""
        units, grouped = _units(self.by_utterance, self.speakers)
        wrong = np.array([e.total for e in grouped.values()], np.float64)
        words = np.array([e.words for e in grouped.values()], np.float64)
        draws = _draws(len(words), seed, replications)
        low, high = _percentiles(_rates(draws, wrong, words), level)
        return Interval(low, high, level, units, len(words))

    def confusions(self, count: int = 20) -> list[Confusion]:
        """The errors that occur most often, insertions and deletions included."""
        worst = sorted(self.pairs.items(), key=lambda pair: (-pair[1], pair[0]))[:count]
        return [Confusion(said, heard, times) for (said, heard), times in worst]

    def table(self) -> str:
        """A line per speaker, the worst first, and the sum."""
        rows = sorted(self.by_speaker().items(), key=lambda row: (-row[1].wer, row[0]))
        wide = max([len("speaker"), *(len(name) for name, _ in rows)])
        lines = [f"{'speaker':<{wide}}  utts   words    ins    del    sub     WER"]
        for name, e in [*rows, ("all", self.errors)]:
            kinds = f"{e.insertions:6d} {e.deletions:6d} {e.substitutions:6d}"
            lines.append(f"{name:<{wide}} {e.utterances:5d} {e.words:7d} {kinds} {e.wer:7.2f}")
        return "\n".join(lines)

    def as_json(self, *, level: float = 0.95, seed: int = 0) -> dict[str, Any]:
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
    """System b against system a on the same utterances; all figures in points of word error rate, b minus a."""

    difference: float
    low: float
    high: float
    better_probability: float
    """The share of resampled sets of speakers on which b makes fewer errors than a, equal ones counted half."""
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
    """Every reference against its hypothesis. Without speakers each utterance counts as one of its own.

    Hypotheses without a reference are listed in `extra` and not counted."""
    if not refs:
        raise DataError("nothing to score: there is no reference", hint="give the transcripts of the set that was decoded")
    if not any(refs.values()):
        raise DataError(
            "the references hold no word, so there is no word error rate",
            where=f"{len(refs)} empty transcripts",
            hint="check the text",
        )
    of = _speakers_of(refs, speakers)
    pairs: Counter[tuple[str, str]] = Counter()
    found: dict[str, Errors] = {}
    for utterance in sorted(refs):
        found[utterance] = _errors(refs[utterance], hyps.get(utterance, ()), pairs, costs)
    missing = sorted(set(refs) - set(hyps))
    extra = sorted(set(hyps) - set(refs))
    return Score(found, of, pairs, missing, extra)


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
    """How much worse b is than a, with an interval over resampled speakers: both systems see the same speakers in each.

    A system may be several runs (say, seeds): their errors are averaged utterance by utterance. The interval then holds
    for these runs; it knows the spread between speakers, not that between seeds."""
    runs_a = [hyps_a] if isinstance(hyps_a, Mapping) else list(hyps_a)
    runs_b = [hyps_b] if isinstance(hyps_b, Mapping) else list(hyps_b)
    if not runs_a or not runs_b:
        raise DataError("a comparison needs at least one run of each system")
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


def _errors(said: Words, heard: Words, pairs: Counter[tuple[str, str]], costs: Costs) -> Errors:
    insertions = deletions = substitutions = 0
    for one, other in align(said, heard, costs):
        if one == other:
            continue
        pairs[one, other] += 1
        if one == NOTHING:
            insertions += 1
        elif other == NOTHING:
            deletions += 1
        else:
            substitutions += 1
    return Errors(len(said), insertions, deletions, substitutions, 1)


def _speakers_of(refs: Mapping[str, Words], speakers: Mapping[str, str] | None) -> dict[str, str]:
    if speakers is None:
        return {utterance: utterance for utterance in refs}
    unknown = [utterance for utterance in refs if utterance not in speakers]
    if unknown:
        raise DataError(
            f"no speaker is known for utterance '{unknown[0]}' ({len(unknown)} in all)",
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
    """What is resampled. One speaker cannot be; his utterances can, and the result says so."""
    grouped = _by_speaker(by_utterance, speakers)
    if len(grouped) < 2 or list(grouped) == sorted(by_utterance):
        return "utterances", dict(sorted(by_utterance.items()))
    return "speakers", grouped


def _draws(units: int, seed: int, replications: int) -> np.ndarray:
    """How often each unit occurs in each resampled set [replications, units]."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.multinomial(units, np.full(units, 1.0 / units), size=replications).astype(np.float64)


def _rates(draws: np.ndarray, errors: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Percent in each resampled set; sets that happen to hold no word say nothing and are left out."""
    said = draws @ words
    some = said > 0
    return 100.0 * (draws @ errors)[some] / said[some]


def _percentiles(values: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.percentile(values, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


# ---------------------------------------------------------------------------------------------------- transcripts in files


def read_text(path: str | Path) -> Texts:
    """Kaldi's text; an id alone is an empty transcript."""
    found: Texts = {}
    for number, line in _lines(path):
        name, *words = line.split()
        _add(found, name, words, f"{path}, line {number}")
    return found


def write_text(path: str | Path, texts: Mapping[str, Sequence[str]]) -> None:
    _write(path, (" ".join([name, *words]) for name, words in sorted(texts.items())))


def read_trn(path: str | Path) -> Texts:
    found: Texts = {}
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        text, opened, rest = line.rstrip().rpartition("(")
        name = rest[:-1].strip()
        if not opened or not rest.endswith(")") or not name or " " in name:
            raise DataError(
                "a line of a trn file must end in (utterance id)", where=where, hint="write: WORD WORD (speaker_utterance)"
            )
        _add(found, name, text.split(), where)
    return found


def write_trn(path: str | Path, texts: Mapping[str, Sequence[str]]) -> None:
    """For sclite: give it `-i spu_id` where ids begin with the speaker and a dash or underscore."""
    _write(path, (" ".join([*words, f"({name})"]) for name, words in sorted(texts.items())))


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


def _add(found: Texts, name: str, words: Sequence[str], where: str) -> None:
    if name in found:
        raise DataError(f"utterance '{name}' occurs twice", where=where, hint="keep one transcript of each utterance")
    found[name] = tuple(words)


def _write(path: str | Path, lines: Iterator[str]) -> None:
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
