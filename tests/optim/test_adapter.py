"""D(g) is what torch.optim would subtract, for every way to apply it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roundelay.core.deferred import Gradient
from roundelay.core.flat import Flat
from roundelay.errors import UsageError
from roundelay.optim.adapter import OptimizerAdapter

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
STEPS = 5


def comm() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + k)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def groups(module: nn.Sequential, second: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two groups with different settings."""
    return [{"params": module[0].parameters()}, {"params": module[2].parameters(), **second}]


def backward(module: nn.Module, k: int) -> None:
    x, y = batch(k)
    module.zero_grad()
    (module(x) - y).square().mean().backward()


def by_torch(make: Make, second: dict[str, Any], clip: float) -> Tensor:
    module = comm()
    optimizer = make(groups(module, second))
    for k in range(STEPS):
        backward(module, k)
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class Walk:
    """The same steps through OptimizerAdapter.delta, applied in several ways."""

    def __init__(self, make: Make, second: dict[str, Any], clip: float) -> None:
        self.module = comm()
        self.flat = Flat(self.module)
        self.optimizer = OptimizerAdapter(self.flat, make(groups(self.module, second)), clip)
        self.w = self.flat.phi.clone()

    def gradient(self, k: int, as_vector: bool = False) -> Gradient:
        backward(self.module, k)
        if not as_vector:
            return Gradient(lambda: self.flat.gather(torch.empty_like(self.flat.phi)), 5, 1.0, in_parameters=True)
        g = self.flat.gather(torch.empty_like(self.flat.phi))
        self.flat.clear_gradients()
        return Gradient(lambda: g, 5, 1.0)

    def moved_in_place(self, as_vector: bool = False) -> Tensor:
        for k in range(STEPS):
            (-self.optimizer.delta(self.gradient(k, as_vector))).add_to(self.flat.phi, self.flat.phi, True)
        return self.flat.phi

    def moved_published(self, untouched: bool) -> Tensor:
        for k in range(STEPS):
            (-self.optimizer.delta(self.gradient(k))).add_to(self.w, self.flat.phi, untouched)
            assert torch.equal(self.w, self.flat.phi)
        return self.w

    def computed(self) -> Tensor:
        for k in range(STEPS):
            d = self.optimizer.delta(self.gradient(k)).tensor()
            self.flat.phi.copy_(self.flat.phi - d)
        return self.flat.phi

    def placed(self, lazily: bool) -> Tensor:
        """Assign base - D(g), where the base is not the point of the gradient, as delay_by_one does."""
        for k in range(STEPS):
            mean = 0.5 * self.flat.phi + 0.1
            d = self.optimizer.delta(self.gradient(k))
            if lazily:
                kept = mean.clone()
                (mean - d).assign_to(self.flat.phi)
                assert torch.equal(mean, kept)
            else:
                self.flat.phi.copy_(mean - d.tensor())
        return self.flat.phi


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=2e-5, atol=2e-6)


sgd_settings = st.fixed_dictionaries(
    {
        "lr": st.floats(0.001, 0.5),
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.01]),
    }
)


@settings(max_examples=40)
@given(sgd_settings, st.booleans(), st.floats(0.001, 0.5), st.sampled_from([0.0, 0.05, 10.0]))
def test_sgd_is_torch_sgd(options: dict[str, Any], nesterov: bool, second_lr: float, clip: float) -> None:
    options["nesterov"] = nesterov and options["momentum"] > 0

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, **options)

    second = {"lr": second_lr, "weight_decay": 0.02}
    expected = by_torch(make, second, clip)
    assert Walk(make, second, clip).optimizer.fused
    assert same(Walk(make, second, clip).moved_in_place(), expected)
    assert same(Walk(make, second, clip).moved_in_place(as_vector=True), expected)
    assert same(Walk(make, second, clip).moved_published(untouched=True), expected)
    assert same(Walk(make, second, clip).moved_published(untouched=False), expected)


