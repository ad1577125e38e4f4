"""Decision trees: likelihood gains, questions, a pdf for each context; LDA and MLLT."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.transforms import LdaStatistics, MlltStatistics, transform_gmm
from roundelay.speech.hmm.tree import ContextStatistics, TiedStates, build_trees, cluster, likelihood, questions

Array = np.ndarray[Any, Any]
PHONES, STATES, DIM = 7, 3, 4
FLOOR = np.full(DIM, 1e-3)
UNSEEN = 6


def key(left: int, phone: int, right: int, state: int) -> int:
    return ((left * PHONES + phone) * PHONES + right) * STATES + state


def speech(seed: int = 0, frames: int = 60) -> tuple[Array, Array]:
    """Return frames and keys: phones 1, 2 are similar, so are 3, 4, 5; only the first state of phone 3 depends on context."""
    random = np.random.default_rng(seed)
    center = np.array([[0.0], [2.0], [2.2], [-2.0], [-2.2], [-2.1], [0.0]]) + 0.1 * random.normal(size=(PHONES, DIM))
    xs, keys = [], []
    for left in range(UNSEEN):
        for phone in range(UNSEEN):
            for right in range(UNSEEN):
                for state in range(STATES):
                    mean = center[phone] + state * 0.5
                    if phone == 3 and state == 0 and left in (1, 2):
                        mean = mean + 4.0
                    context = (left, phone, right) if phone else (0, 0, 0)
                    xs.append(mean + 0.5 * random.normal(size=(frames // 6, DIM)))
                    keys.append(np.full(frames // 6, key(*context, state)))
    return np.concatenate(xs).astype(np.float32), np.concatenate(keys).astype(np.int32)


@pytest.fixture(scope="module")
def statistics() -> ContextStatistics:
    return ContextStatistics.of_frames(*speech())


def grown(statistics: ContextStatistics, **other: Any) -> TiedStates:
    options: dict[str, Any] = {"leaves": 40, "min_frames": 20.0, "min_gain": 0.0, "floor": FLOOR} | other
    return build_trees(statistics, PHONES, [STATES] * PHONES, **options)


def test_merged_statistics_equal_those_of_all_frames() -> None:
    x, keys = speech()
    whole = ContextStatistics.of_frames(x, keys)
    cuts = [0, 1000, 1001, len(x)]
    parts = [ContextStatistics.of_frames(x[a:b], keys[a:b]) for a, b in itertools.pairwise(cuts)]
    merged = ContextStatistics.merged(parts)
    np.testing.assert_array_equal(merged.keys, whole.keys)
    np.testing.assert_allclose(merged.moments, whole.moments)
    chosen = keys == whole.keys[17]
    row = whole.moments[17]
    np.testing.assert_allclose(row[0], chosen.sum())
    np.testing.assert_allclose(row[1 : 1 + DIM], x[chosen].sum(0), rtol=1e-4)


def test_questions_contain_sets_of_similar_phones(statistics: ContextStatistics) -> None:
    asked = {frozenset(np.flatnonzero(row).tolist()) for row in questions(statistics, PHONES, STATES, FLOOR)}
    assert {frozenset([1, 2]), frozenset([0]), frozenset([3])} <= asked
    assert all(0 not in members or members == {0} for members in asked)


def test_clustering_merges_by_minimum_loss() -> None:
    frames = np.random.default_rng(0).normal(size=(500, 1))
    moments = np.stack(
        [np.concatenate([[500.0], (frames + at).sum(0), ((frames + at) ** 2).sum(0)])[None] for at in (0.0, 5.0, 0.3, 9.0)]
    )
    assert cluster(moments, np.array([1e-3]))[4:] == [frozenset([0, 2]), frozenset([1, 3])]


def test_first_split_is_the_one_in_the_data(statistics: ContextStatistics) -> None:
    tied = grown(statistics, leaves=PHONES * STATES + 1)
    assert len(tied.gains) == 1
    changed = tied.table[:, 3, :, 0]
    assert len(set(changed[[1, 2]].ravel().tolist())) == 1
    assert len(set(changed[[0, 3, 4, 5]].ravel().tolist())) == 1
    assert changed[1, 0] != changed[0, 0]
    after, elsewhere = tied.mean[changed[1, 0]], tied.mean[changed[0, 0]]
    np.testing.assert_allclose(after - elsewhere, 4.0, atol=0.3)


def test_splits_gain_likelihood_and_gains_add_up(statistics: ContextStatistics) -> None:
    tied = grown(statistics)
    assert len(tied.occupancy) == 40
    assert min(tied.gains) > 0
    pdf = tied.table.reshape(-1)[statistics.keys]
    state = statistics.keys // (PHONES * STATES) % PHONES * STATES + statistics.keys % STATES

    def total(group: Array) -> float:
        return float(sum(likelihood(statistics.moments[group == g].sum(0), FLOOR) for g in np.unique(group)))

    assert total(pdf) - total(state) == pytest.approx(sum(tied.gains), rel=1e-6)
    np.testing.assert_allclose(np.bincount(pdf, statistics.moments[:, 0], len(tied.occupancy)), tied.occupancy)


def test_each_context_has_a_pdf_of_its_phone_and_state(statistics: ContextStatistics) -> None:
    tied = grown(statistics)
    assert tied.table.min() == 0
    assert tied.table.max() == len(tied.occupancy) - 1
    owners: dict[int, set[tuple[int, int]]] = {}
    for (_, phone, _, state), pdf in np.ndenumerate(tied.table):
        owners.setdefault(int(pdf), set()).add((phone, state))
    assert all(len(owner) == 1 for owner in owners.values())
    assert {owner for pairs in owners.values() for owner in pairs} == {(p, s) for p in range(PHONES) for s in range(STATES)}


def test_silence_is_not_split_and_unseen_phones_get_all_speech(statistics: ContextStatistics) -> None:
    tied = grown(statistics)
    assert all(len(set(tied.table[:, 0, :, state].ravel().tolist())) == 1 for state in range(STATES))
    unseen = tied.table[0, UNSEEN, 0, 0]
    assert tied.occupancy[unseen] == 0
    assert np.all(np.isfinite(tied.mean[unseen]))
    assert np.all(tied.variance[unseen] > 1.0)  # the Gaussian of all speech


def test_leaves_have_min_frames_and_splits_min_gain(statistics: ContextStatistics) -> None:
    tied = grown(statistics, leaves=10_000, min_frames=100.0)
    parts = [np.unique(tied.table[:, p, :, s]) for p in range(1, PHONES) for s in range(STATES)]
    assert all(tied.occupancy[leaves].min() >= 100.0 for leaves in parts if len(leaves) > 1)
    assert max(map(len, parts)) > 1
    assert len(grown(statistics, min_gain=1e9).gains) == 0


# ---------------------------------------------------------------------------------------------------------- transforms


def test_lda_finds_the_direction_that_separates_classes() -> None:
    random = np.random.default_rng(0)
    classes = random.integers(3, size=3000)
    direction = np.array([0.6, 0.0, -0.8, 0.0])
    x = random.normal(size=(3000, 4)) * [3, 1, 2, 5] + 4.0 * classes[:, None] * direction
    statistics = LdaStatistics.empty(4, 4)  # one class without frames
    for part in np.array_split(np.arange(3000), 7):
        statistics.accumulate(x[part].astype(np.float32), classes[part])
    matrix = statistics.transform(2)
    expected = direction / np.array([9.0, 1.0, 4.0, 25.0])
    assert abs(matrix[0] @ expected) / np.linalg.norm(matrix[0]) / np.linalg.norm(expected) > 0.99
    inside = (x - np.stack([x[classes == c].mean(0) for c in range(3)])[classes]) @ matrix.T
    np.testing.assert_allclose(np.cov(inside.T), np.eye(2), atol=0.02)


def test_mllt_increases_likelihood_of_diagonal_gaussians() -> None:
    random = np.random.default_rng(0)
    mixing = random.normal(size=(4, 4))
    means = 5 * random.normal(size=(3, 4))
    components = random.integers(3, size=6000).astype(np.int32)
    x = ((random.normal(size=(6000, 4)) + means[components]) @ mixing.T).astype(np.float32)

    def fit(y: Array) -> Gmm:
        parts = [y[components == c] for c in range(3)]
        return Gmm.single(np.stack([p.mean(0) for p in parts]), np.stack([p.var(0) for p in parts]))

    def score(y: Array, gmm: Gmm) -> float:
        return float(gmm.scores(y)[np.arange(len(y)), components].mean())

    gmm = fit(x)
    statistics = MlltStatistics.empty(4)
    for part in np.array_split(np.arange(6000), 5):
        statistics.accumulate(x[part], gmm.best_components(x[part], components[part]), gmm)
    matrix = statistics.transform()
    turned = (x @ matrix.T).astype(np.float32)
    assert score(turned, fit(turned)) + np.linalg.slogdet(matrix)[1] > score(x, gmm) + 0.2
    np.testing.assert_allclose(transform_gmm(gmm, matrix).mean, fit(turned).mean, atol=1e-2)
