"""The jobs that the conformance suite runs on every rank: a toy task, a zero gradient, and one gradient direction per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundelay.core.contracts import Communicator
from roundelay.data.epoch_order import epoch_order
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner
from roundelay.engine.trainer import Trainer
from roundelay.errors import PeerLost
from roundelay.launch.context import DistributedContext
from roundelay.strategies.step import StepInfo

POLL_S = 0.002
CHUNK_STEPS = 8
MAX_CHUNKS = 32


@dataclass(frozen=True)
class ToyTask:
    """A small classification task that every strategy can learn."""

    samples: int = 96
    seed: int = 0
    dropout: float = 0.0

    def _data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(17)
        x = torch.randn(self.samples, 6, generator=generator)
        return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x, y = self._data()
        indices = torch.from_numpy(epoch_order(self.seed, epoch, self.samples)[start:stop])
        return x[indices], y[indices]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[part::parts] for t in self._data())
        return {"loss": (float(nn.functional.cross_entropy(module(x), y, reduction="sum")), float(len(y)))}


@dataclass(frozen=True)
class RunSpec:
    """The settings of one run of a check."""

    strategy: str
    strategy_options: tuple[tuple[str, Any], ...] = ()
    topology: str = "ring"
    task: ToyTask = ToyTask()
    batch: int = 4
    epochs: float = 2.0
    momentum: float = 0.9
    optimizer: str = "sgd"
    max_grad_norm: float = 0.0
    straggler: str = ""
    deterministic_reduce: bool = True
    simulate_nodes: int = 0
    run: str = ""
    resume: str = "no"
    seed: int = 0

    def config(self) -> TrainConfig:
        """Return the settings of the run."""
        return TrainConfig(
            strategy=self.strategy,
            strategy_options=dict(self.strategy_options),
            topology=self.topology,
            straggler=self.straggler,
            deterministic_reduce=self.deterministic_reduce,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
            timeout_s=30.0,
            epochs=self.epochs,
            batch=self.batch,
            lr=0.05,
            momentum=self.momentum,
            optimizer=self.optimizer,
            run=self.run,
            resume=self.resume,
            progress="none",
        )


def run_toy_task(context: DistributedContext, spec: RunSpec) -> dict[str, Any]:
    """Train the toy task. Returns the final weights, the sample ranges of the steps, their number and the metrics."""
    spans: list[tuple[int, int]] = []

    def append_span(learner: Learner) -> None:
        spans.append(learner.completed[-1] if learner.completed else (0, 0))

    trainer = Trainer(spec.task, context, spec.config(), on_step=append_span)
    result = trainer.run()
    return {
        "w": trainer.learner.flat.phi.clone().numpy(),  # also of a rank that never had a batch
        "spans": spans if trainer.learner.worker.is_node_leader else [],
        "steps": result.get("steps", 0),
        "metrics": result.get("metrics"),
    }


def run_zero_gradient(context: DistributedContext, spec: RunSpec, steps: int) -> dict[str, Any]:
    """Run ranks from different weights with a zero gradient, so that only the communication changes the weights."""
    module = nn.Linear(5, 4)
    learner = Learner(context, module, torch.optim.SGD(module.parameters(), lr=0.1), spec.config())
    generator = torch.Generator().manual_seed(100 + context.rank)
    start = torch.randn(learner.flat.phi.numel(), generator=generator)
    learner.worker.assign_(start)
    learner.start()

    def compute() -> float:
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        return 0.0

    node_size = len(learner.machine)
    for k in range(steps):
        learner.run_step(StepInfo(1, node_size, context.size, k * context.size, steps * context.size), compute)
    finish = getattr(learner.strategy, "finish", None)
    if finish is not None:
        finish(learner.worker)
    rounds = 0
    if learner.worker.gossip_handle is not None:
        learner.worker.gossip_handle.finish()
        rounds = learner.worker.gossip_handle.rounds
    end = learner.worker.w.clone()
    if context.size > 1:
        context.comm.all_reduce_mean(torch.zeros(1)).wait()
    learner.close()
    return {
        "start": start.numpy(),
        "end": end.numpy(),
        "rounds": rounds,
        "is_node_leader": learner.worker.is_node_leader,
        "node_size": node_size,
    }


def run_one_direction_per_rank(context: DistributedContext, spec: RunSpec) -> list[int]:
    """Run steps in which the gradient of rank i is the unit vector i. Returns the ranks whose gradients reached this rank's w.

    All ranks start from the same weights. They stop when every gradient has reached every rank, or after MAX_CHUNKS chunks of
    CHUNK_STEPS steps. There is no final average.
    """
    module = nn.Linear(context.size, 3)
    learner = Learner(context, module, torch.optim.SGD(module.parameters(), lr=0.1), spec.config())
    start = learner.flat.phi.clone()
    learner.start()

    def compute() -> float:
        module.weight.flatten()[context.rank].backward()
        return 0.0

    node_size, total = len(learner.machine), MAX_CHUNKS * CHUNK_STEPS * context.size
    sources: list[int] = []
    for chunk in range(MAX_CHUNKS):
        for k in range(chunk * CHUNK_STEPS, (chunk + 1) * CHUNK_STEPS):
            learner.run_step(StepInfo(1, node_size, context.size, k * context.size, total), compute)
        sources = (learner.worker.last() != start)[: context.size].nonzero().flatten().tolist()
        if all_ranks_agree(context.comm, f"one-direction/{chunk}", len(sources) == context.size):
            break
    if learner.worker.gossip_handle is not None:
        learner.worker.gossip_handle.finish()
    if context.size > 1:
        context.comm.all_reduce_mean(torch.zeros(1)).wait()
    learner.close()
    return sources


def all_ranks_agree(comm: Communicator, key: str, vote: bool) -> bool:
    """Return True if every rank votes True. All ranks must call it; blocks until all have voted. Raises PeerLost.

    It uses the store only: a collective of the communicator could get in the way of those of the strategy.
    """
    store = comm.store
    store.add(f"{key}/yes", int(vote))
    votes = store.add(f"{key}/votes", 1)
    while votes < comm.size:
        failed = comm.membership.failed_ranks()
        if failed:
            raise PeerLost(f"ranks {sorted(failed)} failed before they voted", where=key)
        store.pause(POLL_S, f"{key}/votes")
        votes = int(store.get(f"{key}/votes") or 0)
    return int(store.get(f"{key}/yes") or 0) == comm.size
