"""Session: uneven loaders, learning-rate schedulers, and misuse that must raise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from roundelay.api.session import Session
from roundelay.engine.sharding import DynamicSharding
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext, single_process_context
from roundelay.launch.threads import run_threads


def create_session(context: DistributedContext, **options: Any) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return Session(module, optimizer, context=context, **options), module, optimizer


def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(module(x), y)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(count)]


def uneven(context: DistributedContext, strategy: str, options: dict[str, Any]) -> tuple[int, float]:
    """Train with 21 batches on rank 0 and 3 on every other rank."""
    session, module, _ = create_session(context, strategy=strategy, strategy_options=options)
    with session:
        for x, y in session.join_uneven(batches(21 if context.rank == 0 else 3)):
            loss = session.step(partial(loss_of, module, x, y), samples=len(x))
    return session.steps, loss


@pytest.mark.parametrize(("strategy", "options"), [("sync", {}), ("kstep", {"K": 4}), ("kstep", {"K": 4, "reject": 1e-6})])
def test_rank_whose_loader_has_ended_joins_with_weight_0(strategy: str, options: dict[str, Any]) -> None:
    """Its missing loss must not count as the best loss: then the only rank with samples would be rejected."""
    results = run_threads(uneven, strategy, options, size=2)
    assert [steps for steps, _ in results] == [21, 21]
    assert all(math.isfinite(loss) for _, loss in results)


@pytest.mark.parametrize("strategy", ["sync", "adpsgd"])
def test_second_loader_is_refused(strategy: str) -> None:
    session, module, _ = create_session(single_process_context("cpu"), strategy=strategy)
    data = [(torch.zeros(4), torch.tensor(0))] * 6
    with session:
        for batch in session.loader(data, batch_size=2):
            session.step(partial(loss_of, module, batch.x, batch.y), samples=len(batch))
        assert session.steps == 3
        with pytest.raises(UsageError, match="epochs="):
            next(session.loader(data, batch_size=2))


def test_step_without_a_batch_or_with_a_wrong_size_is_refused() -> None:
    session, module, _ = create_session(single_process_context("cpu"), strategy="sync")
    x, y = batches(1)[0]
    with session:
        with pytest.raises(UsageError, match="needs a batch"):
            session.step(partial(loss_of, module, x, y), samples=len(x))
        batch = next(session.loader([(x[0], y[0])] * 6, batch_size=2))
        with pytest.raises(UsageError, match=r"samples must be the size of the batch, 2 \(got 5\)"):
            session.step(partial(loss_of, module, batch.x, batch.y), samples=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "kstep", "strategy_options": {"sharding": "dynamic"}}, "cannot join uneven loaders"),
        ({"strategy": "sync", "schedule": "cosine"}, "total number of samples"),
        ({"strategy": "adpsgd", "warmup_epochs": 1.0}, "total number of samples"),
    ],
)
def test_join_uneven_refuses_what_it_cannot_do(options: dict[str, Any], message: str) -> None:
    session, _, _ = create_session(single_process_context("cpu"), **options)
    with session, pytest.raises(UsageError, match=message):
        next(iter(session.join_uneven(batches(1))))


@pytest.mark.parametrize("own_loader", [True, False])
def test_learning_rate_of_a_torch_scheduler_is_used(own_loader: bool) -> None:
    """Without a schedule of the engine, half the learning rate moves the weights half as far."""
    session, module, optimizer = create_session(single_process_context("cpu"), strategy="adpsgd")
    x, y = batches(1)[0]
    weights = []
    with session:
        worker = session.learner.worker
        data = [(xi, yi) for xi, yi in zip(x, y, strict=True)]
        items = session.join_uneven([None, None]) if own_loader else session.loader(data, batch_size=len(data), epochs=2)
        for number, _ in enumerate(items):
            worker.assign_(torch.zeros_like(worker.w))
            optimizer.param_groups[0]["lr"] = 0.1 if number == 0 else 0.05
            session.step(partial(loss_of, module, x, y), samples=len(x))
            weights.append(worker.w.clone())
    assert weights[0].norm() > 0
    assert torch.allclose(weights[1], weights[0] / 2)


# ------------------------------------------------------------------------------------------------- leaving the loop early

SAMPLES, BATCH = 60, 4


def leave_early(context: DistributedContext, leaving: list[int], when: str) -> list[int]:
    """Train on `range(SAMPLES)`; the ranks in `leaving` leave at their first batch. Return the samples that were trained."""
    session, module, _ = create_session(context, strategy="adpsgd")
    data = [(torch.full((4,), float(n)), torch.tensor(n % 3)) for n in range(SAMPLES)]
    trained: list[int] = []
    with session:
        loader = session.loader(data, batch_size=BATCH)  # this reference keeps the iterator open until the end of the session
        for batch in loader if when != "never iterates" or context.rank not in leaving else ():
            if context.rank in leaving and when == "before step":
                break
            session.step(partial(loss_of, module, batch.x * 0, batch.y), samples=len(batch))
            trained += batch.x[:, 0].int().tolist()
            if context.rank in leaving and when != "before step":
                break
    return trained


@pytest.mark.parametrize("when", ["before step", "after step", "never iterates"])
def test_the_other_rank_trains_what_a_rank_that_breaks_has_not(when: str) -> None:
    trained = run_threads(leave_early, [0], when, size=2, timeout_s=30.0)
    assert sorted(trained[0] + trained[1]) == list(range(SAMPLES)), "each sample once"
    assert len(trained[0]) <= BATCH


@pytest.mark.parametrize("when", ["before step", "after step", "never iterates"])
def test_a_session_that_all_ranks_leave_early_ends(when: str) -> None:
    trained = run_threads(leave_early, [0, 1], when, size=2, timeout_s=30.0)
    assert all(len(samples) <= BATCH for samples in trained)


def test_break_returns_the_leases_at_once() -> None:
    """Other ranks must not wait for them while this rank evaluates, for example."""
    session, _, _ = create_session(single_process_context("cpu"), strategy="adpsgd")
    with session:
        for _ in session.loader([(torch.zeros(4), torch.tensor(0))] * 6, batch_size=2):
            break
        sharding = session.learner.sharding
        assert isinstance(sharding, DynamicSharding)
        assert sharding.table.lease.idle
        assert covered(sharding.table.returned) >= {0, 1}


def covered(spans: Iterable[tuple[int, int]]) -> set[int]:
    return {n for start, stop in spans for n in range(start, stop)}
