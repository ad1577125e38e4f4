"""Viterbi search equals exhaustive search, graphs contain exactly the pronunciations, and models survive their files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_speech import LEXICON, MELS

from roundelay.errors import DataError
from roundelay.speech.hmm.frontend import Frontend
from roundelay.speech.hmm.gmm import Gmm, GmmStatistics
from roundelay.speech.hmm.model import AlignmentModel, monophone_table, seconds
from roundelay.speech.hmm.utterance_graph import UtteranceGraph, utterance_graph
from roundelay.speech.hmm.viterbi import StateGraph, best_path

Array = np.ndarray[Any, Any]

# ---------------------------------------------------------------------------------------------------------- best path


@st.composite
def searches(draw: st.DrawFn) -> tuple[Array, Array, Array, StateGraph]:
    states, frames, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    first, source = [0], []
    for state in range(states):
        source += [s for s in range(state) if random.random() < 0.5]
        first.append(len(source))
    start, final = (np.where(random.random(states) < 0.5, random.normal(size=states), -np.inf) for _ in range(2))
    graph = StateGraph(np.array(first, np.int32), np.array(source, np.int32), random.normal(size=len(source)), start, final)
    scores = random.normal(size=(frames, columns)).astype(np.float32)
    return scores, random.integers(columns, size=states), random.uniform(0.05, 0.95, states), graph


def path_score(path: tuple[int, ...], scores: Array, column: Array, loop: Array, graph: StateGraph) -> float:
    total = graph.start[path[0]] + sum(float(scores[t, column[s]]) for t, s in enumerate(path))
    for before, after in itertools.pairwise(path):
        if before == after:
            total += np.log(loop[before])
            continue
        arcs = [a for a in range(graph.first[after], graph.first[after + 1]) if graph.source[a] == before]
        if not arcs:
            return -np.inf
        total += np.log1p(-loop[before]) + graph.weight[arcs[0]]
    return float(total + np.log1p(-loop[path[-1]]) + graph.final[path[-1]])


@given(searches())
def test_best_path_equals_exhaustive_search(search: tuple[Array, Array, Array, StateGraph]) -> None:
    scores, _, _, graph = search
    all_paths = itertools.product(range(graph.states), repeat=len(scores))
    best = max(path_score(path, *search) for path in all_paths)
    score, path = best_path(*search)
    assert score == pytest.approx(best, abs=1e-4) if np.isfinite(best) else score == -np.inf
    if np.isfinite(best):
        assert path_score(tuple(path.tolist()), *search) == pytest.approx(best, abs=1e-4)


def test_search_larger_than_memory_raises_before_it_starts() -> None:
    graph = utterance_graph([[((1,), 0.0)]] * 3000, [3, 3], context=False, silence=0.5).arcs
    scores = np.broadcast_to(np.zeros((1, 1), np.float32), (100_000, 1))
    with pytest.raises(DataError, match="too long to align"):
        best_path(scores, np.zeros(graph.states, np.int32), np.full(graph.states, 0.5), graph)


# ------------------------------------------------------------------------------------------------------------- graphs

SIL = 0
words = st.lists(
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.floats(-3, 0)),
        min_size=1,
        max_size=2,
        unique_by=lambda variant: variant[0],
    ),
    min_size=1,
    max_size=3,
)


def phone_sequences(variants: list[list[tuple[tuple[int, ...], float]]], silence: float) -> dict[tuple[int, ...], float]:
    """Return all phone sequences with the log probability of the best reading of each."""
    sequences: dict[tuple[int, ...], float] = {}
    for pauses in itertools.product([False, True], repeat=len(variants) + 1):
        for chosen in itertools.product(*variants):
            phones = [SIL] if pauses[0] else []
            total = 0.0
            for (variant, cost), pause in zip(chosen, pauses[1:], strict=True):
                phones += [*variant, *([SIL] if pause else [])]
                total += cost
            total += sum(np.log(silence if pause else 1 - silence) for pause in pauses)
            sequences[tuple(phones)] = max(total, sequences.get(tuple(phones), -np.inf))
    return sequences


def graph_paths(graph: UtteranceGraph) -> list[tuple[tuple[int, ...], float]]:
    """Return the nodes and the weight of all paths through a graph whose phones have one state."""
    arcs = graph.arcs
    waiting = [((n,), float(arcs.start[n])) for n in range(arcs.states) if np.isfinite(arcs.start[n])]
    paths = []
    while waiting:
        path, cost = waiting.pop()
        if np.isfinite(arcs.final[path[-1]]):
            paths.append((path, cost + float(arcs.final[path[-1]])))
        for state in range(path[-1] + 1, arcs.states):
            for a in range(arcs.first[state], arcs.first[state + 1]):
                if arcs.source[a] == path[-1]:
                    waiting.append(((*path, state), cost + float(arcs.weight[a])))
    return paths


@given(words, st.booleans())
def test_graphs_contain_exactly_the_phone_sequences(variants: Any, context: bool) -> None:
    graph = utterance_graph(variants, [1, 1, 1, 1], context=context, silence=0.3)
    actual: dict[tuple[int, ...], float] = {}
    for path, cost in graph_paths(graph):
        phones = tuple(graph.phone[list(path)].tolist())
        actual[phones] = max(cost, actual.get(phones, -np.inf))
        if context:
            for before, here, after in zip((SIL, *phones), phones, (*phones[1:], SIL), strict=False):
                key = (before * 4 + here) * 4 + after if here != SIL else 0
                assert key in graph.state_key[list(path)]
    expected = phone_sequences(variants, 0.3)
    assert set(actual) == set(expected)
    for phones, cost in expected.items():
        assert actual[phones] == pytest.approx(cost)


@given(words, st.booleans())
def test_with_edge_silence_all_paths_begin_and_end_with_silence(variants: Any, context: bool) -> None:
    graph = utterance_graph(variants, [1, 1, 1, 1], context=context, silence=0.3, edge_silence=True)
    actual = {tuple(graph.phone[list(path)].tolist()) for path, _ in graph_paths(graph)}
    assert actual == {phones for phones in phone_sequences(variants, 0.3) if phones[0] == phones[-1] == SIL}
    assert graph.min_frames == min(map(len, actual))


@given(words)
def test_phones_in_context_have_matching_neighbors(variants: Any) -> None:
    graph = utterance_graph(variants, [1, 1, 1, 1], context=True, silence=0.3)
    for path, _ in graph_paths(graph):
        phones = graph.phone[list(path)].tolist()
        for n, state in enumerate(path):
            if phones[n] != SIL:
                left = phones[n - 1] if n else SIL
                right = phones[n + 1] if n + 1 < len(phones) else SIL
                assert graph.state_key[state] == (left * 4 + phones[n]) * 4 + right


def test_utterance_without_words_is_silence() -> None:
    graph = utterance_graph([], [3, 3], context=True, silence=0.5)
    assert graph.phone.tolist() == [SIL]
    assert graph.min_frames == 3


# ----------------------------------------------------------------------------------------------------------- mixtures


def random_gmm(random: np.random.Generator, sizes: list[int], dim: int) -> Gmm:
    first = np.concatenate([[0], np.cumsum(sizes)])
    weight = np.concatenate([random.dirichlet(np.ones(n)) for n in sizes])
    return Gmm(first, weight, random.normal(size=(first[-1], dim)), random.uniform(0.2, 2.0, (first[-1], dim)))


def test_gmm_scores_equal_the_formula() -> None:
    random = np.random.default_rng(5)
    gmm = random_gmm(random, [1, 4, 2], 6)
    x = random.normal(size=(700, 6)).astype(np.float32)
    away = x[:, None, :].astype(np.float64) - gmm.mean
    parts = -0.5 * (away**2 / gmm.variance + np.log(2 * np.pi * gmm.variance)).sum(-1) + np.log(gmm.weight)
    expected = np.stack([np.logaddexp.reduce(parts[:, a:b], axis=1) for a, b in itertools.pairwise(gmm.first)], axis=1)
    np.testing.assert_allclose(gmm.scores(x), expected, atol=2e-4)
    np.testing.assert_allclose(gmm.scores(x, np.array([2, 0])), expected[:, [2, 0]], atol=2e-4)
    statistics = GmmStatistics.empty(gmm.components, 6)
    gmm.accumulate(x, np.ones(len(x), np.int32), statistics)
    assert statistics.loglike == pytest.approx(expected[:, 1].sum(), rel=1e-5)
    assert gmm.best_components(x, np.ones(len(x), np.int32)).tolist() == (1 + parts[:, 1:5].argmax(1)).tolist()


def test_splitting_and_estimating_never_decrease_likelihood() -> None:
    random = np.random.default_rng(6)
    x = np.concatenate([random.normal(m, s, (400, 3)) for m, s in ((-3, 0.5), (0, 1.0), (2, 0.3))]).astype(np.float32)
    pdfs = np.zeros(len(x), np.int32)
    gmm = Gmm.single(x.mean(0)[None], x.var(0)[None])
    history = []
    for number in range(25):
        statistics = GmmStatistics.empty(gmm.components, 3)
        gmm.accumulate(x, pdfs, statistics)
        history.append(statistics.loglike / len(x))
        gmm = gmm.updated(statistics, np.full(3, 1e-4))
        if number in (3, 8):
            gmm = gmm.grown(np.array([float(len(x))]), gmm.components + 1, seed=number)
    grown = {4, 9}
    assert all(b >= a - 1e-4 for n, (a, b) in enumerate(itertools.pairwise(history), 1) if n not in grown)
    assert gmm.components == 3
    assert sorted(gmm.mean[:, 0].round().tolist()) == [-3, 0, 2]


def test_components_without_frames_are_dropped_pdfs_are_kept() -> None:
    gmm = random_gmm(np.random.default_rng(7), [2, 2], 3)
    statistics = GmmStatistics.empty(4, 3)
    x = np.random.default_rng(8).normal(gmm.mean[0], 0.01, (100, 3)).astype(np.float32)
    far = Gmm(gmm.first, gmm.weight, gmm.mean + np.array([[0], [50], [0], [0]]), gmm.variance)
    far.accumulate(x, np.zeros(100, np.int32), statistics)
    updated = far.updated(statistics, np.full(3, 1e-3))
    assert updated.first.tolist() == [0, 1, 2]
    assert updated.weight.tolist() == [1.0, 1.0]
    np.testing.assert_allclose(updated.mean[0], x.mean(0), atol=1e-4)
    np.testing.assert_allclose(updated.variance[0], np.full(3, 1e-3), rtol=1e-6)  # floored
    np.testing.assert_array_equal(updated.mean[1], far.mean[2])


@given(st.lists(st.floats(0, 1e5), min_size=2, max_size=6), st.integers(1, 60))
def test_splitting_respects_budget_and_frames(occupancy: list[float], total: int) -> None:
    gmm = Gmm.single(np.zeros((len(occupancy), 2)), np.ones((len(occupancy), 2)))
    grown = gmm.grown(np.array(occupancy), total)
    sizes = np.diff(grown.first)
    assert grown.components <= max(total, len(occupancy))
    assert all(size == 1 or frames / size >= 20.0 for size, frames in zip(sizes, occupancy, strict=True))
    np.testing.assert_allclose(np.add.reduceat(grown.weight, grown.first[:-1]), 1.0, rtol=1e-6)


# -------------------------------------------------------------------------------------------------------------- models


def small_model(**other: Any) -> AlignmentModel:
    phones = ["SIL", *LEXICON.phones]
    table = monophone_table(len(phones), 3, 3)
    gmm = random_gmm(np.random.default_rng(3), [2] * (int(table.max()) + 1), 39)
    loops = np.random.default_rng(4).uniform(0.1, 0.9, int(table.max()) + 1)
    return AlignmentModel(phones, table, loops, gmm, **other)


def test_models_survive_their_files_bit_by_bit(tmp_path: Path) -> None:
    matrix = np.random.default_rng(1).normal(size=(39, MELS * 3)).astype(np.float32)
    for frontend in (Frontend(), Frontend(13, 0, 1, matrix)):
        model = small_model(frontend=frontend, silence_probability=0.25)
        model.save(tmp_path)
        again = AlignmentModel.load(tmp_path)
        x = np.random.default_rng(2).normal(size=(40, MELS)).astype(np.float32)
        assert again.loglikes(x).tobytes() == model.loglikes(x).tobytes()
        assert again.self_loop.tobytes() == model.self_loop.tobytes()
        assert (again.lexicon_phones, again.silence_probability) == (model.lexicon_phones, 0.25)
        before, after = (m.align(x, ("OLGA", "EITHER"), LEXICON) for m in (model, again))  # type: ignore[arg-type]
        assert before.pdfs.tolist() == after.pdfs.tolist()
        assert before.score == after.score


def test_error_names_a_damaged_or_missing_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no alignment model"):
        AlignmentModel.load(tmp_path)
    small_model().save(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        AlignmentModel.load(tmp_path)


def test_monophones_ignore_their_neighbors() -> None:
    model = small_model()
    assert model.pdf(1, 2, 3, 1) == model.pdf(0, 2, 0, 1) == 3 + 3 * 1 + 1
    assert sorted({model.pdf(0, p, 0, s) for p in range(len(model.lexicon_phones)) for s in range(3)}) == list(
        range(model.num_pdfs)
    )


def test_errors_name_utterances_that_cannot_be_aligned() -> None:
    model = small_model()
    x = np.zeros((11, MELS), np.float32)
    with pytest.raises(DataError, match=r"too short for its words: 11 frames, 12 are needed\n.*utterance u1"):
        model.align(x, ("OLGA",), LEXICON, "u1")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"'QUUX' has no pronunciation\n.*utterance u1"):
        model.align(x, ("QUUX",), LEXICON, "u1")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="not finite"):
        model.align_scores(np.full((20, model.num_pdfs), np.nan), ("O",), LEXICON, "u1")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="scores of shape"):
        model.align_scores(np.zeros((20, 3)), ("O",), LEXICON, "u1")  # type: ignore[arg-type]


def test_boundaries_lie_between_the_centers_of_frames() -> None:
    assert seconds(0) == 0.0
    assert seconds(10) == pytest.approx(0.1075)
