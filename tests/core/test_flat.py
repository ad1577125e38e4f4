"""A module's parameters as views of one vector."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roundelay.core.flat import Flat
from roundelay.errors import UsageError

widths = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def net(widths: list[int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


@given(widths)
def test_the_vector_is_the_parameters_one_after_the_other(widths: list[int]) -> None:
    module = net(widths)
    before = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    flat = Flat(module)
    assert torch.equal(flat.phi, before)
    assert [s.name for s in flat.slots] == [name for name, _ in module.named_parameters()]
    assert flat.slots[0].start == 0
    assert flat.slots[-1].stop == flat.phi.numel()


@given(widths)
def test_writing_the_vector_writes_the_module_and_vice_versa(widths: list[int]) -> None:
    module = net(widths)
    flat = Flat(module)
    flat.phi.copy_(torch.arange(flat.phi.numel(), dtype=torch.float32))
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in module.parameters()]), flat.phi)
    with torch.no_grad():
        for p in module.parameters():
            p.neg_()
    assert torch.equal(flat.phi, -torch.arange(flat.phi.numel(), dtype=torch.float32))


@given(widths)
def test_gradients_gather_and_scatter(widths: list[int]) -> None:
    module = net(widths)
    flat = Flat(module)
    module(torch.ones(2, widths[0])).sum().backward()
    g = flat.gather(torch.empty_like(flat.phi))
    assert torch.equal(g, torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
    flat.scatter(2 * g)
    assert torch.equal(flat.gather(torch.empty_like(g)), 2 * g)
    flat.clear_gradients()
    assert all(p.grad is None for p in module.parameters())


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    flat = Flat(module)
    module["used"](torch.ones(1, 2)).sum().backward()
    g = flat.gather(torch.full_like(flat.phi, float("nan")))
    assert torch.count_nonzero(g[6:]) == 0
    assert torch.count_nonzero(g[:6]) == 6


def test_tied_weights_are_one_slice_of_the_vector_and_stay_tied() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    flat = Flat(module)
    assert flat.phi.numel() == 9
    assert module[0].weight is module[1].weight
    x = torch.eye(3)
    module(x).sum().backward()
    tied = flat.gather(torch.empty(9)).view(3, 3)
    w = module[0].weight.detach()
    ones = torch.ones(3, 3)
    assert torch.allclose(tied, ones @ (x @ w.T) + (w.T @ ones) @ x)  # the product rule: both uses count
    flat.phi.zero_()
    assert torch.count_nonzero(module(x)) == 0


def test_frozen_parameters_are_left_alone() -> None:
    module = net([2, 3, 2])
    module[0].weight.requires_grad_(False)
    frozen = module[0].weight.detach().clone()
    flat = Flat(module)
    assert "0.weight" not in [s.name for s in flat.slots]
    flat.phi.zero_()
    assert torch.equal(module[0].weight, frozen)


def test_parameters_that_cannot_be_one_vector_are_rejected() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(UsageError, match=r"must have one dtype[\s\S]*float32[\s\S]*float64"):
        Flat(mixed)
    with pytest.raises(UsageError, match="no parameter to train"):
        Flat(nn.Tanh())
    with pytest.raises(UsageError, match="no parameter to train"):
        Flat(nn.Linear(2, 2).requires_grad_(False))


def test_buffers_become_a_vector_and_are_loaded_again() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    flat = Flat(module)
    module(torch.randn(8, 2))
    vector = flat.buffer_vector()
    assert vector.numel() == 6  # running mean and variance; the integer counter is no vector
    flat.load_buffers(2 * vector)
    assert torch.equal(flat.buffer_vector(), 2 * vector)
    assert Flat(nn.Linear(2, 2)).buffer_vector().numel() == 0


def test_a_vector_cut_by_name_is_what_a_state_dict_holds() -> None:
    module = net([2, 3, 1])
    flat = Flat(module)
    named = flat.named(flat.phi)
    assert set(named) == set(module.state_dict())
    assert all(torch.equal(named[name], tensor) for name, tensor in module.state_dict().items())
    flat.phi.zero_()
    assert torch.count_nonzero(named["0.weight"]) > 0, "a copy, not a view"


def test_double_precision_stays() -> None:
    assert Flat(nn.Linear(2, 2).double()).phi.dtype is torch.float64
