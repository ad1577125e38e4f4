"""Speaker adaptation: fMLLR inverts a known transform, few frames change little, streams survive their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_speech import LEXICON, toy

from roundelay.errors import DataError
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import FeatureStore, from_spec
from roundelay.speech.hmm.adaptation import AdaptedFeatures, adapt
from roundelay.speech.hmm.fmllr import SpeakerStatistics, apply_fmllr
from roundelay.speech.hmm.frontend import Frontend
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.train_gmm import (
    MonoOptions,
    SatOptions,
    TriOptions,
    train_mono,
    train_sat,
    train_tri,
)

DIM, PDFS = 5, 12


def mixtures(seed: int) -> Gmm:
    """Return mixtures of two Gaussians each."""
    rng = np.random.default_rng(seed)
    mean = 2.0 * rng.standard_normal((2 * PDFS, DIM))
    variance = rng.uniform(0.1, 0.5, (2 * PDFS, DIM))
    return Gmm(2 * np.arange(PDFS + 1), np.full(2 * PDFS, 0.5), mean, variance)


def sample(gmm: Gmm, frames: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw frames from the mixtures; return them with their pdfs."""
    component = rng.integers(0, 2 * PDFS, frames)
    x = gmm.mean[component] + np.sqrt(gmm.variance[component]) * rng.standard_normal((frames, DIM))
    return x, component // 2


def accumulated(gmm: Gmm, x: np.ndarray, pdfs: np.ndarray) -> SpeakerStatistics:
    statistics = SpeakerStatistics.empty(DIM)
    statistics.accumulate(x, pdfs, gmm)
    return statistics


def log_determinant(matrix: np.ndarray) -> float:
    """Return log |det A|: the log likelihood per frame gains this in the transformed space."""
    return float(np.linalg.slogdet(matrix[:, :-1])[1])


def fit(gmm: Gmm, x: np.ndarray, pdfs: np.ndarray, matrix: np.ndarray) -> float:
    """Return the mean log likelihood of the frames' own pdfs, in the space of the original features."""
    return float(gmm.scores(apply_fmllr(x, matrix))[np.arange(len(x)), pdfs].mean()) + log_determinant(matrix)


def test_fmllr_inverts_a_known_transform() -> None:
    rng, gmm = np.random.default_rng(0), mixtures(1)
    original, pdfs = sample(gmm, 4000, rng)
    distortion = np.eye(DIM) + 0.1 * rng.standard_normal((DIM, DIM))
    recorded = original @ distortion.T + 0.3
    x, total = recorded, np.eye(DIM, DIM + 1)
    for _ in range(3):  # posteriors depend on the transformed frames, so repeat the estimation
        step = accumulated(gmm, x, pdfs).transform()
        total = np.hstack([step[:, :-1] @ total[:, :-1], (step[:, :-1] @ total[:, -1] + step[:, -1])[:, None]])
        x = apply_fmllr(recorded, total)
    np.testing.assert_allclose(total[:, :-1] @ distortion, np.eye(DIM), atol=0.03)
    np.testing.assert_allclose(x, original, atol=0.25)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 400))
def test_fmllr_improves_the_fit_and_a_strong_prior_keeps_identity(seed: int, frames: int) -> None:
    rng, gmm = np.random.default_rng(seed), mixtures(seed)
    x, pdfs = sample(gmm, frames, rng)
    x = x * rng.uniform(0.8, 1.2, DIM) + rng.uniform(-0.5, 0.5, DIM)
    statistics, identity = accumulated(gmm, x, pdfs), np.eye(DIM, DIM + 1)
    away = []
    for prior in (10.0, 1e3, 1e6):
        matrix = (statistics + SpeakerStatistics.expected(gmm, prior)).transform()
        assert fit(gmm, x, pdfs, matrix) >= fit(gmm, x, pdfs, identity) - 1e-3
        away.append(np.abs(matrix - identity).max())
    assert away[0] > away[1] > away[2] < 0.01
    np.testing.assert_allclose(SpeakerStatistics.expected(gmm, 50.0).transform(), identity, atol=1e-6)


