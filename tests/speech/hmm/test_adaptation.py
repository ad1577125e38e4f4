"""Speaker adaptation: a voice that was bent is bent back, little speech changes little, and streams survive the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_speech import LEXICON, toy

from roundelay.errors import DataError
from roundelay.speech.corpora.data_dir import Corpus, Utterance
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import FeatureStore, from_spec
from roundelay.speech.hmm.adaptation import AdaptedFeatures, adapt
from roundelay.speech.hmm.fmllr import SpeakerStatistics, adapted, log_volume
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.model import Frontend
from roundelay.speech.hmm.train_gmm import (
    MonoOptions,
    SatOptions,
    TriOptions,
    train_sat,
    train_mono,
    train_tri,
)

DIM, PDFS = 5, 12


def mixtures(seed: int) -> Gmm:
    """Two Gaussians for each of some pdfs."""
    dice = np.random.default_rng(seed)
    mean = 2.0 * dice.standard_normal((2 * PDFS, DIM))
    variance = dice.uniform(0.1, 0.5, (2 * PDFS, DIM))
    return Gmm(2 * np.arange(PDFS + 1), np.full(2 * PDFS, 0.5), mean, variance)


def spoken(gmm: Gmm, frames: int, dice: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Frames that the mixtures themselves have drawn, and their pdfs."""
    component = dice.integers(0, 2 * PDFS, frames)
    x = gmm.mean[component] + np.sqrt(gmm.variance[component]) * dice.standard_normal((frames, DIM))
    return x, component // 2


def gathered(gmm: Gmm, x: np.ndarray, pdfs: np.ndarray) -> SpeakerStatistics:
    statistics = SpeakerStatistics.empty(DIM)
    statistics.accumulate(x, pdfs, gmm)
    return statistics


def fit(gmm: Gmm, x: np.ndarray, pdfs: np.ndarray, matrix: np.ndarray) -> float:
    """Mean log likelihood of the frames' own pdfs, measured in the space the speech was recorded in."""
    return float(gmm.scores(adapted(x, matrix))[np.arange(len(x)), pdfs].mean()) + log_volume(matrix)


def test_a_bent_voice_is_bent_back() -> None:
    dice, gmm = np.random.default_rng(0), mixtures(1)
    said, pdfs = spoken(gmm, 4000, dice)
    bend = np.eye(DIM) + 0.1 * dice.standard_normal((DIM, DIM))
    recorded = said @ bend.T + 0.3
    x, heard = recorded, np.eye(DIM, DIM + 1)
    for _ in range(3):  # posteriors are taken where the frames lie, so a second look sees more clearly
        step = gathered(gmm, x, pdfs).transform()
        heard = np.hstack([step[:, :-1] @ heard[:, :-1], (step[:, :-1] @ heard[:, -1] + step[:, -1])[:, None]])
        x = adapted(recorded, heard)
    np.testing.assert_allclose(heard[:, :-1] @ bend, np.eye(DIM), atol=0.03)
    np.testing.assert_allclose(x, said, atol=0.25)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 400))
def test_a_transform_fits_at_least_as_well_as_none_and_the_more_frames_believe_in_none_the_nearer_it_is(
    seed: int, frames: int
) -> None:
    dice, gmm = np.random.default_rng(seed), mixtures(seed)
    x, pdfs = spoken(gmm, frames, dice)
    x = x * dice.uniform(0.8, 1.2, DIM) + dice.uniform(-0.5, 0.5, DIM)
    statistics, identity = gathered(gmm, x, pdfs), np.eye(DIM, DIM + 1)
    away = []
    for prior in (10.0, 1e3, 1e6):
        found = (statistics + SpeakerStatistics.expected(gmm, prior)).transform()
        assert fit(gmm, x, pdfs, found) >= fit(gmm, x, pdfs, identity) - 1e-3
        away.append(np.abs(found - identity).max())
    assert away[0] > away[1] > away[2] < 0.01
    np.testing.assert_allclose(SpeakerStatistics.expected(gmm, 50.0).transform(), identity, atol=1e-6)


