"""Every round is a matching, its matrix conserves the mean, and ranks agree as fast as the spectra predict."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import UsageError
from roundelay.topology import (
    TOPOLOGIES,
    contraction,
    describe,
    gap,
    matching,
    mixing_matrix,
    neighbor_matrix,
    neighbor_row,
    rounds_to_agreement,
    spectrum,
    topology,
)

SIZES = range(1, 17)
SCHEDULED = [name for name, entry in TOPOLOGIES.items() if not entry.random]
DRAWN = [name for name, entry in TOPOLOGIES.items() if entry.random]

names = st.sampled_from(sorted(TOPOLOGIES))
sizes = st.integers(1, 33)
rounds = st.integers(0, 10**9)
seeds = st.integers(-(2**63), 2**64)


def spread(w: np.ndarray) -> float:
    return float(((w - w.mean(axis=0)) ** 2).sum())


def play(w: np.ndarray, name: str, rounds: range, seed: int = 0) -> np.ndarray:
    for r in rounds:
        w = (w + w[matching(name, r, len(w), seed)]) / 2
    return w


def connected(size: int, edges: set[tuple[int, int]]) -> bool:
    reached, fresh = {0}, {0}
    while fresh:
        fresh = {b for pair in edges for a, b in (pair, pair[::-1]) if a in fresh} - reached
        reached |= fresh
    return len(reached) == size


# ---------------------------------------------------------------------------------------------------- matchings


@given(names, rounds, sizes, seeds)
def test_partners_are_mutual(name: str, r: int, size: int, seed: int) -> None:
    partners = matching(name, r, size, seed)
    assert len(partners) == size
    assert all(type(j) is int and partners[j] == i for i, j in enumerate(partners))


@given(names, rounds, sizes, seeds)
def test_same_arguments_same_pairs(name: str, r: int, size: int, seed: int) -> None:
    first = matching(name, r, size, seed)
    matching(name, r + 1, size, seed + 1)
    assert matching(name, r, size, seed) == first


@given(names, rounds, sizes, seeds)
def test_mixing_is_doubly_stochastic_and_conserves_the_mean(name: str, r: int, size: int, seed: int) -> None:
    matrix = mixing_matrix(matching(name, r, size, seed))
    assert (matrix >= 0).all()
    assert np.array_equal(matrix.sum(axis=0), np.ones(size))
    assert np.array_equal(matrix.sum(axis=1), np.ones(size))
    w = np.arange(size, dtype=float) ** 2
    assert (matrix @ w).sum() == w.sum()
    assert spread(matrix @ w) <= spread(w) * (1 + 1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_sweep_pairs_every_rank_and_connects_the_graph(name: str, size: int) -> None:
    entry = topology(name)
    sweeps = 1 if not entry.random else 20
    played = [matching(name, r, size, 3) for r in range(sweeps * entry.sweep(size))]
    met = {(i, j) for partners in played for i, j in enumerate(partners) if i < j}
    assert met <= entry.edges(size)
    assert connected(size, met)
    assert size == 1 or all(any(partners[i] != i for partners in played) for i in range(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_repeats_ignores_the_seed_and_is_fair(name: str, size: int) -> None:
    period = topology(name).period(size)
    assert period is not None
    played = [matching(name, r, size) for r in range(period)]
    assert [matching(name, r + period, size, seed=9) for r in range(period)] == played
    exchanges = {sum(partners[i] != i for partners in played) for i in range(size)}
    assert len(exchanges) == 1


@pytest.mark.parametrize("name", DRAWN)
def test_draws_differ_between_seeds_and_between_sweeps(name: str) -> None:
    entry = topology(name)
    assert entry.period(16) is None
    step = entry.sweep(16)
    assert len({tuple(matching(name, r * step, 16, seed)) for r in range(5) for seed in range(5)}) == 25


def test_random_pairs_never_change_between_versions() -> None:
    # Learners with other versions of numpy, and runs that are resumed years later, rely on these very pairs.
    assert matching("random_ring", 0, 8, 0) == [5, 6, 7, 4, 3, 0, 1, 2]
    assert matching("random_cycle", 3, 7, 1) == [3, 6, 5, 0, 4, 2, 1]


def test_random_ring_draws_all_perfect_matchings_equally() -> None:
    draws = [tuple(matching("random_ring", r, 4, 7)) for r in range(3000)]
    counts = [draws.count(kind) for kind in set(draws)]
    assert len(counts) == 3
    assert all(abs(count - 1000) < 130 for count in counts)  # five standard deviations


@pytest.mark.parametrize("size", SIZES)
def test_ring_colors_are_a_proper_edge_coloring(size: int) -> None:
    period = topology("ring").period(size)
    assert period == (1 if size <= 2 else 2 if size % 2 == 0 else 3)
    played = [(min(i, j), max(i, j)) for r in range(period) for i, j in enumerate(matching("ring", r, size)) if i < j]
    cycle = {(min(i, (i + 1) % size), max(i, (i + 1) % size)) for i in range(size)} if size > 1 else set()
    assert sorted(played) == sorted(cycle)


@pytest.mark.parametrize("size", SIZES)
def test_complete_is_a_tournament(size: int) -> None:
    period = topology("complete").period(size)
    assert period == max(1, size - 1 if size % 2 == 0 else size)
    games = [(i, j) for r in range(period) for i, j in enumerate(matching("complete", r, size)) if i < j]
    assert sorted(games) == [(i, j) for i in range(size) for j in range(i + 1, size)]


@pytest.mark.parametrize("size", SIZES)
def test_exponential_steps_are_powers_of_two(size: int) -> None:
    steps = {2**t for t in range(8)}
    for i, j in topology("exponential").edges(size):
        assert {j - i, size - (j - i)} & steps


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_the_hypercube_agrees_exactly_in_log2_rounds(size: int) -> None:
    w = np.random.default_rng(0).integers(0, 1000, size).astype(float)
    w = play(w, "exponential", range(size.bit_length() - 1))
    assert spread(w) == 0


# ------------------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULED)
def test_scheduled_contraction_is_what_zero_gradients_show(name: str, size: int) -> None:
    predicted = contraction(name, size)
    w = np.random.default_rng(1).normal(size=(size, 50))
    if predicted == 0:  # agreement in finitely many rounds: nothing left but rounding
        assert spread(play(w, name, range(3 * topology(name).sweep(size)))) < 1e-25
        return
    # Let the transient die out, then time many periods, since a complex eigenvalue makes single ones swing. Only the
    # spread is carried, brought back to 1 after every round, so that the measurement never sinks into rounding.
    period = topology(name).sweep(size)
    warm, measured = 5 * period, 15 * period
    shrinkage = []
    for r in range(warm + measured):
        w = play(w - w.mean(axis=0), name, range(r, r + 1))
        shrinkage.append(math.log(spread(w)))
        w /= math.sqrt(spread(w))
    assert math.exp(np.mean(shrinkage[warm:])) == pytest.approx(predicted, abs=0.02)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", DRAWN)
def test_random_contraction_is_what_zero_gradients_show_on_average(name: str, size: int) -> None:
    sweep = topology(name).sweep(size)
    start = np.random.default_rng(2).normal(size=(size, 3))
    after = [spread(play(start, name, range(sweep), seed)) for seed in range(300)]
    expected = contraction(name, size) ** sweep * spread(start)
    assert np.mean(after) == pytest.approx(expected, abs=5 * np.std(after) / math.sqrt(len(after)) + 1e-12)


@pytest.mark.parametrize("size", [4, 6, 8, 10, 16, 32])
def test_even_ring_closed_form(size: int) -> None:
    # P = T_odd T_even is a product of projections: its eigenvalues are squared cosines, its singular values cosines.
    cosine = math.cos(2 * math.pi / size)
    product = mixing_matrix(matching("ring", 1, size)) @ mixing_matrix(matching("ring", 0, size))
    assert spectrum(product).second == pytest.approx(cosine**2, abs=1e-7)
    assert spectrum(product).sigma == pytest.approx(cosine, abs=1e-7)
    assert contraction("ring", size) == pytest.approx(cosine**2, abs=1e-7)


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16, 32, 64, 128])
def test_random_pairs_closed_form_even(size: int) -> None:
    assert contraction("random_ring", size) == pytest.approx(1 / 2 - 1 / (2 * (size - 1)), abs=1e-12)


@pytest.mark.parametrize("size", [3, 5, 7, 9, 15, 33])
def test_random_pairs_closed_form_odd(size: int) -> None:
    # (L - 1)/2 pairs leave a trace of (L + 1)/2, so rho = ((L + 1)/2 - 1) / (L - 1).
    assert contraction("random_ring", size) == pytest.approx(1 / 2, abs=1e-12)


@pytest.mark.parametrize("size", [4, 6, 8, 16, 32])
def test_random_cycle_closed_form_even(size: int) -> None:
    assert contraction("random_cycle", size) ** 2 == pytest.approx((size / 4 - 1) / (size - 1), abs=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_scattered_tournament_is_no_slower_than_random_pairs(size: int) -> None:
    assert contraction("complete", size) <= contraction("random_ring", size) + 1e-12


@pytest.mark.parametrize("size", range(2, 41))
def test_exponential_stays_near_random_pairs_at_every_size(size: int) -> None:
    assert contraction("exponential", size) < 0.6


@pytest.mark.parametrize(
    ("size", "second", "rho", "rho_randomized", "rounds_ring"),
    [
        (4, 0.3333, 0.1111, 0.1111, 5),
        (8, 0.8047, 0.6476, 0.2381, 22),
        (16, 0.9493, 0.9011, 0.2889, 89),
        (32, 0.9872, 0.9745, 0.3118, 358),
        (64, 0.9968, 0.9936, 0.3228, 1433),
        (128, 0.9992, 0.9984, 0.3281, 5733),
    ],
)
def test_synchronous_ring_known_values(size: int, second: float, rho: float, rho_randomized: float, rounds_ring: int) -> None:
    matrix = neighbor_matrix("ring", size)
    measured = spectrum(matrix)
    assert measured.second == pytest.approx(second, abs=5e-5)
    assert measured.gap == pytest.approx(1 - second, abs=5e-5)
    assert measured.sigma**2 == pytest.approx(rho, abs=5e-5)
    assert ((matrix**2).sum() - 1) / (size - 1) == pytest.approx(rho_randomized, abs=5e-5)
    assert math.ceil(math.log(0.01) / math.log(measured.second)) == rounds_ring


@pytest.mark.parametrize("size", range(3, 17))
def test_synchronous_ring_eigenvalues(size: int) -> None:
    expected = sorted((1 + 2 * math.cos(2 * math.pi * j / size)) / 3 for j in range(size))
    assert np.linalg.eigvalsh(neighbor_matrix("ring", size)) == pytest.approx(expected, abs=1e-12)
    assert spectrum(neighbor_matrix("ring", size)).smallest == pytest.approx(expected[0], abs=1e-9)


def test_ring_rows() -> None:
    third = pytest.approx(1 / 3)
    assert neighbor_row("ring", 0, 1) == {0: 1.0}
    assert neighbor_row("ring", 1, 2) == {0: 0.5, 1: 0.5}
    assert neighbor_row("ring", 2, 3) == {0: third, 1: third, 2: third}
    assert neighbor_row("ring", 0, 5) == {0: third, 1: third, 4: third}
    assert neighbor_row("complete", 3, 4) == {j: pytest.approx(1 / 4) for j in range(4)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEDULED)
def test_neighbor_matrix_is_symmetric_and_doubly_stochastic(name: str, size: int) -> None:
    matrix = neighbor_matrix(name, size)
    assert (matrix >= 0).all()
    assert matrix == pytest.approx(matrix.T)
    assert matrix.sum(axis=1) == pytest.approx(1)


@given(st.sampled_from(SCHEDULED), st.integers(2, 16), st.floats(0.001, 0.5))
@settings(max_examples=40, deadline=None)
def test_rounds_to_agreement_is_the_first_round_that_suffices(name: str, size: int, factor: float) -> None:
    n = rounds_to_agreement(name, size, factor)
    spread_of_worst = [np.linalg.norm(play(np.eye(size), name, range(k)) - 1 / size, 2) for k in (n - 1, n)]
    assert spread_of_worst[1] <= factor * (1 + 1e-9)
    assert spread_of_worst[0] >= factor * (1 - 1e-9)


def test_rounds_to_agreement_of_random_pairs() -> None:
    assert [rounds_to_agreement("random_ring", size) for size in (1, 2, 3, 8, 16)] == [0, 1, 14, 11, 13]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_describe_is_json_and_agrees_with_the_functions(name: str) -> None:
    page = json.loads(json.dumps(describe(name, 8)))
    assert page["contraction"] == contraction(name, 8)
    assert page["gap"] == gap(name, 8) == 1 - math.sqrt(page["contraction"])
    assert page["period"] == topology(name).period(8)
    assert len(page["edges"]) == len(topology(name).edges(8))
    assert page["description"]
    assert page["equation"]
    assert describe(name, 1)["edges"] == []


# ------------------------------------------------------------------------------------------------------- errors


def test_an_unknown_name_suggests_a_similar_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'random_ring'"):
        topology("randomring")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: matching("ring", 0, 0),
        lambda: matching("ring", -1, 4),
        lambda: neighbor_row("ring", 4, 4),
        lambda: neighbor_matrix("random_ring", 4),
        lambda: rounds_to_agreement("ring", 4, factor=1.5),
    ],
)
def test_impossible_requests_are_usage_errors(wrong) -> None:
    with pytest.raises(UsageError, match="what to do"):
        wrong()
