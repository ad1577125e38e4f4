"""Runs of gradients without an exchange are recovered from the gaps that a worker counts."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from roundelay.metrics.gaps import quantile, run_lengths


def gaps_of(exchanged: list[bool]) -> Counter[int]:
    """Return what `Worker.end` counts in steps with and without an exchange since the previous step."""
    gaps: Counter[int] = Counter()
    gap = 0
    for exchange in exchanged:
        gap = 0 if exchange else gap + 1
        gaps[gap] += 1
    return gaps


@given(st.lists(st.booleans(), max_size=60))
def test_lengths_are_those_of_the_runs(exchanged: list[bool]) -> None:
    runs = Counter(len(list(steps)) for exchange, steps in groupby(exchanged) if not exchange)
    pairs = zip([True, *exchanged], exchanged, strict=False)
    runs[0] = sum(before and now for before, now in pairs)  # nothing between the start or an exchange and the next exchange
    lengths = run_lengths(gaps_of(exchanged))
    unfinished = bool(exchanged) and not exchanged[-1]
    assert {n: count for n, count in lengths.items() if n} == {n: count for n, count in runs.items() if n and count}
    assert lengths[0] == max(runs[0] - unfinished, 0)


def test_lengths_of_an_example() -> None:
    assert run_lengths(gaps_of([True, False, False, True, True, False, True])) == {0: 2, 1: 1, 2: 1}
    assert run_lengths(gaps_of([False] * 500)) == {500: 1}
    assert run_lengths({}) == {}


@given(st.dictionaries(st.integers(0, 10**9), st.integers(0, 10**100), max_size=8))
def test_impossible_gaps_give_no_negative_numbers(gaps: dict[int, int]) -> None:
    lengths = run_lengths(gaps)
    assert all(count > 0 for count in lengths.values())
    assert sum(lengths.values()) == max(gaps.values(), default=0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300))
def test_99_percent_of_the_runs_are_at_most_as_long_as_the_quantile(runs: list[int]) -> None:
    bound = quantile(Counter(runs), 0.99)
    assert sum(n <= bound for n in runs) >= 0.99 * len(runs)
    assert sum(n < bound for n in runs) < 0.99 * len(runs)


def test_quantile_of_nothing() -> None:
    assert quantile({}, 0.99) == 0
