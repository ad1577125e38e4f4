"""Learning in virtual time with probes: all learners are in one process, so their mean can be evaluated at any time.

Probes cost no virtual time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundelay.core.flat import Flat
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner
from roundelay.errors import DataError
from roundelay.simulate.cluster import Cluster
from roundelay.simulate.run import SimulationResult, simulate_task
from roundelay.strategies.adaptive_kstep import AdaptiveKStep
from roundelay.strategies.base import innermost


@dataclass(frozen=True)
class Probe:
    """What was seen at one moment."""

    time_s: float
    samples: int
    loss: float
    spread: float
    """Root of the mean squared distance of a learner from the mean, over the norm of the mean."""
    effective: float | None = None
    """<g_a, g> / |g|^2: g the gradient at the mean, g_a the mean of the learners' own; the rate acts as if multiplied by it."""


class MeanProbe:
    """A callback that passes the mean of all learners to `see` every `every` global samples.

    With static sharding it waits for the end of a round, because the middle of a synchronous round would look like a spread.
    """

    def __init__(self, every: int, see: Callable[[float, int, Tensor, float], None]) -> None:
        self.every, self._see, self._next = every, see, every
        self.learners: dict[int, Learner] = {}

    def __call__(self, learner: Learner) -> None:
        self.learners[learner.rank] = learner
        turns = learner.strategy.traits.sharding == "static"
        reached = min(one.position for one in self.learners.values()) if turns else learner.position
        if reached >= self._next:
            self._next = (learner.position // self.every + 1) * self.every
            self._see(learner.context.runtime.clock(), learner.position, *self.mean())

    def mean(self) -> tuple[Tensor, float]:
        """The mean model, and how far learners are from it in proportion."""
        rows = torch.stack([one.worker.w for one in self.learners.values() if one.worker.is_node_leader])
        mean = rows.mean(0)
        return mean, float((rows - mean).norm(dim=1).square().mean().sqrt() / (mean.norm() + 1e-12))


@dataclass
class LearningRun:
    """A run and what was seen on the way."""

    outcome: SimulationResult | None
    """None: it diverged."""
    looks: list[Probe]
    averages: int
    loss: float

    @property
    def diverged(self) -> bool:
        return self.outcome is None


def learn(
    cluster: Cluster, task: Any, config: TrainConfig, looks: int = 12, seed: int = 0, effective: bool = False
) -> LearningRun:
    """Train a task in virtual time and evaluate the mean model during the run and at the end."""
    seen: list[Probe] = []
    flat = Flat(task.build())

    def see(time_s: float, samples: int, mean: Tensor, spread: float) -> None:
        flat.phi.copy_(mean)
        with torch.no_grad():
            total, count = task.evaluate(flat.module.eval(), 0, 1)["loss"]
        ratio = effective_rate(task, flat, mean, [one.worker.w for one in watch.learners.values()]) if effective else None
        seen.append(Probe(time_s, samples, total / count, spread, ratio))

    watch = MeanProbe(max(1, round(config.epochs * task.samples / looks)), see)
    config = replace(config, eval_at_checkpoint=True, progress="none", checkpoint_every_epochs=1e9)
    try:
        outcome = simulate_task(cluster, task, config, seed=seed, on_step=watch)
    except DataError:  # the loss is not a number any more: that is a result
        return LearningRun(None, seen, 0, float("inf"))
    strategy: Any = innermost(next(iter(watch.learners.values())).strategy)
    assert outcome.metrics is not None
    return LearningRun(outcome, seen, averages_of(strategy, outcome), outcome.metrics["loss"])


def effective_rate(task: Any, flat: Flat, mean: Tensor, each: Sequence[Tensor]) -> float:
    """How much of the rate is left by the learners' disagreement (Zhang et al. 2021), on one batch for all."""
    batch = task.batch(0, 0, min(64, task.samples))

    def gradient(w: Tensor) -> Tensor:
        flat.phi.copy_(w)
        flat.clear_gradients()
        task.loss(flat.module.train(), batch).backward()
        return flat.gather(torch.empty_like(flat.phi))

    g = gradient(mean)
    together = torch.stack([gradient(w) for w in each]).mean(0)
    return float(together @ g) / max(float(g @ g), 1e-30)


def averages_of(strategy: Any, outcome: SimulationResult) -> int:
    """Return the number of averages per learner."""
    steps = outcome.steps // max(outcome.learners, 1)
    if isinstance(strategy, AdaptiveKStep):
        return int(strategy.averages)
    if hasattr(strategy, "K"):
        return steps // int(strategy.K)
    return steps


class ResultCache:
    """Results of a long table in a file, line by line: what is there is not run again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["key"]] = row["value"]

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.rows:
            self.rows[key] = make()
            if self._path is not None:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "value": self.rows[key]}) + "\n")
        return self.rows[key]


def one_thread() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
