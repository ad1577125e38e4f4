"""The engine equals the mathematical model, and the model has the properties that theory predicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tasks import Fit, first_weights, gradient_of, static_batches

from roundelay import topology
from roundelay.core.update_log import Op
from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.replay.reader import LogEntry, RunLog, StepRecord, read_run_log
from roundelay.replay.replay import Replay
from roundelay.strategies.step import StepInfo
from roundelay.strategies.worker import Worker
from roundelay.theory import (
    Apply,
    Exchange,
    ModelEvent,
    ModelStep,
    Read,
    asynchronous,
    measured_contraction,
    spread,
    stable_blocks,
    stable_delay,
    stable_mixing,
    stable_order,
    trajectory,
    uniform,
)

RATE, BATCH, SIZE, ROUNDS = 0.1, 4, 4, 30
TASKS = [Fit(), Fit(hidden=6)]
EXACTLY = 1e-12


def engine(task: Fit, strategy: str, size: int = SIZE, **options: Any) -> list[np.ndarray]:
    """Return W after every step of the engine, on threads."""
    path: list[list[np.ndarray]] = [[] for _ in range(size)]

    def job(context: DistributedContext) -> None:
        config = TrainConfig(
            strategy=strategy,
            **options,
            epochs=ROUNDS * size * BATCH / task.samples,
            batch=BATCH,
            lr=RATE,
            momentum=0.0,
            eval_at_checkpoint=False,
            progress="none",
        )
        train(task, context, config, on_step=lambda learner: path[context.rank].append(learner.worker.w.clone().numpy()))

    run_threads(job, size=size, timeout_s=60)
    return [np.stack([path[learner][k] for learner in range(size)], axis=1) for k in range(ROUNDS)]


def model(task: Fit, steps: list[ModelStep]) -> list[np.ndarray]:
    return trajectory(first_weights(task, SIZE), steps, gradient_of(task, static_batches(task, SIZE, BATCH, ROUNDS)))


def agree(measured: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(measured) == len(expected)
    for k, (ours, theirs) in enumerate(zip(measured, expected, strict=True)):
        assert np.abs(ours - theirs).max() < EXACTLY, f"step {k}"
    assert np.abs(expected[-1] - expected[0]).max() > 0.01  # the weights have moved


@pytest.mark.parametrize("task", TASKS, ids=["convex", "nonconvex"])
def test_sync_is_the_uniform_matrix_with_gradients_at_the_mean(task: Fit) -> None:
    steps = [ModelStep(uniform(SIZE), RATE, at_mean=True)] * ROUNDS
    agree(engine(task, "sync"), [W @ uniform(SIZE) for W in model(task, steps)[1:]])


@pytest.mark.parametrize("task", TASKS, ids=["convex", "nonconvex"])
def test_delay_by_one_is_the_uniform_matrix_with_local_gradients(task: Fit) -> None:
    agree(engine(task, "delay_by_one"), model(task, [ModelStep(uniform(SIZE), RATE)] * ROUNDS)[1:])


@pytest.mark.parametrize("task", TASKS, ids=["convex", "nonconvex"])
def test_dpsgd_is_the_ring_matrix(task: Fit) -> None:
    T = topology.neighbor_matrix("ring", SIZE)
    agree(engine(task, "dpsgd"), model(task, [ModelStep(T, RATE)] * ROUNDS)[1:])


@pytest.mark.parametrize("task", TASKS, ids=["convex", "nonconvex"])
def test_kstep_averages_after_every_k_th_step(task: Fit) -> None:
    alone, average = ModelStep(np.eye(SIZE), RATE), ModelStep(uniform(SIZE))
    steps = [step for k in range(ROUNDS) for step in ([alone] if (k + 1) % 3 else [alone, average])]
    path, at, expected = model(task, steps), 0, []
    for k in range(ROUNDS):
        at += 1 if (k + 1) % 3 else 2
        expected.append(path[at])
    agree(engine(task, "kstep", strategy_options={"K": 3}), expected)


# -- asynchronous ------------------------------------------------------------------------------------------------------


def scripted(seed: int, events: int) -> list[ModelEvent]:
    """Return a random valid order of reads, updates and exchanges."""
    chance = np.random.default_rng(seed)
    begun, order = [False] * SIZE, list[ModelEvent]()
    for _ in range(events):
        learner, other = (int(n) for n in chance.choice(SIZE, 2, replace=False))
        if chance.random() < 0.4:
            order.append(Exchange(learner, other))
        elif begun[learner]:
            order.append(Apply(learner, RATE))
            begun[learner] = False
        else:
            order.append(Read(learner))
            begun[learner] = True
    return order + [Apply(learner, RATE) for learner in range(SIZE) if begun[learner]]


def record_of(task: Fit, order: list[ModelEvent]) -> RunLog:
    """Return the same order as a log that the engine can replay."""
    orders: list[list[LogEntry]] = [[] for _ in range(SIZE)]
    steps: list[list[StepRecord]] = [[] for _ in range(SIZE)]
    steps_before = 0
    for number, event in enumerate(order):
        if isinstance(event, Exchange):
            orders[event.i].append(LogEntry(Op.PAIR_AVERAGE, event.j, number))
            orders[event.j].append(LogEntry(Op.PAIR_AVERAGE, event.i, number))
            continue
        orders[event.learner].append(LogEntry(Op.READ if isinstance(event, Read) else Op.UPDATE, event.learner, -1))
        if isinstance(event, Read):
            start = steps_before * BATCH % task.samples
            steps_before += 1
            steps[event.learner].append(StepRecord(0, start, start + BATCH, StepInfo(BATCH, BATCH, BATCH * SIZE, 0, 10**6)))
    for learner in range(SIZE):
        orders[learner].append(LogEntry(Op.FINAL_READ, learner, -1))
    card = {
        "size": SIZE, "leaders": list(range(SIZE)), "machines": ["here"] * SIZE, "device": "cpu", "threads": 1, "settings": {},
        "parameters": len(first_weights(task, 1)), "samples": task.samples, "total": 10**6, "batches": [BATCH] * SIZE,
    }  # fmt: skip
    return RunLog(card, steps, orders, [])


@pytest.mark.parametrize("task", TASKS, ids=["convex", "nonconvex"])
@pytest.mark.parametrize("seed", [0, 1])
def test_adpsgd_in_any_order_is_pair_matrices_and_stale_gradients(task: Fit, seed: int) -> None:
    order = scripted(seed, 300)
    record = record_of(task, order)
    measured: list[list[np.ndarray]] = [[] for _ in range(SIZE)]

    def watch(rank: int, worker: Worker) -> None:
        measured[rank].append(worker.w.clone().numpy())

    again = Replay(task, TrainConfig(strategy="adpsgd", lr=RATE, momentum=0.0), record)
    again.run(watch)
    pieces = [[(p.epoch, p.start, p.stop) for p in steps] for steps in record.steps]
    path = trajectory(first_weights(task, SIZE), asynchronous(SIZE, order), gradient_of(task, pieces))
    happened = [event for event in order if not isinstance(event, Read)]
    for learner in range(SIZE):
        applied = [path[k + 1][:, learner] for k, e in enumerate(happened) if isinstance(e, Apply) and e.learner == learner]
        assert len(applied) == len(measured[learner]) > 10
        for ours, theirs in zip(measured[learner], applied, strict=True):
            assert np.abs(ours - theirs).max() < EXACTLY
        assert np.abs(again.last[learner].numpy() - path[-1][:, learner]).max() < EXACTLY


def merged_order(record: RunLog) -> list[ModelEvent]:
    """Merge the orders of all vectors into one."""
    at = [0] * len(record.orders)
    line: list[ModelEvent] = []
    while any(at[v] < len(order) for v, order in enumerate(record.orders)):
        before = len(line), list(at)
        for v, order in enumerate(record.orders):
            while at[v] < len(order):
                event = order[at[v]]
                if event.kind is Op.PAIR_AVERAGE:
                    other = record.orders[event.actor]
                    if at[event.actor] >= len(other) or other[at[event.actor]] != LogEntry(Op.PAIR_AVERAGE, v, event.round):
                        break
                    at[event.actor] += 1
                    line.append(Exchange(v, event.actor))
                elif event.kind in (Op.READ, Op.UPDATE):
                    line.append(Read(v) if event.kind is Op.READ else Apply(v, RATE))
                at[v] += 1
        assert before != (len(line), at)
    return line


def test_a_recorded_run_is_the_model_of_its_own_order(tmp_path: Path) -> None:
    task = Fit(hidden=6, samples=120)
    config = TrainConfig(
        strategy="adpsgd", epochs=3, batch=BATCH, lr=RATE, momentum=0.0, eval_at_checkpoint=False, progress="none",
        checkpoint_every_epochs=9, run=str(tmp_path),
    )  # fmt: skip
    run_threads(lambda context: train(task, context, config, record_settings={}), size=SIZE, timeout_s=60)
    record = read_run_log(tmp_path)
    order = merged_order(record)
    assert sum(isinstance(event, Apply) for event in order) == 90
    assert sum(isinstance(event, Exchange) for event in order) > 10
    pieces = [[(p.epoch, p.start, p.stop) for p in steps] for steps in record.steps]
    path = trajectory(first_weights(task, SIZE), asynchronous(SIZE, order), gradient_of(task, pieces))
    for learner, last in enumerate(record.last):
        assert np.abs(last.numpy() - path[-1][:, learner]).max() < EXACTLY


# -- the theory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [6, 8, 16, 32])
def test_a_ring_contracts_as_its_closed_form_says(size: int) -> None:
    rounds = [topology.mixing_matrix(topology.matching("ring", r, size)) for r in range(12 * size)]
    W = np.random.default_rng(size).standard_normal((3, size))
    for T in rounds[: 10 * size]:  # what is left then is the slowest mode
        W = W @ T
        W = (W - W.mean(axis=1, keepdims=True)) / spread(W)
    predicted = topology.contraction("ring", size)
    assert predicted == pytest.approx(math.cos(2 * math.pi / size) ** 2, abs=1e-9)
    assert measured_contraction(W, rounds[10 * size :][:8]) == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize("size", [4, 8, 16, 64])
def test_random_pairs_contract_in_expectation(size: int) -> None:
    W = np.random.default_rng(size).standard_normal((20, size))
    matrices = [topology.mixing_matrix(topology.matching("random_ring", r, size, seed=3)) for r in range(400)]
    ratio = np.mean([(spread(W @ T) / spread(W)) ** 2 for T in matrices])
    assert ratio == pytest.approx(topology.contraction("random_ring", size), rel=0.03)
    assert topology.contraction("random_ring", size) == pytest.approx(0.5 - 0.5 / (size - 1))


def test_stable_rates_are_those_of_the_table() -> None:
    for delay in (0, 1, 2, 3, 4, 8):
        assert stable_delay(1.0, delay) == pytest.approx(2 * math.sin(math.pi / (2 * (2 * delay + 1))), abs=1e-3)
    ring = topology.neighbor_matrix("ring", 16)
    assert stable_mixing(ring) == pytest.approx(2 / 3, abs=1e-3)
    assert stable_mixing(ring, delay=1) == pytest.approx(1.0, abs=1e-3)
    assert stable_mixing((np.eye(16) + np.roll(np.eye(16), 1, 0) / 2 + np.roll(np.eye(16), -1, 0) / 2) / 2) == pytest.approx(
        1, abs=1e-3
    )
    assert stable_mixing(uniform(16)) == pytest.approx(1.0, abs=1e-3)
    assert stable_blocks(4, K=1, eta=0.0, zeta=1.0, nesterov=True) == pytest.approx(2.0, abs=1e-3)


def test_asynchronous_pairs_are_stable_up_to_about_one() -> None:
    for size in (2, 4, 8):
        measured = stable_order(size, 80, lambda r, size=size: topology.matching("ring", r, size))  # type: ignore[misc]
        assert 0.95 < measured < 1.4


def test_the_mean_on_a_quadratic_follows_synchronous_sgd() -> None:
    """The gradient is linear, so the mean does not depend on the spread."""
    W = np.random.default_rng(0).standard_normal((3, 8))
    curvature = np.diag([1.0, 0.5, 0.1])
    path = trajectory(W, [ModelStep(topology.neighbor_matrix("ring", 8), 0.3)] * 20, lambda learner, n, phi: curvature @ phi)
    mean = W.mean(axis=1)
    for after in path[1:]:
        mean = mean - 0.3 * curvature @ mean
        assert np.abs(after.mean(axis=1) - mean).max() < 1e-12
    assert spread(path[-1]) > 1e-6
