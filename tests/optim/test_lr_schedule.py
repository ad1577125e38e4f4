"""Learning-rate schedules over global samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import UsageError
from roundelay.optim.lr_schedule import SHAPES, lr_schedule

S = 1000
"""Samples in an epoch."""


def test_constant_is_constant() -> None:
    schedule = lr_schedule("constant", S, 10 * S, 0.0, 10.0)
    assert {schedule(p) for p in range(0, 10 * S, 137)} == {1.0}


@pytest.mark.parametrize("kind", SHAPES)
def test_warm_up_is_linear_from_a_tenth(kind: str) -> None:
    schedule = lr_schedule(kind, S, 100 * S, 4.0, 50.0)
    plain = lr_schedule("constant" if kind != "cosine" else kind, S, 100 * S, 4.0, 50.0)
    shape = 1.0 if kind != "cosine" else plain(4 * S)
    assert schedule(0) == pytest.approx(0.1 * shape)
    assert schedule(2 * S) == pytest.approx(0.55 * shape)
    assert schedule(4 * S) == pytest.approx(shape)


def test_sqrt2_decay_divides_by_the_square_root_of_two_per_epoch() -> None:
    schedule = lr_schedule("sqrt2_decay", S, 20 * S, 0.0, 10.0)
    assert schedule(10 * S - 1) == 1.0
    for epoch in range(10, 20):
        expected = 2 ** (-0.5 * (epoch - 9))
        assert schedule(epoch * S) == pytest.approx(expected)
        assert schedule(epoch * S + S - 1) == pytest.approx(expected)


def test_cosine_goes_from_one_to_zero() -> None:
    schedule = lr_schedule("cosine", S, 8 * S, 0.0, 10.0)
    assert [schedule(k * S) for k in (0, 2, 4, 6, 8)] == pytest.approx(
        [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0]
    )
    warm = lr_schedule("cosine", S, 8 * S, 2.0, 10.0)
    assert warm(2 * S) == pytest.approx(1.0)
    assert warm(5 * S) == pytest.approx(0.5)


@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 500), st.floats(0.01, 30), st.floats(0, 10), st.floats(0, 20), st.data())
def test_a_factor_is_never_negative_nor_above_one(
    kind: str, samples: int, epochs: float, warmup: float, anneal: float, data: st.DataObject
) -> None:
    total = max(1, round(samples * epochs))
    schedule = lr_schedule(kind, samples, total, warmup, anneal)
    position = data.draw(st.integers(0, total))
    assert 0 <= schedule(position) <= 1 + 1e-12


def test_an_unknown_schedule_suggests_a_similar_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'cosine'"):
        lr_schedule("cosin", S, S, 0.0, 0.0)
