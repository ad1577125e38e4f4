"""`join` for people with a loop of their own: what is refused, and what must not go wrong quietly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import Learner
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext, single_process_context
from roundelay.launch.threads import run_threads


def learner_at(context: DistributedContext, **options: Any) -> tuple[Learner, nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return Learner(context, module, optimizer, EngineConfig(**options)), module, optimizer


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(count)]


def uneven(context: DistributedContext, strategy: str, options: dict[str, Any]) -> tuple[int, float]:
    """Rank 0 has 21 batches, every other rank 3."""
    learner, module, _ = learner_at(context, strategy=strategy, strategy_options=options)
    with learner:
        for x, y in learner.until_all_done(batches(21 if context.rank == 0 else 3)):
            loss = learner.step(lambda x=x, y=y: nn.functional.cross_entropy(module(x), y), samples=len(x))
    return learner.steps, loss


@pytest.mark.parametrize(("strategy", "options"), [("sync", {}), ("kstep", {"K": 4}), ("kstep", {"K": 4, "reject": 1e-6})])
def test_a_loader_that_ends_early_joins_with_weight_0(strategy: str, options: dict[str, Any]) -> None:
    """Its silence must not count as the best loss: then the only learner with samples would be left out."""
    results = run_threads(uneven, strategy, options, size=2)
    assert [steps for steps, _ in results] == [21, 21]
    assert all(math.isfinite(loss) for _, loss in results)


@pytest.mark.parametrize("strategy", ["sync", "adpsgd"])
def test_a_second_claim_is_refused(strategy: str) -> None:
    learner, module, _ = learner_at(single_process_context("cpu"), strategy=strategy)
    data = [(torch.zeros(4), torch.tensor(0))] * 6
    with learner:
        for batch in learner.claim(data, batch=2):
            learner.step(lambda batch=batch: nn.functional.cross_entropy(module(batch.x), batch.y), samples=len(batch))
        assert learner.steps == 3
        with pytest.raises(UsageError, match="epochs="):
            next(learner.claim(data, batch=2))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"strategy": "kstep", "strategy_options": {"sharding": "dynamic"}}, "cannot tell when the others' loaders end"),
        ({"strategy": "sync", "schedule": "cosine"}, "how many samples there are"),
        ({"strategy": "adpsgd", "warmup_epochs": 1.0}, "how many samples there are"),
    ],
)
def test_what_an_own_loader_cannot_do_is_refused(options: dict[str, Any], complaint: str) -> None:
    learner, _, _ = learner_at(single_process_context("cpu"), **options)
    with learner, pytest.raises(UsageError, match=complaint):
        next(iter(learner.until_all_done(batches(1))))


@pytest.mark.parametrize("own_loader", [True, False])
def test_a_torch_scheduler_keeps_its_say(own_loader: bool) -> None:
    """Without a schedule of ours the rate is the user's: half of it moves the weights half as far."""
    learner, module, optimizer = learner_at(single_process_context("cpu"), strategy="adpsgd")
    x, y = batches(1)[0]
    moved = []
    with learner:
        data = [(xi, yi) for xi, yi in zip(x, y, strict=True)]
        items = learner.until_all_done([None, None]) if own_loader else learner.claim(data, batch=len(data), epochs=2)
        for number, _ in enumerate(items):
            learner.worker.assign_(torch.zeros_like(learner.worker.w))
            optimizer.param_groups[0]["lr"] = 0.1 if number == 0 else 0.05
            learner.step(lambda: nn.functional.cross_entropy(module(x), y), samples=len(x))
            moved.append(learner.worker.w.clone())
    assert moved[0].norm() > 0
    assert torch.allclose(moved[1], moved[0] / 2)