@settings(max_examples=20)
@given(sgd_settings, st.booleans(), st.sampled_from([0.0, 0.05]))
def test_a_fused_step_has_the_bits_of_the_computed_update(options: dict[str, Any], nesterov: bool, clip: float) -> None:
    options["nesterov"] = nesterov and options["momentum"] > 0

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, **options)

    expected = Walk(make, {}, clip).computed()
    assert torch.equal(Walk(make, {}, clip).moved_in_place(), expected)
    assert torch.equal(Walk(make, {}, clip).moved_published(untouched=True), expected)
    assert torch.equal(Walk(make, {}, clip).moved_published(untouched=False), expected)
    assert torch.equal(Walk(make, {}, clip).placed(lazily=True), Walk(make, {}, clip).placed(lazily=False))


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize(
    "make",
    [
        lambda g: torch.optim.Adam(g, lr=0.02),
        lambda g: torch.optim.Adam(g, lr=0.02, amsgrad=True, weight_decay=0.01),
        lambda g: torch.optim.AdamW(g, lr=0.02, weight_decay=0.1),
        lambda g: torch.optim.RMSprop(g, lr=0.01, momentum=0.5),
        lambda g: torch.optim.Adagrad(g, lr=0.05),
        lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.1),
        lambda g: torch.optim.SGD(g, lr=0.1, maximize=True),
        lambda g: torch.optim.NAdam(g, lr=0.01),
    ],
)
def test_any_other_optimizer_takes_its_own_step(make: Make, clip: float) -> None:
    second = {"lr": 0.01}
    expected = by_torch(make, second, clip)
    walk = Walk(make, second, clip)
    assert not walk.optimizer.fused
    assert torch.equal(walk.moved_in_place(), expected)
    assert torch.equal(Walk(make, second, clip).moved_published(untouched=True), expected)
    assert same(Walk(make, second, clip).moved_published(untouched=False), expected)
    assert same(Walk(make, second, clip).computed(), expected)
    assert torch.equal(Walk(make, second, clip).placed(lazily=True), Walk(make, second, clip).placed(lazily=False))
    assert same(Walk(make, second, clip).moved_in_place(as_vector=True), expected)


def test_what_another_rank_adds_meanwhile_is_kept() -> None:
    for make in (lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9), lambda g: torch.optim.Adam(g, lr=0.1)):
        alone, met = Walk(make, {}, 0.0), Walk(make, {}, 0.0)
        start = alone.w.clone()
        d = alone.optimizer.delta(alone.gradient(0)).tensor()
        gradient = met.gradient(0)
        met.w.add_(1.0)
        (-met.optimizer.delta(gradient)).add_to(met.w, met.flat.phi, False)
        assert torch.allclose(met.w, start + 1.0 - d, atol=1e-6)
        assert torch.equal(met.w, met.flat.phi)


def test_no_batch_is_no_update_and_leaves_the_state() -> None:
    walk = Walk(lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9), {}, 0.0)
    (-walk.optimizer.delta(walk.gradient(0))).add_to(walk.w, walk.flat.phi, True)
    state, w = walk.optimizer.state_vector(), walk.w.clone()
    nothing = Gradient(lambda: torch.zeros_like(w), samples=0, share=0.0)
    (-walk.optimizer.delta(nothing)).add_to(walk.w, walk.flat.phi, True)
    assert torch.equal(walk.w, w)
    assert torch.equal(walk.optimizer.state_vector(), state)


def test_parameters_without_a_gradient_follow_w() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    flat = Flat(module)
    optimizer = OptimizerAdapter(flat, torch.optim.SGD(module.parameters(), lr=0.1))
    module["used"](torch.ones(1, 2)).sum().backward()
    w = flat.phi.clone()
    w[6:] += 5.0  # a exchange while the gradient was computed
    expected = w.clone()
    expected[:6] -= 0.1 * torch.ones(6)
    (-optimizer.delta(Gradient(lambda: w, 1, 1.0, in_parameters=True))).add_to(w, flat.phi, False)
    assert torch.allclose(w, expected)
    assert torch.equal(flat.phi, w)


