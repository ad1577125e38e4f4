"""Compiled kernels give the results of the same formulas in tensor operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from roundelay.core import kernels

DTYPES = [torch.float32, torch.float64]
scalars = st.floats(-2, 2, width=32)


@st.composite
def vectors(draw: st.DrawFn, count: int) -> list[Tensor]:
    dtype = draw(st.sampled_from(["float32", "float64"]))
    width = 32 if dtype == "float32" else 64
    size = draw(st.integers(1, 20))
    elements = st.floats(-100, 100, width=width)
    return [torch.from_numpy(draw(arrays(dtype, size, elements=elements))) for _ in range(count)]


def close(a: Tensor, b: Tensor, scale: float = 1e4) -> bool:
    """Return whether a and b are equal up to the rounding of a few operations on numbers of that scale."""
    return torch.allclose(a, b, rtol=0, atol=8 * torch.finfo(a.dtype).eps * scale)


@given(vectors(2))
def test_pair_average_leaves_the_same_bits_on_both_sides(v: list[Tensor]) -> None:
    a, b = v
    expected = 0.5 * (a + b)
    kernels.pair_average(a, b)
    assert torch.equal(a, expected)
    assert torch.equal(b, expected)


@given(vectors(3))
def test_half_the_difference(v: list[Tensor]) -> None:
    w, other, mine = v
    expected = w + 0.5 * (other - mine)
    kernels.add_half_difference(w, other, mine)
    assert close(w, expected)


@given(vectors(2), st.data())
def test_two_snapshots_and_two_moves_conserve_the_sum(v: list[Tensor], data: st.DataObject) -> None:
    a, b = v
    snapshot_a, snapshot_b = a.clone(), b.clone()
    move = data.draw(scalars)
    a.add_(move)  # an update lands between snapshot and answer
    before = a.double() + b.double()
    kernels.add_half_difference(a, snapshot_b, snapshot_a)
    kernels.add_half_difference(b, snapshot_a, snapshot_b)
    assert close((a.double() + b.double()).to(a.dtype), before.to(a.dtype))


@given(vectors(3))
def test_difference_into_w_and_a_copy_of_w(v: list[Tensor]) -> None:
    w, after, before = v
    expected = w + (after - before)
    kernels.add_difference(w, after, after, before)
    assert torch.equal(w, expected)
    assert torch.equal(after, expected)


@given(vectors(4), scalars, scalars, scalars, st.booleans())
def test_sgd_direction(v: list[Tensor], scale: float, decay: float, mu: float, nesterov: bool) -> None:
    u, at, g, buf = v
    x = scale * g + decay * at
    expected_buf = mu * buf + x
    kernels.sgd_direction(u, at, g, buf, scale, decay, mu, nesterov)
    assert close(buf, expected_buf)
    assert close(u, x + mu * expected_buf if nesterov else expected_buf)


@given(vectors(4), scalars, scalars, scalars)
def test_the_fused_move_has_the_bits_of_direction_then_subtraction(
    v: list[Tensor], scale: float, mu: float, step: float
) -> None:
    w, copy, g, buf = v
    apart, u, buf_apart = w.clone(), torch.empty_like(w), buf.clone()
    kernels.sgd_direction(u, w, g, buf_apart, scale, 0.0, mu, False)
    kernels.subtract_scaled(apart, u, step)
    alone, buf_alone = w.clone(), buf.clone()
    kernels.sgd_move(alone, None, g, buf_alone, scale, mu, step)
    kernels.sgd_move(w, copy, g, buf, scale, mu, step)
    assert torch.equal(w, apart)
    assert torch.equal(w, copy)
    assert torch.equal(w, alone)
    assert torch.equal(buf, buf_apart)
    assert torch.equal(buf, buf_alone)


@given(vectors(4), st.lists(scalars, min_size=3, max_size=3), st.integers(1, 3))
def test_mix_and_ordered_sum_are_weighted_sums_in_order(v: list[Tensor], weights: list[float], count: int) -> None:
    out, *rows = v
    rows, weights = rows[:count], weights[:count]
    expected = torch.zeros_like(out)
    for row, weight in zip(rows, weights, strict=True):
        expected += torch.tensor(weight, dtype=out.dtype) * row
    kernels.ordered_sum(out, torch.stack(rows), torch.tensor(weights, dtype=out.dtype))
    assert torch.equal(out, expected)
    mixed = torch.empty_like(out)
    kernels.mix(mixed, rows, weights)
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_that_are_not_contiguous_take_plain_operations(dtype: torch.dtype) -> None:
    a, b = torch.arange(10, dtype=dtype)[::2], torch.ones(5, dtype=dtype)
    expected = 0.5 * (a + b)
    kernels.pair_average(a, b)
    assert torch.equal(a, expected)
    assert torch.equal(b, expected)
