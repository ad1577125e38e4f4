"""Training from a flat start finds the true boundaries of a toy language and of real digits; errors name the utterance."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import DATA
from toy_speech import LEXICON, Toy, ToyLexicon, toy

from roundelay.errors import DataError
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.hmm import word_times
from roundelay.speech.hmm.align import (
    Alignments,
    MonoOptions,
    TriOptions,
    align_all,
    train_mono,
    train_tri,
    write_alignments,
)
from roundelay.speech.hmm.em_workers import UtteranceBlock
from roundelay.speech.hmm.model import AlignmentModel, seconds

Lexicon: Any = LEXICON
QUICK = MonoOptions(passes=12, gaussians=1, deltas=0)


def utterance_words(speech: Toy) -> list[tuple[str, tuple[str, ...]]]:
    return [(u.id, u.words) for u in speech.corpus.utterances]


@pytest.fixture(scope="module")
def speech() -> Toy:
    return toy(120)


@pytest.fixture(scope="module")
def mono(speech: Toy) -> AlignmentModel:
    return train_mono(speech, speech.corpus, Lexicon, QUICK)


def misplaced(model: AlignmentModel, speech: Toy) -> int:
    """Count the words whose first or last frame differs from the truth."""
    wrong = 0
    for u in speech.corpus.utterances:
        spans = model.align(speech.static(u.id), u.words, Lexicon).words
        assert [word for word, _, _ in spans] == list(u.words)
        wrong += sum(a != b for a, b in zip(spans, speech.words[u.id], strict=True))
    return wrong


# ------------------------------------------------------------------------------------------------------------ training


def test_flat_start_finds_boundaries_silence_and_pronunciations(mono: AlignmentModel) -> None:
    unseen = toy(40, seed=7)
    assert misplaced(mono, unseen) <= 2
    phones = {u.id: mono.align(unseen.static(u.id), u.words, Lexicon).phones for u in unseen.corpus.utterances}
    for id, pronunciations in unseen.pronunciations.items():
        assert [p for p, _, _ in phones[id] if p != "SIL"] == [p for word in pronunciations for p in word]
        assert all(a[2] == b[1] for a, b in itertools.pairwise(phones[id]))


def test_self_loops_follow_the_durations(speech: Toy, mono: AlignmentModel) -> None:
    """A self-loop probability is the fraction of the state's frames that are followed by another frame of the state."""
    stays, seen = np.zeros(mono.num_pdfs), np.zeros(mono.num_pdfs)
    for u in speech.corpus.utterances:
        for _, run in itertools.groupby(mono.align(speech.static(u.id), u.words, Lexicon).pdfs.tolist()):
            frames = list(run)
            stays[frames[0]] += len(frames) - 1
            seen[frames[0]] += len(frames)
    np.testing.assert_allclose(mono.self_loop, np.clip(stays / seen, 0.02, 0.98), atol=0.02)
    speech_states = np.arange(mono.num_pdfs) >= 3
    assert np.sum(seen[speech_states]) / np.sum(seen - stays, where=speech_states) == pytest.approx(4.0, abs=0.1)


def test_passes_never_decrease_the_score(speech: Toy, caplog: pytest.LogCaptureFixture) -> None:
    """With one Gaussian per state, the log likelihood of the best paths does not decrease from pass to pass."""
    with caplog.at_level(logging.INFO, "roundelay.speech.hmm"):
        train_mono(speech, speech.corpus, Lexicon, MonoOptions(passes=10, gaussians=1))
    values = [float(match[1]) for line in caplog.messages if (match := re.search(r"log likelihood (-?[\d.]+)", line))]
    assert len(values) == 10
    assert all(b >= a - 1e-3 for a, b in itertools.pairwise(values))
    assert values[-1] > values[0] + 5.0


def test_mixtures_grow_to_their_budget(speech: Toy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "roundelay.speech.hmm"):
        model = train_mono(speech, speech.corpus, Lexicon, MonoOptions(passes=8, gaussians=3))
    assert model.num_pdfs * 2 < model.gmm.components <= model.num_pdfs * 3
    assert "Gaussians" in caplog.messages[-1]


