"""A training run on a virtual cluster: how long, how fast, where the time goes. With a task it learns for real."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.core.contracts import Task
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner, build_strategy
from roundelay.engine.trainer import Trainer
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext
from roundelay.simulate.cluster import Cluster
from roundelay.simulate.memory import check_fit, need
from roundelay.simulate.simulated_cluster import SimulatedCluster
from roundelay.simulate.timing_only import TimingOnlyTask

STATE_VECTORS = {"sgd": 1, "adam": 2, "adamw": 2}
NEVER_S = 1e9
"""Longer than any run."""
RECORDS = 50
"""Records per learner, where nobody says how often."""
MOST_RECORDS = 4_000
SPANS_PER_LEARNER = 80
DRAWN = 64
"""Learners whose beginning is kept for drawing."""


@dataclass
class SimulationResult:
    """What a simulated run came to."""

    strategy: str
    learners: int
    machines: int
    elapsed_s: float
    """Virtual seconds of the whole run, start and end included."""
    samples: int
    steps: int
    """Steps of all learners together."""
    samples_per_s: float
    """While everybody had work: until the first learner ran out of it."""
    efficiency: float
    """samples_per_s over what the same learners would do without any communication."""
    hours: float
    """Of the run as asked for: at samples_per_s where only a part of it was simulated."""
    staleness: dict[int, int]
    bytes_per_step: float
    """That one learner puts on its backend, in the mean."""
    digest: str
    """Of the final weights, or of the order of events where nothing was learned."""
    per_learner: list[dict[str, Any]] = field(default_factory=list)
    """By rank: steps, samples, seconds by kind; empty for the dead."""
    exchanges: int = 0
    metrics: dict[str, float] | None = None
    lost: dict[int, str] = field(default_factory=dict)
    spans: list[tuple[int, str, float, float]] = field(default_factory=list)
    events: int = 0
    weights: np.ndarray | None = None
    busy_s: float = 0.0
    """From the first gradient's beginning to the last one's end."""

    @property
    def staleness_mean(self) -> float:
        return sum(k * n for k, n in self.staleness.items()) / max(sum(self.staleness.values()), 1)

    def summary(self) -> dict[str, Any]:
        """The metrics a program wants, the last line of `roundelay simulate --json`."""
        return {
            "hours": self.hours,
            "samples_per_s": round(self.samples_per_s, 3),
            "efficiency": round(self.efficiency, 4),
            "staleness_mean": round(self.staleness_mean, 4),
            "bytes_per_step": round(self.bytes_per_step),
            "digest": self.digest,
            "elapsed_s": round(self.elapsed_s, 6),
            "learners": self.learners,
            "steps": self.steps,
            "samples": self.samples,
            "exchanges": self.exchanges,
            "staleness": {str(k): n for k, n in sorted(self.staleness.items())},
            **({"metrics": self.metrics} if self.metrics else {}),
            **({"lost": {str(r): why for r, why in self.lost.items()}} if self.lost else {}),
        }


def simulate_timing(
    cluster: Cluster,
    *,
    parameters: int,
    strategy: str = "sync",
    strategy_options: dict[str, Any] | None = None,
    topology: str = "ring",
    batch: int = 64,
    steps: int = 100,
    epochs: float | None = None,
    samples: int | None = None,
    momentum: float = 0.9,
    steps_per_exchange: float = 1.0,
    seed: int = 0,
    log_every_s: float | None = None,
    run: Path | None = None,
    spans: bool = False,
) -> SimulationResult:
    """Timing alone: `steps` steps per learner of a model with so many parameters. Where `samples` (an epoch's) and `epochs` say
    how long the whole run is, `hours` is for that."""
    size = cluster.learners
    for name, value in (("parameters", parameters), ("batch", batch), ("steps", steps)):
        if value < 1:
            raise UsageError(f"{name}={value}", where=name, hint="give at least 1")
    config = TrainConfig(
        strategy=strategy,
        strategy_options=strategy_options or {},
        topology=topology,
        seed=seed,
        steps_per_exchange=steps_per_exchange,
        log_every_s=(log_every_s or _seldom(cluster, batch, steps)) if run is not None else NEVER_S,
        timeout_s=NEVER_S,
        device="cpu",
        batch=batch,
        eval_at_checkpoint=False,
        progress="none",
        checkpoint_every_epochs=2.0,
    )
    traits = build_strategy(config).traits
    check_fit(cluster, need(parameters, traits, learners=size), parameters)
    task = TimingOnlyTask(steps * batch * size)
    if traits.optimizer_state != "average":
        momentum = 0.0  # nobody sends it, and its arithmetic is part of the modelled step
    outcome = _run(cluster, task, replace(config, momentum=momentum), 4.0 * parameters, run, spans)
    if samples is not None:
        outcome.hours = (epochs or 1.0) * samples / outcome.samples_per_s / 3600
    return outcome


def simulate_task(
    cluster: Cluster,
    task: Task,
    config: TrainConfig,
    *,
    seed: int = 0,
    spans: bool = False,
    on_step: Callable[[Learner], None] | None = None,
) -> SimulationResult:
    """Real learning in virtual time: the ordinary loop, with its checkpoints and evaluations, on the cluster's clock."""
    return _run(cluster, task, replace(config, timeout_s=NEVER_S, device="cpu"), 0.0, None, spans, seed, on_step)


def _seldom(cluster: Cluster, batch: int, steps: int) -> float:
    """How often to write metrics so that they stay few."""
    learner = cluster.learner
    expected = steps * max(learner.seconds_per_step + batch * learner.seconds_per_sample, 1e-6)
    return expected / max(5.0, min(RECORDS, MOST_RECORDS / cluster.learners))


def _run(
    cluster: Cluster,
    task: Task,
    config: TrainConfig,
    model_bytes: float,
    run: Path | None,
    spans: bool,
    seed: int | None = None,
    on_step: Callable[[Learner], None] | None = None,
) -> SimulationResult:
    if run is not None:
        run.mkdir(parents=True, exist_ok=True)
    virtual = SimulatedCluster(
        cluster,
        model_bytes=model_bytes,
        seed=config.seed if seed is None else seed,
        events=run / "events.jsonl" if run is not None else None,
        spans=SPANS_PER_LEARNER * min(cluster.learners, DRAWN) if spans else 0,
    )

    def work(context: DistributedContext) -> dict[str, Any]:
        trainer = Trainer(task, context, config, on_step=on_step)
        result = trainer.run()
        return {**result, "w": trainer.learner.flat.phi.numpy().copy()}

    results = virtual.run(work)
    return _outcome(virtual, config.strategy, results)


def _outcome(virtual: SimulatedCluster, strategy: str, results: list[dict[str, Any] | None]) -> SimulationResult:
    living = [r for r in results if r is not None]
    if not living:
        raise UsageError(
            "nobody has survived", where=f"cluster '{virtual.cluster.name}'", hint="let fewer learners fail, or later"
        )
    first = living[0]
    staleness: Counter[int] = Counter()
    for result in living:
        staleness.update({int(k): n for k, n in result["staleness"].items()})
    rate, ceiling = _rates(virtual)
    steps = sum(int(r.get("steps", 0)) for r in living)
    timing = bool(virtual.job.model_bytes)
    return SimulationResult(
        strategy=strategy,
        learners=virtual.size,
        machines=len(set(virtual.machines)),
        elapsed_s=virtual.now,
        samples=sum(int(r.get("samples", 0)) for r in living),
        steps=steps,
        samples_per_s=rate,
        efficiency=rate / ceiling if ceiling else 0.0,
        hours=virtual.now / 3600,
        staleness=dict(staleness),
        bytes_per_step=sum(r.get("bytes", 0) for r in living) / max(steps, 1),
        digest=virtual.digest if timing else hashlib.sha256(first["w"].tobytes()).hexdigest()[:16],
        per_learner=[r or {} for r in results],
        exchanges=sum(int(r.get("exchanges", 0)) for r in living),
        metrics=first.get("metrics"),
        lost=dict(virtual.job.dead),
        spans=virtual.job.spans,
        events=virtual.job.world.events,
        weights=first["w"],
        busy_s=max(h.done[-1][1] for h in virtual.hosts if h.done) - min(h.done[0][0] for h in virtual.hosts if h.done),
    )


def _rates(virtual: SimulatedCluster) -> tuple[float, float]:
    """Samples per second while everybody had work, and what the same learners would do alone."""
    done = [host.done for host in virtual.hosts if host.done]
    if not done:
        return 0.0, 0.0
    until = min(gradients[-1][1] for gradients in done)
    began = min(gradients[0][0] for gradients in done)
    samples = 0.0
    for gradients in done:
        for start, end, n in gradients:  # one under way when the first runs out counts as far as it is
            samples += n if end <= until else n * max(until - start, 0.0) / (end - start)
    ceiling = sum(sum(n for _, _, n in host.done) / host.computed_s for host in virtual.hosts if host.computed_s > 0)
    return samples / max(until - began, 1e-12), ceiling