def test_a_model_of_adapted_speech_fits_speakers_who_differ_better() -> None:
    said = toy(90, seed=3)
    dice = np.random.default_rng(5)
    bends = {f"speaker{n}": np.eye(13) + 0.1 * dice.standard_normal((13, 13)) for n in range(3)}
    whose = {u.id: u.speaker for u in said.corpus.utterances}
    said.statics = {id: (x @ bends[whose[id]].T).astype(np.float32) for id, x in said.statics.items()}
    store = Spoken(said.statics, whose)
    quiet = {"say": lambda _: None, "jobs": 1}
    mono = train_mono(store, said.corpus, LEXICON, MonoOptions(passes=8, gaussians=2, deltas=0), **quiet)
    tri = train_tri(mono, store, said.corpus, LEXICON, TriOptions(leaves=60, passes=6, gaussians=2, splice=0), **quiet)
    words = {u.id: u.words for u in said.corpus.utterances}
    stream = adapt(tri, store, words, LEXICON, progress="none")
    sat = train_sat(tri, stream, said.corpus, LEXICON, SatOptions(passes=4), **quiet)
    assert (sat.table == tri.table).all(), "the states are the same, so the graph is, too"

    def likelihood(model, features) -> float:  # type: ignore[no-untyped-def]
        return sum(model.align(features.static(id), words[id], LEXICON, id).score for id in store.ids) / len(store.ids)

    volume = np.mean([log_volume(stream.transforms[whose[id]]) for id in store.ids])
    assert likelihood(sat, stream) + volume > likelihood(tri, store) + 0.5
    alone = adapt(tri, store, {store.ids[0]: words[store.ids[0]], store.ids[1]: ()}, LEXICON, progress="none")
    assert list(alone.transforms) == [whose[store.ids[0]]], "who said nothing has no transform"


class Spoken:
    """Frames in memory, as a stream."""

    name = "memory"

    def __init__(self, statics: dict[str, np.ndarray], whose: dict[str, str]) -> None:
        self.statics, self.whose, self.ids, self.dim = statics, whose, sorted(statics), 13

    def frames(self, id: str) -> int:
        return len(self.statics[id])

    def speaker(self, id: str) -> str:
        return self.whose[id]

    def static(self, id: str) -> np.ndarray:
        return self.statics[id]

    __getitem__ = static


def test_adapted_features_are_read_back_alone_and_pasted(tmp_path: Path) -> None:
    import soundfile

    dice = np.random.default_rng(0)
    for n in range(2):
        soundfile.write(tmp_path / f"u{n}.wav", 0.1 * dice.standard_normal(4000), 8000)
    corpus = Corpus(tmp_path, [Utterance(f"u{n}", f"s{n}", ("A",), tmp_path / f"u{n}.wav") for n in range(2)])
    store: FeatureStore = extract(corpus, tmp_path / "features", FeatureOptions(rate=8000), progress="none")
    frontend = Frontend(13, 0, 2, dice.standard_normal((6, 65)).astype(np.float32))
    matrix = dice.standard_normal((6, 7))
    made = AdaptedFeatures(store, frontend, {"s0": matrix})
    made.save(tmp_path / "adapted")
    read = from_spec(str(tmp_path / "adapted"))
    for id in store.ids:
        assert (read[id] == made[id]).all()
        assert (read.frames(id), read.speaker(id), read.dim) == (store.frames(id), store.speaker(id), 6)
    np.testing.assert_allclose(read["u0"], frontend(store.static("u0")) @ matrix[:, :6].T + matrix[:, 6], rtol=1e-4, atol=1e-4)
    assert (read["u1"] == frontend(store.static("u1"))).all(), "a speaker without a transform is left as he is"
    both = from_spec(f"{tmp_path / 'features'}+{tmp_path / 'adapted'}")
    assert both.dim == 126
    assert (both["u0"] == np.hstack([store["u0"], read["u0"]])).all()
    (tmp_path / "adapted" / "adapted.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match="cannot be read"):
        from_spec(str(tmp_path / "adapted"))