def test_triphones_model_context_that_monophones_cannot() -> None:
    shifted = toy(150, context_shift=0.8)
    options = TriOptions(leaves=40, min_frames=30, min_gain=10.0, passes=9, gaussians=1, splice=0)
    mono = train_mono(shifted, shifted.corpus, Lexicon, QUICK)
    tri = train_tri(mono, shifted, shifted.corpus, Lexicon, options)
    unseen = toy(40, seed=9, context_shift=0.8)
    assert tri.num_pdfs > mono.num_pdfs
    gained = [
        tri.align(unseen.static(u.id), u.words, Lexicon).score - mono.align(unseen.static(u.id), u.words, Lexicon).score
        for u in unseen.corpus.utterances
    ]
    assert np.mean(gained) > 0.5
    assert misplaced(tri, unseen) <= 2
    index = {phone: n for n, phone in enumerate(tri.lexicon_phones)}
    after_o = tri.pdf(index["O"], index["T"], index["G"], 1)
    assert after_o != tri.pdf(index["L"], index["T"], index["G"], 1)


def test_lda_features_align_as_well() -> None:
    shifted = toy(100, context_shift=0.8)
    options = TriOptions(leaves=30, min_frames=30, min_gain=10.0, passes=13, gaussians=1, splice=2, dim=15)
    mono = train_mono(shifted, shifted.corpus, Lexicon, QUICK)
    tri = train_tri(mono, shifted, shifted.corpus, Lexicon, options)
    assert tri.gmm.dim == 15
    assert misplaced(tri, toy(40, seed=9, context_shift=0.8)) <= 6


def test_model_does_not_depend_on_the_number_of_processes(speech: Toy, tmp_path: Path) -> None:
    options = MonoOptions(passes=4, gaussians=2)
    for jobs in (1, 2):
        train_mono(speech, speech.corpus, Lexicon, options, jobs=jobs).save(tmp_path / str(jobs))
    assert (tmp_path / "1" / "model.safetensors").read_bytes() == (tmp_path / "2" / "model.safetensors").read_bytes()


def test_corpus_too_large_for_the_cache_is_read_in_every_pass(speech: Toy, mono: AlignmentModel) -> None:
    cached, read = (UtteranceBlock(utterance_words(speech), speech, Lexicon, cache) for cache in (True, False))
    for realign in (True, False):
        a, b = cached.accumulate(mono, realign), read.accumulate(mono, realign)
        assert a.gmm.loglike == b.gmm.loglike
    assert not read._features
    assert not read._graphs


# -------------------------------------------------------------------------------------------- utterances without a path


def with_utterance(speech: Toy, id: str, words: tuple[str, ...], frames: int | None) -> tuple[Toy, Corpus]:
    corpus = Corpus(Path("toy"), [*speech.corpus.utterances, Utterance(id, "s", words, Path("x.wav"))])
    statics = dict(speech.statics)
    if frames is not None:
        statics[id] = np.zeros((frames, 13), np.float32)
    return Toy(corpus, statics, {}), corpus


def test_word_without_pronunciation_raises_or_is_skipped(
    speech: Toy, mono: AlignmentModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, corpus = with_utterance(speech, "u9", ("GALE", "QUUX"), 50)
    with pytest.raises(DataError, match=r"(?s)'QUUX' has no pronunciation.*utterance u9"):
        train_mono(store, corpus, Lexicon, QUICK)
    with pytest.raises(DataError, match=r"(?s)'QUUX' has no pronunciation.*utterance u9"):
        align_all(mono, store, corpus, Lexicon, tmp_path, progress="none")  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "roundelay.speech.hmm"):
        train_mono(store, corpus, Lexicon, MonoOptions(passes=1, gaussians=1, on_missing="skip"))
    assert "1 utterances have words without pronunciation (QUUX)" in caplog.messages[0]
    alignments = align_all(mono, store, corpus, Lexicon, tmp_path, progress="none", on_missing="skip")  # type: ignore[arg-type]
    assert alignments.skipped == {"u9": "the word 'QUUX' has no pronunciation"}