def test_sat_fits_different_speakers_better() -> None:
    speech = toy(90, seed=3)
    rng = np.random.default_rng(5)
    distortions = {f"speaker{n}": np.eye(13) + 0.1 * rng.standard_normal((13, 13)) for n in range(3)}
    speaker_of = {u.id: u.speaker for u in speech.corpus.utterances}
    speech.statics = {id: (x @ distortions[speaker_of[id]].T).astype(np.float32) for id, x in speech.statics.items()}
    store = MemoryStream(speech.statics, speaker_of)
    mono = train_mono(store, speech.corpus, LEXICON, MonoOptions(passes=8, gaussians=2, deltas=0))
    tri = train_tri(mono, store, speech.corpus, LEXICON, TriOptions(leaves=60, passes=6, gaussians=2, splice=0))
    words = {u.id: u.words for u in speech.corpus.utterances}
    stream = adapt(tri, store, words, LEXICON, progress="none")
    sat = train_sat(tri, stream, speech.corpus, LEXICON, SatOptions(passes=4))
    assert (sat.table == tri.table).all(), "the tied states must be the same, so that the graph is"

    def likelihood(model, features) -> float:  # type: ignore[no-untyped-def]
        return sum(model.align(features.static(id), words[id], LEXICON, id).score for id in store.ids) / len(store.ids)

    volume = np.mean([log_determinant(stream.transforms[speaker_of[id]]) for id in store.ids])
    assert likelihood(sat, stream) + volume > likelihood(tri, store) + 0.5
    alone = adapt(tri, store, {store.ids[0]: words[store.ids[0]], store.ids[1]: ()}, LEXICON, progress="none")
    assert list(alone.transforms) == [speaker_of[store.ids[0]]], "a speaker without words must have no transform"


class MemoryStream:
    """A stream of frames in memory."""

    name = "memory"

    def __init__(self, statics: dict[str, np.ndarray], speaker_of: dict[str, str]) -> None:
        self.statics, self.speaker_of, self.ids, self.dim = statics, speaker_of, sorted(statics), 13

    def frames(self, id: str) -> int:
        return len(self.statics[id])

    def speaker(self, id: str) -> str:
        return self.speaker_of[id]

    def static(self, id: str) -> np.ndarray:
        return self.statics[id]

    __getitem__ = static


def test_adapted_features_survive_files_alone_and_pasted(tmp_path: Path) -> None:
    import soundfile

    rng = np.random.default_rng(0)
    for n in range(2):
        soundfile.write(tmp_path / f"u{n}.wav", 0.1 * rng.standard_normal(4000), 8000)
    corpus = Corpus(tmp_path, [Utterance(f"u{n}", f"s{n}", ("A",), tmp_path / f"u{n}.wav") for n in range(2)])
    store: FeatureStore = extract(corpus, tmp_path / "features", FeatureOptions(rate=8000), progress="none")
    frontend = Frontend(13, 0, 2, rng.standard_normal((6, 65)).astype(np.float32))
    matrix = rng.standard_normal((6, 7))
    adapted = AdaptedFeatures(store, frontend, {"s0": matrix})
    adapted.save(tmp_path / "adapted")
    read = from_spec(str(tmp_path / "adapted"))
    for id in store.ids:
        assert (read[id] == adapted[id]).all()
        assert (read.frames(id), read.speaker(id), read.dim) == (store.frames(id), store.speaker(id), 6)
    np.testing.assert_allclose(read["u0"], frontend(store.static("u0")) @ matrix[:, :6].T + matrix[:, 6], rtol=1e-4, atol=1e-4)
    assert (read["u1"] == frontend(store.static("u1"))).all(), "a speaker without a transform must stay unadapted"
    both = from_spec(f"{tmp_path / 'features'}+{tmp_path / 'adapted'}")
    assert both.dim == 126
    assert (both["u0"] == np.hstack([store["u0"], read["u0"]])).all()
    (tmp_path / "adapted" / "adapted.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match="cannot be read"):
        from_spec(str(tmp_path / "adapted"))
