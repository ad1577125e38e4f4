"""Compare the strategies on a cluster before it is rented, and recommend one with its reason.

Durations come from simulating some steps and scaling. Mixing metrics come from the matrices that run (`topology`), stable
rates from the mathematical model on a quadratic (`theory`). Accuracy is not predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from roundelay import topology
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import build_strategy
from roundelay.errors import UsageError
from roundelay.simulate.cluster import Cluster
from roundelay.simulate.memory import GB, check_fit, memory_need
from roundelay.simulate.run import STATE_VECTORS, SimulationResult, simulate_timing
from roundelay.theory import stable_blocks, stable_delay, stable_mixing, stable_order, uniform

GOOD_EFFICIENCY = 0.9
"""Efficiency above which batch and K are not increased."""
EQUALLY_FAST = 1.05
"""Strategies within this factor of the fastest count as equally fast."""
WORTH_DOUBLING = 1.3
"""Speed-up that a doubling of the learners must bring to be recommended."""
MAX_MODELED_LEARNERS = 16
"""The stable rate of asynchronous exchanges is computed for at most this number of learners; it hardly changes beyond."""


@dataclass(frozen=True)
class PlannedJob:
    """The training run to plan for."""

    parameters: int
    samples: int
    """Samples of an epoch."""
    epochs: float = 1.0
    batch: int = 64
    """Samples per learner and step."""
    optimizer: str = "sgd"
    momentum: float = 0.9
    seed: int = 0


@dataclass(frozen=True)
class Choice:
    """A strategy with its settings."""

    name: str
    strategy: str
    topology: str = "ring"
    settings: dict[str, Any] = field(default_factory=dict)


def choices(cluster: Cluster) -> list[Choice]:
    """Return the strategies that make sense on this cluster."""
    table = [
        Choice("single", "single"),
        Choice("sync", "sync"),
        Choice("delay_by_one", "delay_by_one"),
        Choice("dpsgd", "dpsgd"),
        Choice("adpsgd, ring", "adpsgd"),
        Choice("adpsgd, random_ring", "adpsgd", "random_ring"),
        Choice("kstep, K = 8", "kstep", settings={"K": 8}),
        Choice("bmuf, K = 8", "bmuf", settings={"K": 8}),
        Choice("asgd", "asgd"),
    ]
    machines = len(set(cluster.machine_names()))
    if 1 < machines < cluster.learners:
        table.append(Choice("hierarchical(adpsgd)", "hierarchical(adpsgd)"))
        table.append(Choice("hierarchical(adpsgd), random_ring", "hierarchical(adpsgd)", "random_ring"))
    return table if cluster.learners > 1 else table[:1]


# -- metrics of one strategy ------------------------------------------------------------------------------------------------


def simulate_choice(cluster: Cluster, job: PlannedJob, choice: Choice, batch: int | None = None) -> SimulationResult:
    """Simulate some steps of a strategy and scale the result to the whole job."""
    if choice.strategy == "single":
        cluster = cluster.first(1)
    block = int(choice.settings.get("K", 1))
    steps = max(16, 2 * block)
    return simulate_timing(
        cluster, parameters=job.parameters, strategy=choice.strategy, strategy_options=choice.settings,
        topology=choice.topology, batch=batch or job.batch, steps=steps, epochs=job.epochs, samples=job.samples,
        momentum=job.momentum, seed=job.seed,
    )  # fmt: skip


def mixing(choice: Choice, workers: int) -> tuple[float, int]:
    """Return the spectral gap per round and the rounds until the spread is down to 1 %."""
    inner = choice.strategy.removeprefix("hierarchical(").rstrip(")")
    if workers == 1:
        return 1.0, 0
    if inner == "adpsgd":
        return topology.gap(choice.topology, workers), topology.rounds_to_agreement(choice.topology, workers)
    if inner == "dpsgd":
        second = topology.spectrum(topology.neighbor_matrix(choice.topology, workers)).second
        return 1 - second, math.ceil(math.log(0.01) / math.log(second)) if second > 0 else 1
    return 1.0, 1


def stable_rate(choice: Choice, workers: int) -> float:
    """Return the largest stable product of rate and curvature of plain SGD on a quadratic; 2 for one learner."""
    inner = choice.strategy.removeprefix("hierarchical(").rstrip(")")
    if workers == 1:
        return 2.0
    if inner == "dpsgd":
        return stable_mixing(topology.neighbor_matrix(choice.topology, workers))
    if inner == "delay_by_one":
        return stable_mixing(uniform(2))
    if inner == "asgd":
        return (
            workers * stable_delay(1.0, workers - 1) if workers <= MAX_MODELED_LEARNERS else math.pi / 2
        )  # the limit for many learners
    if inner == "adpsgd":
        return _stable_gossip(choice.topology, min(workers, MAX_MODELED_LEARNERS))
    if inner == "bmuf":
        return stable_blocks(workers, int(choice.settings.get("K", 8)), 1 - 1 / workers, 1.0, True)
    return 2.0


@lru_cache(maxsize=64)
def _stable_gossip(name: str, size: int) -> float:
    return stable_order(size, 40, lambda r: topology.matching(name, r, size))


def evaluate_choice(cluster: Cluster, job: PlannedJob, choice: Choice) -> dict[str, Any]:
    """Return the metrics of one strategy as JSON values; `why` says why the model does not fit."""
    size = 1 if choice.strategy == "single" else cluster.learners
    part = cluster.first(size)
    workers = len(set(part.machine_names())) if choice.strategy.startswith("hierarchical") else size
    options = EngineConfig(strategy=choice.strategy, strategy_options=choice.settings, topology=choice.topology)
    state_vectors = STATE_VECTORS.get(job.optimizer, 1)
    need = memory_need(job.parameters, build_strategy(options).traits, state_vectors=state_vectors, learners=size)
    gap, rounds = mixing(choice, workers)
    metrics: dict[str, Any] = {
        "name": choice.name,
        "strategy": choice.strategy,
        "topology": choice.topology,
        "settings": choice.settings,
        "learners": size,
        "memory_gb": need.device / GB,
        "host_memory_gb": need.host / GB,
        "gap": gap,
        "rounds_to_agreement": rounds,
        "stable_rate": stable_rate(choice, workers),
    }
    try:
        check_fit(part, need, job.parameters)
    except UsageError as error:
        return {**metrics, "fits": False, "why": error.message}
    outcome = simulate_choice(cluster, job, choice)
    return {
        **metrics,
        "fits": True,
        "hours": outcome.hours,
        "samples_per_s": outcome.samples_per_s,
        "efficiency": outcome.efficiency,
        "bytes_per_step": outcome.bytes_per_step,
        "staleness": outcome.staleness_mean,
    }


# -- the recommendation -----------------------------------------------------------------------------------------------------


def plan(cluster: Cluster, job: PlannedJob, done: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Evaluate all strategies and recommend one, with learners, batch and K.

    `done(name)` is called after each simulation.

    Raises:
        UsageError: the model does not fit with any strategy.
    """
    rows = []
    for choice in choices(cluster):
        rows.append(evaluate_choice(cluster, job, choice))
        done(choice.name)
    if not any(r["fits"] for r in rows):
        raise UsageError(
            rows[0]["why"],
            where=f"cluster '{cluster.name}', all strategies",
            hint="choose a smaller model, an optimizer with less state, or a cluster with more memory",
        )
    best, reason = choose(rows)
    result: dict[str, Any] = {
        "cluster": cluster.name,
        "job": {"parameters": job.parameters, "samples": job.samples, "epochs": job.epochs, "batch": job.batch},
        "strategies": rows,
        "recommendation": {"strategy": best["strategy"], "topology": best["topology"], "reason": [reason]},
    }
    if cluster.learners > 1:
        choice = Choice(best["name"], best["strategy"], best["topology"], best["settings"])
        refine(result["recommendation"], cluster, job, choice)
        done("learners, batch and K")
    else:
        result["recommendation"] |= {"learners": 1, "batch": job.batch, "K": None}
    return result