@pytest.mark.parametrize(
    ("frames", "reason"), [(10, "too short for its words: 10 frames, 12 are needed"), (None, "it has no features")]
)
def test_utterances_without_a_path_are_skipped_and_counted(
    speech: Toy, mono: AlignmentModel, tmp_path: Path, frames: int | None, reason: str
) -> None:
    store, corpus = with_utterance(speech, "u9", ("OLGA",), frames)
    alignments = align_all(mono, store, corpus, Lexicon, tmp_path, progress="none")  # type: ignore[arg-type]
    assert alignments.skipped == {"u9": reason}
    assert len(alignments) == len(speech.corpus.utterances)
    with pytest.raises(DataError, match=re.escape(f"utterance u9 has no alignment: {reason}")):
        alignments["u9"]
    model = train_mono(store, corpus, Lexicon, MonoOptions(passes=2, gaussians=1))
    assert np.all(np.isfinite(model.gmm.mean))


def test_corpus_without_any_alignment_raises(speech: Toy, mono: AlignmentModel, tmp_path: Path) -> None:
    store = Toy(
        Corpus(Path("toy"), [Utterance("u9", "s", ("OLGA",), Path("x.wav"))]), {"u9": np.zeros((5, 13), np.float32)}, {}
    )
    with pytest.raises(DataError, match=r"no utterance can be aligned: .*u9 \(too short"):
        train_mono(store, store.corpus, Lexicon, QUICK)
    with pytest.raises(DataError, match=r"no utterance can be aligned: .*u9 \(too short"):
        align_all(mono, store, store.corpus, Lexicon, tmp_path, progress="none")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- alignments


def test_alignments_survive_writing_and_reading(speech: Toy, mono: AlignmentModel, tmp_path: Path) -> None:
    written = align_all(mono, speech, speech.corpus, Lexicon, tmp_path, progress="none")  # type: ignore[arg-type]
    alignments = Alignments.open(tmp_path)
    assert alignments.ids == written.ids == speech.ids
    total = np.zeros(mono.num_pdfs, np.int64)
    for u in speech.corpus.utterances:
        expected = mono.align(speech.static(u.id), u.words, Lexicon)
        assert alignments[u.id].dtype == np.int32
        np.testing.assert_array_equal(alignments[u.id], expected.pdfs)
        assert alignments.words(u.id) == expected.words
        assert alignments.score(u.id) == expected.score
        np.add.at(total, expected.pdfs, 1)
    np.testing.assert_array_equal(alignments.counts(), total)
    assert alignments.num_pdfs == mono.num_pdfs


def test_word_start_offsets_are_measured(speech: Toy, mono: AlignmentModel, tmp_path: Path) -> None:
    written = align_all(mono, speech, speech.corpus, Lexicon, tmp_path / "ali", progress="none")  # type: ignore[arg-type]
    late = 0.03
    lines = [
        f"{id} {word} {seconds(first) - late:.4f} {seconds(end):.4f}\n"
        for id in written.ids
        for word, first, end in written.words(id)
    ]
    (tmp_path / word_times.FILE).write_text("".join(lines))
    offsets = word_times.compare(written, word_times.read_word_times(tmp_path / word_times.FILE))
    assert (offsets.words, offsets.within_100_ms, offsets.first_words_within_100_ms) == (len(lines), 1.0, 1.0)
    assert offsets.median_ms == pytest.approx(1e3 * late, abs=0.1)
    lines[0] = lines[0].replace(f"{seconds(written.words(written.ids[0])[0][1]) - late:.4f}", "-5")
    (tmp_path / word_times.FILE).write_text("".join(lines))
    offsets = word_times.compare(written, word_times.read_word_times(tmp_path / word_times.FILE))
    assert offsets.within_100_ms == pytest.approx(1 - 1 / len(lines))
    assert offsets.first_words_within_100_ms == pytest.approx(1 - 1 / len(written.ids))
    (tmp_path / word_times.FILE).write_text("toy-0000 A 0.1\n")
    with pytest.raises(DataError, match=r"must be 'utterance word start end'[\s\S]*line 1"):
        word_times.read_word_times(tmp_path / word_times.FILE)


