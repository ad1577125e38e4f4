"""Strategies on a quadratic equal their equations in numpy, and some strategies equal each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from laws import LR, centers, quadratic

from roundelay.testing.check_jobs import RunSpec, ToyTask, run_toy_task
from roundelay.testing.conformance import in_threads
from roundelay.topology import neighbor_matrix

SIZES = [2, 3, 4]
STEPS = 9
PRECISE = {"rtol": 1e-4, "atol": 1e-5}


def path(strategy: str, size: int, momentum: float = 0.0, **options: Any) -> np.ndarray:
    """Return w[step, rank] of a run on the quadratic."""
    return np.stack(in_threads(quadratic, strategy, options, STEPS, momentum, size=size), axis=1)


class Hand:
    """The learners on the quadratic, in numpy."""

    def __init__(self, size: int, momentum: float) -> None:
        self.size, self.mu, self.c = size, momentum, centers(size)
        self.w = np.zeros((size, 3))
        self.v = np.zeros((size, 3))

    def d(self) -> np.ndarray:
        """Return the update of every learner at its own w."""
        self.v = self.mu * self.v + (self.w - self.c)
        return LR * self.v


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", SIZES)
def test_sync_is_sgd_on_the_mean_gradient(size: int, momentum: float) -> None:
    w, v, measured = np.zeros(3), np.zeros(3), path("sync", size, momentum)
    for k in range(STEPS):
        v = momentum * v + (w - centers(size).mean(0))
        w = w - LR * v
        assert np.allclose(measured[k], w, **PRECISE)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", SIZES)
def test_dpsgd_mixes_the_models_at_which_gradients_were_taken(size: int, momentum: float) -> None:
    hand, measured, T = Hand(size, momentum), path("dpsgd", size, momentum), neighbor_matrix("ring", size)
    for k in range(STEPS):
        hand.w = T @ hand.w - hand.d()
        assert np.allclose(measured[k], hand.w, **PRECISE)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", SIZES)
def test_delay_by_one_steps_from_the_mean_with_the_local_gradient(size: int, momentum: float) -> None:
    hand, measured = Hand(size, momentum), path("delay_by_one", size, momentum)
    for k in range(STEPS):
        hand.w = hand.w.mean(0) - hand.d()
        assert np.allclose(measured[k], hand.w, **PRECISE)


@pytest.mark.parametrize("state", ["average", "keep", "reset"])
@pytest.mark.parametrize("size", SIZES)
def test_kstep_averages_weights_and_treats_momentum_by_rule(size: int, state: str) -> None:
    hand, measured = Hand(size, 0.9), path("kstep", size, 0.9, K=3, state=state, reject=0.0)
    for k in range(STEPS):
        hand.w = hand.w - hand.d()
        if k % 3 == 2:
            hand.w[:] = hand.w.mean(0)
            if state == "average":
                hand.v[:] = hand.v.mean(0)
            elif state == "reset":
                hand.v[:] = 0
        assert np.allclose(measured[k], hand.w, **PRECISE)


@pytest.mark.parametrize("eta", [None, 0.3])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_bmuf_filters_block_updates(size: int, nesterov: bool, eta: float | None) -> None:
    measured = path("bmuf", size, 0.9, K=3, nesterov=nesterov, eta=eta, zeta=0.8)
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
        assert np.allclose(measured[k], hand.w, **PRECISE)


def test_a_diverged_replica_is_left_out_of_the_average() -> None:
    # The center of rank 3 is far from the rest, so its loss exceeds the best by more than `reject` in the first block.
    size, c = 4, centers(4)
    losses = (c**2).sum(1) / 2
    reject = float(np.sort(losses - losses.min())[-1]) * 0.5
    measured = path("kstep", size, K=1, reject=reject)
    accepted = losses <= losses.min() + reject
    assert 0 < accepted.sum() < size
    assert np.allclose(measured[0], (LR * c)[accepted].mean(0), **PRECISE)


# ------------------------------------------------------------------------------------------------------ identities


def final(strategy: str, size: int, momentum: float, samples: int = 96, **options: Any) -> np.ndarray:
    spec = RunSpec(strategy, tuple(options.items()), momentum=momentum, task=ToyTask(samples=samples))
    return in_threads(run_toy_task, spec, size=size)[0]["w"]


@pytest.mark.parametrize("samples", [96, 37])
@pytest.mark.parametrize("size", SIZES)
def test_averaging_after_every_step_is_sync(size: int, samples: int) -> None:
    averaged, reference = final("kstep", size, 0.0, samples, K=1, reject=0.0), final("sync", size, 0.0, samples)
    assert np.allclose(averaged, reference, **PRECISE)


@pytest.mark.parametrize("size", SIZES)
def test_kaldi_averaging_without_its_additions_is_kstep(size: int) -> None:
    averaged = final("kaldi_averaging", size, 0.9, K=3, best_first=0, combine=0)
    assert np.array_equal(averaged, final("kstep", size, 0.9, K=3))


@pytest.mark.parametrize("size", SIZES)
def test_adaptive_kstep_that_only_calibrates_is_kstep(size: int) -> None:
    averaged = final("adaptive_kstep", size, 0.9, K=3, calibrate=1000)
    assert np.array_equal(averaged, final("kstep", size, 0.9, K=3))


@pytest.mark.parametrize("size", SIZES)
def test_bmuf_without_block_momentum_is_kstep_with_reset(size: int) -> None:
    averaged = final("bmuf", size, 0.9, K=3, eta=0.0, zeta=1.0)
    reference = final("kstep", size, 0.9, K=3, state="reset", reject=0.0)
    assert np.allclose(averaged, reference, **PRECISE)


@pytest.mark.parametrize("outer", ["sync", "kstep", "dpsgd", "delay_by_one"])
def test_a_hierarchy_of_one_machine_is_sync(outer: str) -> None:
    spec = RunSpec(f"hierarchical({outer})", simulate_nodes=1)
    w = in_threads(run_toy_task, spec, size=3, simulate_nodes=1)[0]["w"]
    assert np.allclose(w, final("sync", 3, 0.9), **PRECISE)


@pytest.mark.parametrize("size", [2, 4])
def test_a_hierarchy_of_machines_of_one_is_its_outer_strategy(size: int) -> None:
    spec = RunSpec("hierarchical(dpsgd)", simulate_nodes=size)
    w = in_threads(run_toy_task, spec, size=size, simulate_nodes=size)[0]["w"]
    assert np.array_equal(w, final("dpsgd", size, 0.9))


def test_hierarchical_sync_is_sync() -> None:
    spec = RunSpec("hierarchical(sync)", simulate_nodes=2)
    w = in_threads(run_toy_task, spec, size=3, simulate_nodes=2)[0]["w"]
    assert np.allclose(w, final("sync", 3, 0.9), **PRECISE)
