"""Jobs that show one law each, for threads and for processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundelay.core import buckets
from roundelay.core.wait import wait_until
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import Learner
from roundelay.launch.context import DistributedContext
from roundelay.strategies.step import StepInfo

TIMEOUT_S = 20.0
LR = 0.1


def learner_of(context: DistributedContext, module: nn.Module, strategy: str, **options: Any) -> Learner:
    return Learner(context, module, torch.optim.SGD(module.parameters(), lr=LR), EngineConfig(strategy=strategy, **options))


def share(context: DistributedContext, k: int) -> StepInfo:
    return StepInfo(1, 1, context.size, k * context.size, 1 << 40)


def updates_during_exchanges(context: DistributedContext, steps: int) -> dict[str, Any]:
    """All ranks gossip and apply random gradients at once; the sum of all vectors must be start plus updates."""
    module = nn.Linear(300, 20)
    learner = learner_of(context, module, "adpsgd", topology="ring")
    generator = torch.Generator().manual_seed(context.rank)
    start = torch.randn(learner.flat.phi.numel(), generator=generator)
    learner.worker.assign_(start)
    learner.start()
    applied = torch.zeros_like(start, dtype=torch.float64)

    def compute() -> float:
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        applied.sub_(LR * learner.flat.gather(torch.empty_like(start)).double())
        return 0.0

    for k in range(steps):
        learner.run_step(share(context, k), compute)
    gossip_handle = learner.worker.gossip_handle
    assert gossip_handle is not None
    gossip_handle.finish()
    exchanges = gossip_handle.pop_metrics()["exchanges"]
    end = learner.worker.w.clone()
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    counted = sum(learner.worker.step_timer.staleness.values())
    learner.close()
    vectors = {"start": start.double().numpy(), "applied": applied.numpy(), "end": end.double().numpy()}
    return {**vectors, "exchanges": exchanges, "steps": counted}


def stuck_neighbor(context: DistributedContext, steps: int) -> dict[str, Any]:
    """Rank 0 stays in its first gradient until all other ranks have done all their steps."""
    module = nn.Linear(4, 4)
    learner = learner_of(context, module, "adpsgd", topology="ring")
    learner.start()
    store, exchanges = context.comm.store, 0.0

    def compute() -> float:
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        if context.rank == 0:
            error = TimeoutError("the other ranks wait for a rank that computes a gradient")
            wait_until(lambda: int(store.get("done") or 0) >= context.size - 1, TIMEOUT_S, lambda: error)
        return 0.0

    gossip_handle = learner.worker.gossip_handle
    assert gossip_handle is not None

    def count() -> float:
        nonlocal exchanges
        exchanges += gossip_handle.pop_metrics()["exchanges"]
        return exchanges

    for k in range(steps if context.rank else 1):
        learner.run_step(share(context, k), compute)
        if context.rank:
            wait_until(lambda k=k: count() >= k, TIMEOUT_S, poll_s=0.001)  # let the gossip threads keep pace
    if context.rank:
        store.add("done", 1)
    steps_done = learner.steps
    gossip_handle.finish()
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    learner.close()
    return {"steps": steps_done, "exchanges": exchanges}


class Branches(nn.Module):
    """A module in which each rank uses one layer of its own, and one layer is unused."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 7)
        self.own = nn.ModuleList(nn.Linear(7, 3) for _ in range(size))
        self.unused = nn.Linear(7, 7)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.last(torch.tanh(self.own[rank](torch.tanh(self.first(x)))))


def gradient_in_buckets(context: DistributedContext, bucket_bytes: int, samples: list[int]) -> dict[str, Any]:
    """Return the mean gradient of `sync`, reduced in buckets of this size, and this rank's own gradient."""
    before = buckets.FIRST_BYTES, buckets.BUCKET_BYTES
    buckets.FIRST_BYTES = buckets.BUCKET_BYTES = bucket_bytes
    try:
        module = Branches(context.size)
        learner = learner_of(context, module, "sync")
        learner.start()
        own = samples[context.rank]
        x = torch.randn(max(own, 1), 5, generator=torch.Generator().manual_seed(context.rank))
        mine = torch.zeros_like(learner.flat.phi)

        def compute() -> float:
            loss = module(x, context.rank).square().mean()
            loss.backward()
            return float(loss.detach())

        means = []
        for k in range(2):
            learner.worker.begin(StepInfo(own, own, sum(samples), k), compute)
            means.append(learner.worker.mean_grad().tensor().clone().numpy())
            if own:
                learner.flat.gather(mine)
            learner.worker.end()
        learner.close()
    finally:
        buckets.FIRST_BYTES, buckets.BUCKET_BYTES = before
    return {"means": means, "own": mine.numpy()}


def batch_norm(context: DistributedContext, strategy: str) -> dict[str, Any]:
    """Return the batch-norm statistics of this rank before and after finish()."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    learner = learner_of(context, module, strategy)
    learner.start()
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(context.rank)) * (1 + context.rank)

    def compute() -> float:
        loss = module(x).square().mean()
        loss.backward()
        return float(loss.detach())

    machine = len(learner.machine)
    for k in range(3):
        learner.run_step(StepInfo(1, machine, context.size, k * context.size, 3 * context.size), compute)
    before = learner.flat.buffer_vector().clone()
    is_leader = learner.worker.is_node_leader
    learner.finish()
    after = learner.flat.buffer_vector().clone()
    learner.close()
    return {"before": before.numpy(), "after": after.numpy(), "is_leader": is_leader}


# -- a quadratic, for which every strategy has a closed form --------------------------------------------------------


def quadratic(context: DistributedContext, strategy: str, options: dict[str, Any], steps: int, momentum: float) -> np.ndarray:
    """Return w after every step, for the loss |w - c_rank|^2 / 2, whose gradient is w - c_rank."""
    module = nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=momentum)
    learner = Learner(
        context, module, optimizer, EngineConfig(strategy=strategy, strategy_options=options, deterministic_reduce=True)
    )
    learner.start()
    center = centers(context.size)[context.rank].reshape(3, 1)
    path = []

    def compute() -> float:
        module.weight.grad = module.weight.detach() - torch.from_numpy(center).float()
        return float(module.weight.grad.square().sum()) / 2

    for k in range(steps):
        learner.run_step(StepInfo(1, 1, context.size, k * context.size, steps * context.size), compute)
        path.append(learner.worker.w.clone().numpy())
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    learner.close()
    return np.stack(path)


def centers(size: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(size, 3))
