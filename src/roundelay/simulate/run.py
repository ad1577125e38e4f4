"""Simulate a training run on a cluster: how long it takes and where the time goes. With a task it trains for real."""

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
from roundelay.simulate.memory import check_fit, memory_need
from roundelay.simulate.simulated_cluster import SimulatedCluster
from roundelay.simulate.timing_only import TimingOnlyTask

STATE_VECTORS = {"sgd": 1, "adam": 2, "adamw": 2}
NEVER_S = 1e9
"""Longer than any run."""
RECORDS = 50
"""Default number of metric records per learner."""
MAX_RECORDS = 4_000
"""Default limit of metric records of all learners together."""
SPANS_PER_LEARNER = 80
MAX_DRAWN = 64
"""Learners whose first intervals are kept for drawing."""


@dataclass
class SimulationResult:
    """The result of a simulated run."""

    strategy: str
    learners: int
    machines: int
    elapsed_s: float
    """Virtual seconds of the whole run, with start and end."""
    samples: int
    steps: int
    """Steps of all learners together."""
    samples_per_s: float
    """Rate until the first learner runs out of samples."""
    efficiency: float
    """samples_per_s divided by the rate of the same learners without communication."""
    hours: float
    """Duration of the requested run; extrapolated from samples_per_s if only a part was simulated."""
    staleness: dict[int, int]
    bytes_per_step: float
    """Mean bytes that one learner sends per step."""
    digest: str
    """Hash of the final weights; in timing-only mode, of the order of events."""
    per_learner: list[dict[str, Any]] = field(default_factory=list)
    """By rank: steps, samples, seconds by kind; empty for failed ranks."""
    exchanges: int = 0
    metrics: dict[str, float] | None = None
    lost: dict[int, str] = field(default_factory=dict)
    """Failed rank -> reason."""
    spans: list[tuple[int, str, float, float]] = field(default_factory=list)
    events: int = 0
    weights: np.ndarray | None = None
    busy_s: float = 0.0
    """Seconds from the begin of the first gradient to the end of the last."""

    @property
    def staleness_mean(self) -> float:
        return sum(k * n for k, n in self.staleness.items()) / max(sum(self.staleness.values()), 1)

    def summary(self) -> dict[str, Any]:
        """Return the result as JSON values: the output of `roundelay simulate --json`."""
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
            **({"lost": {str(r): reason for r, reason in self.lost.items()}} if self.lost else {}),
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
    """Simulate `steps` steps per learner in timing-only mode: no arithmetic, only durations.

    `samples` (of one epoch) and `epochs` describe the whole run; if given, `hours` of the result is for the whole run.

    Raises:
        UsageError: a number is < 1, or the model does not fit into the memory of the cluster.
    """
    size = cluster.learners
    for name, value in (("parameters", parameters), ("batch", batch), ("steps", steps)):
        if value < 1:
            raise UsageError(f"{name} must be >= 1 (got {value})", where=name, hint=f"set {name} to at least 1")
    config = TrainConfig(
        strategy=strategy,
        strategy_options=strategy_options or {},
        topology=topology,
        seed=seed,
        steps_per_exchange=steps_per_exchange,
        log_every_s=(log_every_s or _log_interval(cluster, batch, steps)) if run is not None else NEVER_S,
        timeout_s=NEVER_S,
        device="cpu",
        epochs=1.0,
        batch=batch,
        lr=0.1,
        eval_at_checkpoint=False,
        progress="none",
        checkpoint_every_epochs=2.0,
    )
    traits = build_strategy(config).traits
    check_fit(cluster, memory_need(parameters, traits, learners=size), parameters)
    task = TimingOnlyTask(steps * batch * size)
    if traits.optimizer_state != "average":
        momentum = 0.0  # momentum is not sent, and its arithmetic is part of the modeled step
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
    """Train a task in virtual time: the usual trainer with its checkpoints and evaluations, on the clock of the cluster."""
    return _run(cluster, task, replace(config, timeout_s=NEVER_S, device="cpu"), 0.0, None, spans, seed, on_step)


def _log_interval(cluster: Cluster, batch: int, steps: int) -> float:
    """Return an interval of metric records that keeps their number below MAX_RECORDS."""
    learner = cluster.learner
    expected = steps * max(learner.seconds_per_step + batch * learner.seconds_per_sample, 1e-6)
    return expected / max(5.0, min(RECORDS, MAX_RECORDS / cluster.learners))


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
    simulated = SimulatedCluster(
        cluster,
        model_bytes=model_bytes,
        seed=config.seed if seed is None else seed,
        events=run / "events.jsonl" if run is not None else None,
        spans=SPANS_PER_LEARNER * min(cluster.learners, MAX_DRAWN) if spans else 0,
    )

    def work(context: DistributedContext) -> dict[str, Any]:
        trainer = Trainer(task, context, config, on_step=on_step)
        result = trainer.run()
        return {**result, "w": trainer.learner.flat.phi.numpy().copy()}

    results = simulated.run(work)
    return _summarize(simulated, config.strategy, results)


def _summarize(simulated: SimulatedCluster, strategy: str, results: list[dict[str, Any] | None]) -> SimulationResult:
    survivors = [r for r in results if r is not None]
    if not survivors:
        raise UsageError(
            "all learners have failed",
            where=f"cluster '{simulated.cluster.name}'",
            hint="let fewer learners fail, or let them fail later",
        )
    first = survivors[0]
    staleness: Counter[int] = Counter()
    for result in survivors:
        staleness.update({int(k): n for k, n in result["staleness"].items()})
    rate, bound = _rates(simulated)
    steps = sum(int(r.get("steps", 0)) for r in survivors)
    timing_only = bool(simulated.job.model_bytes)
    gradients = [runtime.gradients for runtime in simulated.runtimes if runtime.gradients]
    return SimulationResult(
        strategy=strategy,
        learners=simulated.size,
        machines=len(set(simulated.machines)),
        elapsed_s=simulated.now,
        samples=sum(int(r.get("samples", 0)) for r in survivors),
        steps=steps,
        samples_per_s=rate,
        efficiency=rate / bound if bound else 0.0,
        hours=simulated.now / 3600,
        staleness=dict(staleness),
        bytes_per_step=sum(r.get("bytes", 0) for r in survivors) / max(steps, 1),
        digest=simulated.digest if timing_only else hashlib.sha256(first["w"].tobytes()).hexdigest()[:16],
        per_learner=[r or {} for r in results],
        exchanges=sum(int(r.get("exchanges", 0)) for r in survivors),
        metrics=first.get("metrics"),
        lost=dict(simulated.job.failed),
        spans=simulated.job.spans,
        events=simulated.job.loop.events,
        weights=first["w"],
        busy_s=max(g[-1][1] for g in gradients) - min(g[0][0] for g in gradients),
    )


def _rates(simulated: SimulatedCluster) -> tuple[float, float]:
    """Return samples/s until the first learner runs out of samples, and samples/s without communication."""
    by_learner = [runtime.gradients for runtime in simulated.runtimes if runtime.gradients]
    if not by_learner:
        return 0.0, 0.0
    until = min(gradients[-1][1] for gradients in by_learner)
    began = min(gradients[0][0] for gradients in by_learner)
    samples = 0.0
    for gradients in by_learner:
        for start, end, n in gradients:  # a gradient under way at that time counts in proportion
            samples += n if end <= until else n * max(until - start, 0.0) / (end - start)
    bound = sum(sum(n for _, _, n in r.gradients) / r.computed_s for r in simulated.runtimes if r.computed_s > 0)
    return samples / max(until - began, 1e-12), bound