def test_scores_of_another_model_align_as_well(speech: Toy, mono: AlignmentModel, tmp_path: Path) -> None:
    own = align_all(mono, speech, speech.corpus, Lexicon, tmp_path / "own", progress="none")  # type: ignore[arg-type]
    external = align_all(
        mono,
        speech,  # type: ignore[arg-type]
        speech.corpus,
        Lexicon,
        tmp_path / "kaldi",
        progress="none",
        loglikes=lambda id: mono.loglikes(speech.static(id)),
    )
    same = sum(int((own[id] == external[id]).sum()) for id in own.ids)
    assert same >= 0.999 * own.counts().sum()
    with pytest.raises(DataError, match="scores of shape"):
        align_all(
            mono,
            speech,  # type: ignore[arg-type]
            speech.corpus,
            Lexicon,
            tmp_path / "kaldi",
            progress="none",
            loglikes=lambda id: np.zeros((5, 2)),
        )


def test_alignments_of_another_toolkit_are_written(tmp_path: Path) -> None:
    states = {"b": np.array([3, 3, 1], np.int32), "a": np.array([0], np.int32)}
    write_alignments(tmp_path, states, 4)
    alignments = Alignments.open(tmp_path)
    assert alignments.ids == ["a", "b"]
    assert alignments["b"].tolist() == [3, 3, 1]
    assert alignments.counts().tolist() == [1, 1, 0, 2]
    assert alignments.words("b") == []
    with pytest.raises(DataError, match=r"pdfs of utterance b must be >= 0 and < 3 \(got 3\)"):
        write_alignments(tmp_path, states, 3)


def test_errors_name_damaged_alignments(speech: Toy, mono: AlignmentModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no alignments"):
        Alignments.open(tmp_path)
    align_all(mono, speech, speech.corpus, Lexicon, tmp_path, progress="none")  # type: ignore[arg-type]
    index = json.loads((tmp_path / "alignments.json").read_text())
    (tmp_path / "alignments.json").write_text(json.dumps({**index, "utterances": index["utterances"][1:]}))
    with pytest.raises(DataError, match="to match the index"):
        Alignments.open(tmp_path)
    (tmp_path / "alignments.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        Alignments.open(tmp_path)


# ------------------------------------------------------------------------------------------------------------ real digits

DIGITS = {
    "ZERO": ["Z IH R OW", "Z IY R OW"],
    "ONE": ["W AH N"],
    "TWO": ["T UW"],
    "THREE": ["TH R IY"],
    "FOUR": ["F AO R"],
    "FIVE": ["F AY V"],
    "SIX": ["S IH K S"],
    "SEVEN": ["S EH V AH N"],
    "EIGHT": ["EY T"],
    "NINE": ["N AY N"],
}


def best_word(model: AlignmentModel, static: Any, lexicon: Any) -> str:
    scores = {}
    for word in lexicon.entries:
        try:
            scores[word] = model.align(static, (word,), lexicon).score
        except DataError:
            continue
    return max(scores, key=lambda word: scores[word])


@pytest.mark.skipif(not (DATA / "fsdd").is_dir(), reason=f"no recordings at {DATA} (set ROUNDELAY_DATA)")
def test_real_digits_are_distinguished_and_cover_their_recordings(tmp_path: Path) -> None:
    lexicon: Any = ToyLexicon({w: [(tuple(v.split()), 1 / len(vs)) for v in vs] for w, vs in DIGITS.items()})
    everything = read_data_dir(DATA / "fsdd" / "train")
    train = Corpus(everything.folder, everything.utterances[::4])
    test = Corpus(everything.folder, everything.utterances[1::12])
    train_store = extract(train, tmp_path / "train", FeatureOptions(), progress="none")
    unseen = extract(test, tmp_path / "test", FeatureOptions(), progress="none")
    mono = train_mono(train_store, train, lexicon, MonoOptions(passes=12, gaussians=4))
    tri = train_tri(mono, train_store, train, lexicon, TriOptions(passes=6, gaussians=3, min_frames=60, splice=0))
    for model in (mono, tri):
        right = sum(best_word(model, unseen.static(u.id), lexicon) == u.words[0] for u in test.utterances)
        assert right >= 0.9 * len(test)
    alignments = align_all(tri, train_store, train, lexicon, tmp_path / "aligned", progress="none")
    assert len(alignments) >= 0.99 * len(train)
    word_fraction = [(end - begin) / train_store.frames(id) for id in alignments.ids for _, begin, end in alignments.words(id)]
    assert np.median(word_fraction) > 0.7  # the recordings are trimmed to the word
