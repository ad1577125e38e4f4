"""Word error rate: counts of sclite, bootstrap intervals, transcript files."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import kaldialign
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import DataError
from roundelay.speech.edit_distance import align
from roundelay.speech.score import paired, read_text, score, write_text

sentences = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9)
texts = st.dictionaries(st.from_regex(r"s[0-9]_[0-9]{1,3}", fullmatch=True), sentences, max_size=6)

# ----------------------------------------------------------------------------------------------------------- counts


def random_pairs(count: int, words: int, longest: int, seed: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return references and hypotheses; half of the hypotheses are references with errors, half are unrelated."""
    rng = random.Random(seed)
    vocabulary = [f"w{n}" for n in range(words)]
    refs, hyps = {}, {}
    for n in range(count):
        ref = rng.choices(vocabulary, k=rng.randint(1, longest))
        hyp = rng.choices(vocabulary, k=rng.randint(0, longest))
        if n % 2:
            hyp = []
            for word in ref:
                draw = rng.random()
                hyp += [] if draw < 0.15 else [rng.choice(vocabulary)] if draw < 0.3 else [word]
                hyp += [rng.choice(vocabulary)] if draw > 0.85 else []
        refs[f"s{n % 7}_{n:05d}"], hyps[f"s{n % 7}_{n:05d}"] = ref, hyp
    return refs, hyps


def write_trn(path: Path, texts: dict[str, list[str]]) -> None:
    """Write a file of sclite's format trn."""
    path.write_text("".join(" ".join([*words, f"({name})"]) + "\n" for name, words in sorted(texts.items())))


@pytest.mark.skipif(not shutil.which("sctk"), reason="sclite is not installed (Debian package sctk)")
@pytest.mark.parametrize(("words", "longest"), [(3, 25), (30, 40), (200, 12)])
def test_counts_of_each_utterance_equal_those_of_sclite(tmp_path: Path, words: int, longest: int) -> None:
    refs, hyps = random_pairs(1000, words, longest, seed=words)
    write_trn(tmp_path / "ref", refs)
    write_trn(tmp_path / "hyp", hyps)
    options = ["-s", "-r", "ref", "trn", "-h", "hyp", "trn", "-i", "spu_id", "-o", "pralign", "sum", "-O", ".", "-n", "out"]
    command = ["sctk", "sclite", *options]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    pattern = r"id: \((\S+)\)\nScores: \(#C #S #D #I\) \d+ (\d+) (\d+) (\d+)"
    printed = {m[1]: tuple(map(int, m.groups()[1:])) for m in re.finditer(pattern, (tmp_path / "out.pra").read_text())}
    ours = score(refs, hyps)
    assert len(printed) == 1000
    assert printed == {name: (e.substitutions, e.deletions, e.insertions) for name, e in ours.by_utterance.items()}
    total = re.search(r"\| Sum/Avg.*\|(.*)\|", (tmp_path / "out.sys").read_text())
    assert total is not None
    assert float(total[1].split()[4]) == round(ours.wer, 1)


@given(sentences, sentences)
def test_alignment_contains_both_texts_and_has_minimum_cost(ref: list[str], hyp: list[str]) -> None:
    for costs, like_sclite in (("sclite", True), ("kaldi", False)):
        pairs = align(ref, hyp, costs)  # type: ignore[arg-type]
        assert [one for one, _ in pairs if one] == ref
        assert [other for _, other in pairs if other] == hyp
        theirs = kaldialign.edit_distance(ref, hyp, sclite_mode=like_sclite)
        swap, single = (4, 3) if like_sclite else (1, 1)
        ours = sum(0 if one == other else swap if one and other else single for one, other in pairs)
        assert ours == swap * theirs["sub"] + single * (theirs["ins"] + theirs["del"])


def test_line_has_the_format_of_kaldi() -> None:
    result = score({"u": ["a", "b", "c", "d"]}, {"u": ["a", "x", "c", "d", "e"]}, {"u": "s"})
    assert result.line() == "%WER 50.00 [ 2 / 4, 1 ins, 0 del, 1 sub ]"
    assert (result.words, result.utterances, result.insertions, result.deletions, result.substitutions) == (4, 1, 1, 0, 1)


def test_missing_hypothesis_counts_as_deletions_and_is_listed() -> None:
    result = score({"u": ["a", "b"], "v": ["c", "d"]}, {"u": ["a", "b"], "w": ["e"]})
    assert (result.deletions, result.wer) == (2, 50.0)
    assert (result.missing, result.extra) == (["v"], ["w"])
    assert result.line().endswith("[1 utterances without hypothesis]")


def test_scoring_without_reference_words_raises() -> None:
    for refs in ({}, {"u": []}):
        with pytest.raises(DataError):
            score(refs, {"u": ["a"]})
    with pytest.raises(DataError, match="utterance 'u' has no speaker"):
        score({"u": ["a"]}, {"u": ["a"]}, {})


def test_confusions_are_sorted_by_frequency() -> None:
    refs = {"u": ["red", "red", "blue"], "v": ["red", "one"]}
    hyps = {"u": ["read", "read", "blue"], "v": ["red", "one", "two"]}
    listed = [(c.ref, c.hyp, c.count) for c in score(refs, hyps).confusions()]
    assert listed == [("red", "read", 2), ("", "two", 1)]


