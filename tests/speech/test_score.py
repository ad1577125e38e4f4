"""Word error rate: the counts of sclite, the sums of the bootstrap, transcripts in files."""

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
from roundelay.speech.score import paired, read_text, read_trn, score, write_text, write_trn

sentences = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9)
texts = st.dictionaries(st.from_regex(r"s[0-9]_[0-9]{1,3}", fullmatch=True), sentences, max_size=6)

# ----------------------------------------------------------------------------------------------------------- counts


def random_pairs(count: int, words: int, longest: int, seed: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Half of the hypotheses are references with errors, half have nothing to do with theirs."""
    dice = random.Random(seed)
    vocabulary = [f"w{n}" for n in range(words)]
    refs, hyps = {}, {}
    for n in range(count):
        said = dice.choices(vocabulary, k=dice.randint(1, longest))
        heard = dice.choices(vocabulary, k=dice.randint(0, longest))
        if n % 2:
            heard = []
            for word in said:
                fate = dice.random()
                heard += [] if fate < 0.15 else [dice.choice(vocabulary)] if fate < 0.3 else [word]
                heard += [dice.choice(vocabulary)] if fate > 0.85 else []
        refs[f"s{n % 7}_{n:05d}"], hyps[f"s{n % 7}_{n:05d}"] = said, heard
    return refs, hyps


@pytest.mark.skipif(not shutil.which("sctk"), reason="sclite is not installed (Debian package sctk)")
@pytest.mark.parametrize(("words", "longest"), [(3, 25), (30, 40), (200, 12)])
def test_counts_are_those_of_sclite_for_every_utterance(tmp_path: Path, words: int, longest: int) -> None:
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
def test_an_alignment_spells_both_texts_and_is_the_cheapest(said: list[str], heard: list[str]) -> None:
    for costs, like_sclite in (("sclite", True), ("kaldi", False)):
        pairs = align(said, heard, costs)  # type: ignore[arg-type]
        assert [one for one, _ in pairs if one] == said
        assert [other for _, other in pairs if other] == heard
        theirs = kaldialign.edit_distance(said, heard, sclite_mode=like_sclite)
        swap, single = (4, 3) if like_sclite else (1, 1)
        ours = sum(0 if one == other else swap if one and other else single for one, other in pairs)
        assert ours == swap * theirs["sub"] + single * (theirs["ins"] + theirs["del"])


def test_the_line_is_the_one_kaldi_users_know() -> None:
    found = score({"u": ["a", "b", "c", "d"]}, {"u": ["a", "x", "c", "d", "e"]}, {"u": "s"})
    assert found.line() == "%WER 50.00 [ 2 / 4, 1 ins, 0 del, 1 sub ]"
    assert (found.words, found.utterances, found.insertions, found.deletions, found.substitutions) == (4, 1, 1, 0, 1)


def test_a_missing_hypothesis_is_deleted_words_and_is_reported() -> None:
    found = score({"u": ["a", "b"], "v": ["c", "d"]}, {"u": ["a", "b"], "w": ["e"]})
    assert (found.deletions, found.wer) == (2, 50.0)
    assert (found.missing, found.extra) == (["v"], ["w"])
    assert found.line().endswith("[1 utterances without hypothesis]")


def test_nothing_to_score_is_an_error() -> None:
    for refs in ({}, {"u": []}):
        with pytest.raises(DataError):
            score(refs, {"u": ["a"]})
    with pytest.raises(DataError, match="no speaker is known for utterance 'u'"):
        score({"u": ["a"]}, {"u": ["a"]}, {})


def test_confusions_come_by_frequency_and_name_both_words() -> None:
    refs = {"u": ["red", "red", "blue"], "v": ["red", "one"]}
    hyps = {"u": ["read", "read", "blue"], "v": ["red", "one", "two"]}
    listed = [(c.said, c.heard, c.count) for c in score(refs, hyps).confusions()]
    assert listed == [("red", "read", 2), ("", "two", 1)]


def test_the_table_has_a_line_per_speaker_the_worst_first() -> None:
    refs = {"u": ["a"], "v": ["a", "b"], "w": ["a"]}
    found = score(refs, {"u": ["a"], "v": ["a", "c"], "w": ["a"]}, {"u": "tom", "v": "ann", "w": "tom"})
    assert [line.split() for line in found.table().splitlines()[1:]] == [
        ["ann", "1", "2", "0", "0", "1", "50.00"],
        ["tom", "2", "2", "0", "0", "0", "0.00"],
        ["all", "3", "4", "0", "0", "1", "25.00"],
    ]


# -------------------------------------------------------------------------------------------------------- intervals


def many_speakers(rates: np.ndarray, seed: int, utterances: int = 8) -> tuple[dict, dict, dict]:
    dice = np.random.default_rng(seed)
    refs, hyps, speakers = {}, {}, {}
    for speaker, rate in enumerate(rates):
        for n in range(utterances):
            name = f"{speaker:03d}-{n}"
            refs[name] = [f"w{k}" for k in range(10)]
            hyps[name] = [word if dice.random() > rate else "wrong" for word in refs[name]]
            speakers[name] = f"{speaker:03d}"
    return refs, hyps, speakers


def test_the_interval_is_that_of_a_bootstrap_written_out() -> None:
    refs, hyps, speakers = many_speakers(np.linspace(0.05, 0.5, 30), seed=1)
    found = score(refs, hyps, speakers)
    by_speaker = list(found.by_speaker().values())
    dice = random.Random(5)
    rates = []
    for _ in range(4000):
        drawn = dice.choices(by_speaker, k=30)
        rates.append(100 * sum(e.total for e in drawn) / sum(e.words for e in drawn))
    interval = found.interval(seed=3)
    low, high = np.percentile(rates, [2.5, 97.5])
    # The standard error of a 2.5 % point is about 0.055 standard deviations from 4000 draws and 0.035 from 10000; allow five.
    tolerance = 5 * np.hypot(0.055, 0.035) * np.std(rates)
    assert abs(interval.low - low) < tolerance
    assert abs(interval.high - high) < tolerance
    assert (interval.units, interval.count) == ("speakers", 30)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered, trials = 0, 200
    for seed in range(trials):
        rates = np.random.default_rng(seed).beta(2, 6, size=40)
        refs, hyps, speakers = many_speakers(rates, seed, utterances=2)
        interval = score(refs, hyps, speakers).interval(seed=seed, replications=1000)
        covered += interval.low <= 25.0 <= interval.high
    # The mean rate is 25 %. Percentile intervals over 40 speakers are slightly narrow: allow 93 %, less 4 standard deviations.
    assert covered > 0.93 * trials - 4 * 3.6


def test_a_seed_gives_the_same_interval_and_another_seed_another() -> None:
    found = score(*many_speakers(np.linspace(0.05, 0.5, 10), seed=2))
    assert found.interval(seed=1) == found.interval(seed=1)
    assert found.interval(seed=1) != found.interval(seed=2)


def test_one_speaker_or_none_means_that_utterances_are_drawn() -> None:
    refs, hyps, _ = many_speakers(np.array([0.3]), seed=0)
    for speakers in (None, dict.fromkeys(refs, "one")):
        interval = score(refs, hyps, speakers).interval()
        assert (interval.units, interval.count) == ("utterances", 8)
        assert interval.low < interval.high


def test_a_system_against_itself_differs_by_nothing() -> None:
    refs, hyps, speakers = many_speakers(np.linspace(0.05, 0.5, 10), seed=2)
    same = paired(refs, hyps, hyps, speakers)
    assert (same.difference, same.low, same.high, same.better_probability) == (0, 0, 0, 0.5)


def test_a_paired_comparison_sees_what_intervals_of_their_own_do_not() -> None:
    refs, worse, speakers = many_speakers(np.linspace(0.05, 0.8, 40), seed=4)
    better = {name: list(refs[name][:2]) + list(words[2:]) for name, words in worse.items()}
    found = paired(refs, worse, better, speakers)
    one, other = score(refs, worse, speakers), score(refs, better, speakers)
    assert found.difference == pytest.approx(other.wer - one.wer)
    assert found.low < found.difference < found.high < 0
    assert found.better_probability == 1.0
    assert other.interval().high > one.interval().low
    reverse = paired(refs, better, worse, speakers)
    assert (reverse.difference, reverse.low, reverse.high) == pytest.approx((-found.difference, -found.high, -found.low))


def test_several_runs_of_a_system_are_averaged() -> None:
    refs, first, speakers = many_speakers(np.linspace(0.05, 0.5, 10), seed=2)
    _, second, _ = many_speakers(np.linspace(0.05, 0.5, 10), seed=3)
    both = paired(refs, refs, [first, second], speakers)
    single = [paired(refs, refs, run, speakers).difference for run in (first, second)]
    assert both.difference == pytest.approx(sum(single) / 2)


# ------------------------------------------------------------------------------------------------------------ files


@given(texts)
def test_transcripts_written_down_read_back(tmp_path_factory: pytest.TempPathFactory, written: dict[str, list[str]]) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for write, read in ((write_text, read_text), (write_trn, read_trn)):
        write(folder / "file", written)
        assert read(folder / "file") == {name: tuple(words) for name, words in written.items()}


@pytest.mark.parametrize(
    ("reader", "content", "told"),
    [
        (read_text, "u a\nu b\n", "line 2"),
        (read_trn, "a b (u)\na b\n", "line 2"),
        (read_trn, "a ()\n", "line 1"),
        (read_text, b"u \xff\n", "UTF-8"),
        (read_text, None, "cannot be read"),
    ],
)
def test_bad_transcripts_are_named(tmp_path: Path, reader: object, content: str | bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=told):
        reader(tmp_path / "file")  # type: ignore[operator]
