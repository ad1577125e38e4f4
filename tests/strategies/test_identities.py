"""What a strategy is, worked out by hand; and which strategies are the same under another name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from laws import LR, centres, quadratic

from roundelay.testing.conformance import RunSpec, ToyTask, in_threads, run_toy_task
from roundelay.topology import neighbor_matrix

SIZES = [2, 3, 4]
STEPS = 9
PRECISE = {"rtol": 1e-4, "atol": 1e-5}


def path(strategy: str, size: int, momentum: float = 0.0, **options: Any) -> np.ndarray:
    """w[step, rank] of a run on the quadratic."""
    return np.stack(in_threads(quadratic, strategy, options, STEPS, momentum, size=size), axis=1)


class Hand:
    """Learners on the quadratic, in numpy."""

    def __init__(self, size: int, momentum: float) -> None:
        self.size, self.mu, self.c = size, momentum, centres(size)
        self.w = np.zeros((size, 3))
        self.v = np.zeros((size, 3))

    def d(self) -> np.ndarray:
        """Every learner's displacement at its own w."""
        self.v = self.mu * self.v + (self.w - self.c)
        return LR * self.v


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", SIZES)
def test_sync_is_sgd_on_the_mean_gradient(size: int, momentum: float) -> None:
    w, v, found = np.zeros(3), np.zeros(3), path("sync", size, momentum)
    for k in range(STEPS):
        v = momentum * v + (w - centres(size).mean(0))
        w = w - LR * v
        assert np.allclose(found[k], w, **PRECISE)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", SIZES)
def test_dpsgd_mixes_the_models_at_which_gradients_were_taken(size: int, momentum: float) -> None:
    hand, found, T = Hand(size, momentum), path("dpsgd", size, momentum), neighbor_matrix("ring", size)
    for k in range(STEPS):
        hand.w = T @ hand.w - hand.d()
        assert np.allclose(found[k], hand.w, **PRECISE)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", SIZES)
def test_delay_by_one_steps_from_the_mean_with_the_local_gradient(size: int, momentum: float) -> None:
    hand, found = Hand(size, momentum), path("delay_by_one", size, momentum)
    for k in range(STEPS):
        hand.w = hand.w.mean(0) - hand.d()
        assert np.allclose(found[k], hand.w, **PRECISE)


@pytest.mark.parametrize("size", SIZES)
def test_the_delayed_gradient_is_applied_one_step_late(size: int) -> None:
    w, late, found = np.zeros(3), None, path("delay_by_one", size, form="gradient")
    for k in range(STEPS):
        g = w - centres(size).mean(0)
        w = w if late is None else w - LR * late
        late = g
        assert np.allclose(found[k], w, **PRECISE)


@pytest.mark.parametrize("state", ["average", "keep", "reset"])
@pytest.mark.parametrize("size", SIZES)
def test_kstep_averages_weights_and_does_with_momentum_as_told(size: int, state: str) -> None:
    hand, found = Hand(size, 0.9), path("kstep", size, 0.9, K=3, state=state, reject=0.0)
    for k in range(STEPS):
        hand.w = hand.w - hand.d()
        if k % 3 == 2:
            hand.w[:] = hand.w.mean(0)
            if state == "average":
                hand.v[:] = hand.v.mean(0)
            elif state == "reset":
                hand.v[:] = 0
        assert np.allclose(found[k], hand.w, **PRECISE)


@pytest.mark.parametrize("eta", [None, 0.3])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_bmuf_filters_block_updates(size: int, nesterov: bool, eta: float | None) -> None:
    found = path("bmuf", size, 0.9, K=3, nesterov=nesterov, eta=eta, zeta=0.8)
    hand, block = Hand(size, 0.9), 1 - 1 / size if eta is None else eta
    W, W_g, D = np.zeros(3), np.zeros(3), np.zeros(3)
    for k in range(STEPS):
        hand.w = hand.w - hand.d()
        if k % 3 == 2:
            G = hand.w.mean(0) - W_g
            D = block * D + 0.8 * G
            W = W + D
            W_g = W + block * D if nesterov else W
            hand.w[:], hand.v[:] = W_g, 0
        assert np.allclose(found[k], hand.w, **PRECISE)


def test_a_diverged_replica_is_left_out_of_the_average() -> None:
    # Rank 3's centre is far from all others, so its loss exceeds the best by more than `reject` in the first block.
    size, c = 4, centres(4)
    losses = (c**2).sum(1) / 2
    reject = float(np.sort(losses - losses.min())[-1]) * 0.5
    found = path("kstep", size, K=1, reject=reject)
    accepted = losses <= losses.min() + reject
    assert 0 < accepted.sum() < size
    assert np.allclose(found[0], (LR * c)[accepted].mean(0), **PRECISE)


# ------------------------------------------------------------------------------------------------------ identities


def final(strategy: str, size: int, momentum: float, samples: int = 96, **options: Any) -> np.ndarray:
    case = RunSpec(strategy, tuple(options.items()), momentum=momentum, lesson=ToyTask(samples=samples))
    return in_threads(run_toy_task, case, size=size)[0]["w"]


@pytest.mark.parametrize("samples", [96, 37])
@pytest.mark.parametrize("size", SIZES)
def test_averaging_after_every_step_is_sync(size: int, samples: int) -> None:
    one, other = final("kstep", size, 0.0, samples, K=1, reject=0.0), final("sync", size, 0.0, samples)
    assert np.allclose(one, other, **PRECISE)


@pytest.mark.parametrize("size", SIZES)
def test_bmuf_without_block_momentum_is_kstep_that_forgets(size: int) -> None:
    one = final("bmuf", size, 0.9, K=3, eta=0.0, zeta=1.0)
    other = final("kstep", size, 0.9, K=3, state="reset", reject=0.0)
    assert np.allclose(one, other, **PRECISE)


@pytest.mark.parametrize("outer", ["sync", "kstep", "dpsgd", "delay_by_one"])
def test_a_hierarchy_of_one_machine_is_sync(outer: str) -> None:
    case = RunSpec(f"hierarchical({outer})", simulate_nodes=1)
    one = in_threads(run_toy_task, case, size=3, simulate_nodes=1)[0]["w"]
    assert np.allclose(one, final("sync", 3, 0.9), **PRECISE)


@pytest.mark.parametrize("size", [2, 4])
def test_a_hierarchy_of_machines_of_one_is_its_outer_strategy(size: int) -> None:
    case = RunSpec("hierarchical(dpsgd)", simulate_nodes=size)
    one = in_threads(run_toy_task, case, size=size, simulate_nodes=size)[0]["w"]
    assert np.array_equal(one, final("dpsgd", size, 0.9))


def test_hierarchical_sync_is_sync() -> None:
    case = RunSpec("hierarchical(sync)", simulate_nodes=2)
    one = in_threads(run_toy_task, case, size=3, simulate_nodes=2)[0]["w"]
    assert np.allclose(one, final("sync", 3, 0.9), **PRECISE)