def test_table_lists_speakers_by_descending_error_rate() -> None:
    refs = {"u": ["a"], "v": ["a", "b"], "w": ["a"]}
    result = score(refs, {"u": ["a"], "v": ["a", "c"], "w": ["a"]}, {"u": "tom", "v": "ann", "w": "tom"})
    assert [line.split() for line in result.table().splitlines()[1:]] == [
        ["ann", "1", "2", "0", "0", "1", "50.00"],
        ["tom", "2", "2", "0", "0", "0", "0.00"],
        ["all", "3", "4", "0", "0", "1", "25.00"],
    ]


# -------------------------------------------------------------------------------------------------------- intervals


def many_speakers(rates: np.ndarray, seed: int, utterances: int = 8) -> tuple[dict, dict, dict]:
    rng = np.random.default_rng(seed)
    refs, hyps, speakers = {}, {}, {}
    for speaker, rate in enumerate(rates):
        for n in range(utterances):
            name = f"{speaker:03d}-{n}"
            refs[name] = [f"w{k}" for k in range(10)]
            hyps[name] = [word if rng.random() > rate else "wrong" for word in refs[name]]
            speakers[name] = f"{speaker:03d}"
    return refs, hyps, speakers


def test_interval_equals_an_explicit_bootstrap() -> None:
    refs, hyps, speakers = many_speakers(np.linspace(0.05, 0.5, 30), seed=1)
    result = score(refs, hyps, speakers)
    by_speaker = list(result.by_speaker().values())
    rng = random.Random(5)
    rates = []
    for _ in range(4000):
        sample = rng.choices(by_speaker, k=30)
        rates.append(100 * sum(e.total for e in sample) / sum(e.words for e in sample))
    interval = result.interval(seed=3)
    low, high = np.percentile(rates, [2.5, 97.5])
    # The standard error of a 2.5 % point is about 0.055 standard deviations from 4000 draws and 0.035 from 10000; allow five.
    tolerance = 5 * np.hypot(0.055, 0.035) * np.std(rates)
    assert abs(interval.low - low) < tolerance
    assert abs(interval.high - high) < tolerance
    assert (interval.units, interval.count) == ("speakers", 30)


def test_intervals_have_about_their_nominal_coverage() -> None:
    covered, trials = 0, 200
    for seed in range(trials):
        rates = np.random.default_rng(seed).beta(2, 6, size=40)
        refs, hyps, speakers = many_speakers(rates, seed, utterances=2)
        interval = score(refs, hyps, speakers).interval(seed=seed, replications=1000)
        covered += interval.low <= 25.0 <= interval.high
    # The mean rate is 25 %. Percentile intervals over 40 speakers are slightly narrow: allow 93 %, less 4 standard deviations.
    assert covered > 0.93 * trials - 4 * 3.6


def test_interval_is_a_function_of_the_seed() -> None:
    result = score(*many_speakers(np.linspace(0.05, 0.5, 10), seed=2))
    assert result.interval(seed=1) == result.interval(seed=1)
    assert result.interval(seed=1) != result.interval(seed=2)


def test_utterances_are_resampled_with_one_speaker_or_none() -> None:
    refs, hyps, _ = many_speakers(np.array([0.3]), seed=0)
    for speakers in (None, dict.fromkeys(refs, "one")):
        interval = score(refs, hyps, speakers).interval()
        assert (interval.units, interval.count) == ("utterances", 8)
        assert interval.low < interval.high


def test_system_compared_with_itself_has_no_difference() -> None:
    refs, hyps, speakers = many_speakers(np.linspace(0.05, 0.5, 10), seed=2)
    same = paired(refs, hyps, hyps, speakers)
    assert (same.difference, same.low, same.high, same.better_probability) == (0, 0, 0, 0.5)


def test_paired_comparison_detects_what_single_intervals_do_not() -> None:
    refs, worse, speakers = many_speakers(np.linspace(0.05, 0.8, 40), seed=4)
    better = {name: list(refs[name][:2]) + list(words[2:]) for name, words in worse.items()}
    result = paired(refs, worse, better, speakers)
    one, other = score(refs, worse, speakers), score(refs, better, speakers)
    assert result.difference == pytest.approx(other.wer - one.wer)
    assert result.low < result.difference < result.high < 0
    assert result.better_probability == 1.0
    assert other.interval().high > one.interval().low
    reverse = paired(refs, better, worse, speakers)
    assert (reverse.difference, reverse.low, reverse.high) == pytest.approx((-result.difference, -result.high, -result.low))


def test_runs_of_a_system_are_averaged() -> None:
    refs, first, speakers = many_speakers(np.linspace(0.05, 0.5, 10), seed=2)
    _, second, _ = many_speakers(np.linspace(0.05, 0.5, 10), seed=3)
    both = paired(refs, refs, [first, second], speakers)
    single = [paired(refs, refs, run, speakers).difference for run in (first, second)]
    assert both.difference == pytest.approx(sum(single) / 2)


# ------------------------------------------------------------------------------------------------------------ files


@given(texts)
def test_transcripts_survive_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, transcripts: dict[str, list[str]]
) -> None:
    path = tmp_path_factory.mktemp("texts") / "text"
    write_text(path, transcripts)
    assert read_text(path) == {name: tuple(words) for name, words in transcripts.items()}


@pytest.mark.parametrize(("content", "message"), [("u a\nu b\n", "line 2"), (b"u \xff\n", "UTF-8"), (None, "cannot be read")])
def test_errors_name_invalid_transcripts(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_text(tmp_path / "file")