def choose(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return the recommended row and the reason: exact SGD if it is about as fast as the fastest, else the best mixing."""
    candidates = [r for r in rows if r["fits"] and r["strategy"] not in ("asgd", "bmuf")]
    fastest = min(candidates, key=lambda r: r["hours"])
    near = [r for r in candidates if r["hours"] <= EQUALLY_FAST * fastest["hours"]]
    for plain in ("single", "sync"):
        match = next((r for r in near if r["strategy"] == plain), None)
        if match is not None:
            return (
                match,
                f"{plain} is within 5 % of the fastest ({fastest['name']}), and it is exactly SGD with the global batch",
            )
    steady = [r for r in near if not r["strategy"].startswith("kstep")] or near
    best = max(steady, key=lambda r: (round(r["gap"], 3), -r["hours"]))
    sync = next((r for r in rows if r["strategy"] == "sync" and r["fits"]), None)
    reason = (
        f"{best['name']} is within 5 % of the fastest ({fastest['name']}) and mixes best among those (gap {best['gap']:.3f})"
    )
    if sync is not None:
        reason += f"; sync would take {sync['hours'] / best['hours']:.2f} times as long"
    return best, reason


def refine(recommendation: dict[str, Any], cluster: Cluster, job: PlannedJob, choice: Choice) -> None:
    """Add learners, batch per learner and K to a recommendation, each by simulating the alternatives."""
    reasons: list[str] = recommendation["reason"]
    sizes = learner_counts(cluster) if choice.strategy != "single" else [1]
    hours = {
        size: simulate_choice(cluster.first(size), job, feasible_choice(choice, cluster.first(size))).hours for size in sizes
    }
    learners = sizes[0]
    for size in sizes[1:]:
        if hours[learners] / hours[size] < WORTH_DOUBLING ** math.log2(size / learners):
            reasons.append(
                f"{size} learners would take {hours[size]:.3g} h against {hours[learners]:.3g} h with {learners}: "
                f"a doubling should save a quarter of the time to be worth it"
            )
            break
        learners = size
    part = cluster.first(learners)
    final = feasible_choice(choice, part)
    batch, outcome = job.batch, simulate_choice(part, job, final)
    while outcome.efficiency < GOOD_EFFICIENCY and batch < 8 * job.batch and learners > 1:
        larger = simulate_choice(part, job, final, 2 * batch)
        if larger.efficiency < outcome.efficiency + 0.02:
            break
        batch, outcome = 2 * batch, larger
    if batch != job.batch:
        reasons.append(
            f"a batch of {batch} per learner raises the efficiency to {100 * outcome.efficiency:.0f} %: the global batch is "
            f"then {batch * learners}, so the rate must be tuned again, and the activations must fit"
        )
    recommendation |= {"learners": learners, "batch": batch, "hours": outcome.hours, "efficiency": outcome.efficiency}
    recommendation["hours_by_learners"] = {str(size): h for size, h in hours.items()}
    recommendation["K"] = smallest_K(part, job, batch) if learners > 1 else None
    if recommendation["K"] is not None:
        reasons.append(f"with kstep, K = {recommendation['K']} is the smallest K that keeps averaging below 10 % of the time")


def feasible_choice(choice: Choice, cluster: Cluster) -> Choice:
    """Replace a hierarchy on one machine by sync, and any strategy with one learner by single."""
    if cluster.learners == 1:
        return Choice("single", "single")
    if choice.strategy.startswith("hierarchical") and len(set(cluster.machine_names())) == 1:
        return Choice("sync", "sync")
    return choice


def learner_counts(cluster: Cluster) -> list[int]:
    """Return 1, 2, 4, … and the number of all learners."""
    return [*(2**n for n in range(cluster.learners.bit_length()) if 2**n < cluster.learners), cluster.learners]


def smallest_K(cluster: Cluster, job: PlannedJob, batch: int) -> int | None:
    """Return the smallest K with which kstep is efficient; None if there is none up to 64."""
    for K in (1, 2, 4, 8, 16, 32, 64):
        choice = Choice("kstep", "kstep", settings={"K": K})
        if simulate_choice(cluster, replace(job, batch=batch), choice).efficiency >= GOOD_EFFICIENCY:
            return K
    return None
