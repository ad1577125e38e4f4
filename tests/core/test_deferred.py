"""Deferred vectors behave like the tensors they stand for."""

from __future__ import annotations

from copy import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roundelay.core.deferred import Gradient, Update, UpdatedVector, materialize

A, B = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 4.0, -1.0])


class Counted(Update):
    """An update that counts how often it is computed."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value, self.times = value, []

    def compute(self) -> Tensor:
        self.times.append(1)
        return self.value

    def add_to(self, w: Tensor, phi: Tensor, untouched: bool) -> None:
        self.consume()
        w.add_(self.gain * self.value)


def gradient(value: Tensor) -> Gradient:
    return Gradient(lambda: value, samples=4, share=1.0)


@pytest.mark.parametrize("deferred", [gradient, Counted])
def test_arithmetic_is_that_of_the_tensor(deferred) -> None:
    assert torch.equal(materialize(-deferred(A)), -A)
    assert torch.equal(deferred(A) + B, A + B)
    assert torch.equal(B + deferred(A), B + A)
    assert torch.equal(deferred(A) - B, A - B)
    assert torch.equal(B - deferred(A), B - A)
    assert torch.equal(materialize(deferred(A) * 2), 2 * A)
    assert torch.equal(materialize(3.0 * deferred(A)), 3 * A)
    assert torch.equal(deferred(A) * B, A * B)
    assert torch.equal(materialize(deferred(A) / 4), A / 4)
    assert torch.equal(deferred(A) + deferred(B), A + B)
    assert torch.equal(torch.linalg.vector_norm(deferred(A)), torch.linalg.vector_norm(A))
    assert torch.equal(torch.add(B, deferred(A), alpha=2), B + 2 * A)


def test_a_gradient_is_gathered_once() -> None:
    calls = []
    g = Gradient(lambda: calls.append(1) or A, samples=1, share=1.0)
    assert g.tensor() is g.tensor()
    assert len(calls) == 1


@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=5))
def test_factors_stay_deferred_and_d_runs_once(factors: list[float]) -> None:
    d = Counted(A)
    scaled: Update = d
    total = 1.0
    for factor in factors:
        scaled = factor * -scaled
        total *= -factor
    assert isinstance(scaled, Update)
    assert not d.times
    assert torch.allclose(scaled.tensor(), total * A)
    assert torch.equal(d.tensor(), A)
    assert len(d.times) == 1


def test_an_update_applied_to_w_cannot_be_used_again() -> None:
    d = Counted(A)
    w = torch.zeros(3)
    (-d).add_to(w, w, True)
    assert torch.equal(w, -A)
    with pytest.raises(RuntimeError, match="used again"):
        d.tensor()


def test_an_updated_vector_is_assigned_without_a_tensor_of_its_own() -> None:
    d, phi = Counted(A), torch.zeros(3)
    sum_ = B - d
    assert isinstance(sum_, UpdatedVector)
    assert not d.times
    sum_.assign_to(phi)
    assert torch.equal(phi, B - A)
    assert torch.equal(sum_, B - A)
    assert torch.equal(2 * sum_ + A, 2 * (B - A) + A)
    assert sum_.mul_(2).tolist() == (2 * (B - A)).tolist()
    assert len(d.times) == 1
    assert torch.equal(B, torch.tensor([0.5, 4.0, -1.0]))
    assert torch.equal(copy(B - Counted(A)), B - A)