# ---------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    "make",
    [
        lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
        lambda g: torch.optim.SGD(g, lr=0.1),
        lambda g: torch.optim.Adam(g, lr=0.1),
        lambda g: torch.optim.NAdam(g, lr=0.1),
    ],
)
def test_state_survives_a_checkpoint(make: Make) -> None:
    straight = Walk(make, {}, 0.0)
    straight.moved_in_place()
    saved, numbers = straight.optimizer.to_saved()
    saved, numbers = deepcopy(saved), deepcopy(numbers)
    other = Walk(make, {}, 0.0)
    other.flat.phi.copy_(straight.flat.phi)
    other.optimizer.from_saved(saved, numbers)
    for walk in (straight, other):
        (-walk.optimizer.delta(walk.gradient(9))).add_to(walk.flat.phi, walk.flat.phi, True)
    assert torch.equal(straight.flat.phi, other.flat.phi)


def test_the_state_is_a_vector_that_can_be_averaged_and_reset() -> None:
    for make, size in ((lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9), 44), (lambda g: torch.optim.Adam(g, lr=0.1), 92)):
        walk = Walk(make, {}, 0.0)
        walk.moved_in_place()
        state = walk.optimizer.state_vector()
        assert state.numel() == size  # Adam: two moments and a step counter for each of four parameters
        walk.optimizer.load_state_vector(2 * state)
        assert torch.equal(walk.optimizer.state_vector(), 2 * state)
        walk.optimizer.reset_state()
        assert torch.count_nonzero(walk.optimizer.state_vector()) == 0
    assert Walk(lambda g: torch.optim.SGD(g, lr=0.1), {}, 0.0).optimizer.state_vector().numel() == 0


def test_a_rank_without_a_gradient_has_a_state_of_full_length() -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.02)

    idle, busy = Walk(make, {}, 0.0), Walk(make, {}, 0.0)
    before = idle.flat.phi.clone()
    busy.moved_in_place()
    assert idle.optimizer.state_vector().numel() == busy.optimizer.state_vector().numel()
    assert torch.equal(idle.flat.phi, before)
    assert torch.equal(idle.moved_in_place(), busy.flat.phi), "the state made in advance is that of a first step"


def test_the_schedule_scales_every_group() -> None:
    module = comm()
    optimizer = torch.optim.SGD(groups(module, {"lr": 0.4}), lr=0.1)
    wrapped = OptimizerAdapter(Flat(module), optimizer, factor=lambda position: 1 / (1 + position))
    wrapped.set_position(3)
    assert [g["lr"] for g in optimizer.param_groups] == [pytest.approx(0.025), pytest.approx(0.1)]
    assert wrapped.lr == pytest.approx(0.025)


# -------------------------------------------------------------------------------------------------------- refused


def test_optimizers_that_cannot_be_saved_or_called_are_refused() -> None:
    module = comm()
    with pytest.raises(UsageError, match="LBFGS"):
        OptimizerAdapter(Flat(module), torch.optim.LBFGS(module.parameters()))


def test_an_optimizer_without_all_parameters_is_refused() -> None:
    module = comm()
    with pytest.raises(UsageError, match=r"got 2 fewer[\s\S]*2\.weight"):
        OptimizerAdapter(Flat(module), torch.optim.SGD(module[0].parameters(), lr=0.1))


def test_sparse_gradients_are_refused() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    flat = Flat(module)
    optimizer = OptimizerAdapter(flat, torch.optim.SGD(module.parameters(), lr=0.1))
    module(torch.tensor([1])).sum().backward()
    g = Gradient(lambda: flat.phi, 1, 1.0, in_parameters=True)
    with pytest.raises(UsageError, match="sparse"):
        optimizer.delta(g).tensor()
