"""Before machines are rented: what every strategy would take and need on a cluster, and which one to choose, with the reason.

Times come from simulating some steps and scaling; metrics of mixing from the matrices that run (topology.py); stable rates from
the mathematical model on a quadratic (theory.py). Nothing here knows how well a model learns: that is said where it counts.
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
from roundelay.simulate.memory import GB, check_fit, need
from roundelay.simulate.run import STATE_VECTORS, SimulationResult, simulate_timing
from roundelay.theory import stable_blocks, stable_delay, stable_mixing, stable_order, uniform

GOOD_ENOUGH = 0.9
"""An efficiency above which nothing more is asked for."""
EQUALLY_FAST = 1.05
WORTH_DOUBLING = 1.3
"""A doubling of the learners must make the run so many times as fast."""
STALEST = 16
"""Learners up to which the stable rate of an asynchronous order is worked out; it hardly changes beyond."""


@dataclass(frozen=True)
class PlannedJob:
    """What is to be trained."""

    parameters: int
    samples: int
    """In an epoch."""
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
    """The strategies worth a line on this cluster."""
    found = [
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
        found.append(Choice("hierarchical(adpsgd)", "hierarchical(adpsgd)"))
        found.append(Choice("hierarchical(adpsgd), random_ring", "hierarchical(adpsgd)", "random_ring"))
    return found if cluster.learners > 1 else found[:1]


# -- metrics of one strategy ------------------------------------------------------------------------------------------------


def timed(cluster: Cluster, job: PlannedJob, choice: Choice, batch: int | None = None) -> SimulationResult:
    """Some steps of it, scaled to the whole run."""
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
    """(spectral gap per round, rounds until the spread is down to 1 %)."""
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
    """The largest rate times curvature that plain SGD bears with this strategy on a quadratic; 2 for one learner."""
    inner = choice.strategy.removeprefix("hierarchical(").rstrip(")")
    if workers == 1:
        return 2.0
    if inner == "dpsgd":
        return stable_mixing(topology.neighbor_matrix(choice.topology, workers))
    if inner == "delay_by_one":
        return stable_mixing(uniform(2))
    if inner == "asgd":
        return workers * stable_delay(1.0, workers - 1) if workers <= STALEST else math.pi / 2  # its limit for many
    if inner == "adpsgd":
        return _stable_gossip(choice.topology, min(workers, STALEST))
    if inner == "bmuf":
        return stable_blocks(workers, int(choice.settings.get("K", 8)), 1 - 1 / workers, 1.0, True)
    return 2.0


@lru_cache(maxsize=64)
def _stable_gossip(name: str, size: int) -> float:
    return stable_order(size, 40, lambda r: topology.matching(name, r, size))


def row(cluster: Cluster, job: PlannedJob, choice: Choice) -> dict[str, Any]:
    """One strategy's line; where the model does not fit, why."""
    size = 1 if choice.strategy == "single" else cluster.learners
    here = cluster.first(size)
    workers = len(set(here.machine_names())) if choice.strategy.startswith("hierarchical") else size
    options = EngineConfig(strategy=choice.strategy, strategy_options=choice.settings, topology=choice.topology)
    needed = need(
        job.parameters, build_strategy(options).traits, state_vectors=STATE_VECTORS.get(job.optimizer, 1), learners=size
    )
    gap, rounds = mixing(choice, workers)
    found: dict[str, Any] = {
        "name": choice.name,
        "strategy": choice.strategy,
        "topology": choice.topology,
        "settings": choice.settings,
        "learners": size,
        "memory_gb": needed.device / GB,
        "host_memory_gb": needed.host / GB,
        "gap": gap,
        "rounds_to_agreement": rounds,
        "stable_rate": stable_rate(choice, workers),
    }
    try:
        check_fit(here, needed, job.parameters)
    except UsageError as error:
        return {**found, "fits": False, "why": error.message}
    outcome = timed(cluster, job, choice)
    return {
        **found,
        "fits": True,
        "hours": outcome.hours,
        "samples_per_s": outcome.samples_per_s,
        "efficiency": outcome.efficiency,
        "bytes_per_step": outcome.bytes_per_step,
        "staleness": outcome.staleness_mean,
    }


# -- the recommendation -----------------------------------------------------------------------------------------------------


def plan(cluster: Cluster, job: PlannedJob, done: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Every strategy's line and a recommendation. A model that fits nowhere is an error."""
    rows = []
    for choice in choices(cluster):
        rows.append(row(cluster, job, choice))
        done(choice.name)
    if not any(r["fits"] for r in rows):
        raise UsageError(
            rows[0]["why"],
            where=f"cluster '{cluster.name}', every strategy",
            hint="choose a smaller model, an optimizer with less state, or a cluster with more memory",
        )
    best, reason = choose(rows)
    found: dict[str, Any] = {
        "cluster": cluster.name,
        "job": {"parameters": job.parameters, "samples": job.samples, "epochs": job.epochs, "batch": job.batch},
        "strategies": rows,
        "recommendation": {"strategy": best["strategy"], "topology": best["topology"], "reason": [reason]},
    }
    if cluster.learners > 1:
        refine(
            found["recommendation"], cluster, job, Choice(best["name"], best["strategy"], best["topology"], best["settings"])
        )
        done("learners, batch and K")
    else:
        found["recommendation"] |= {"learners": 1, "batch": job.batch, "K": None}
    return found


def choose(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The plainest of the fast ones: exactly SGD where that costs little, else the one that mixes best."""
    real = [r for r in rows if r["fits"] and r["strategy"] not in ("asgd", "bmuf")]
    fastest = min(real, key=lambda r: r["hours"])
    near = [r for r in real if r["hours"] <= EQUALLY_FAST * fastest["hours"]]
    for plain in ("single", "sync"):
        found = next((r for r in near if r["strategy"] == plain), None)
        if found is not None:
            return (
                found,
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


def refine(said: dict[str, Any], cluster: Cluster, job: PlannedJob, choice: Choice) -> None:
    """Learners, batch per learner and K, each by simulating its alternatives."""
    reasons: list[str] = said["reason"]
    sizes = learner_counts(cluster) if choice.strategy != "single" else [1]
    hours = {size: timed(cluster.first(size), job, as_possible(choice, cluster.first(size))).hours for size in sizes}
    learners = sizes[0]
    for size in sizes[1:]:
        if hours[learners] / hours[size] < WORTH_DOUBLING ** math.log2(size / learners):
            reasons.append(
                f"{size} learners would take {hours[size]:.3g} h against {hours[learners]:.3g} h with {learners}: "
                f"a doubling should save a quarter of the time to be worth it"
            )
            break
        learners = size
    here = cluster.first(learners)
    final = as_possible(choice, here)
    batch, tried = job.batch, timed(here, job, final)
    while tried.efficiency < GOOD_ENOUGH and batch < 8 * job.batch and learners > 1:
        more = timed(here, job, final, 2 * batch)
        if more.efficiency < tried.efficiency + 0.02:
            break
        batch, tried = 2 * batch, more
    if batch != job.batch:
        reasons.append(
            f"a batch of {batch} per learner raises the efficiency to {100 * tried.efficiency:.0f} %: the global batch is then "
            f"{batch * learners}, so the rate must be found anew, and the activations must fit"
        )
    said |= {"learners": learners, "batch": batch, "hours": tried.hours, "efficiency": tried.efficiency}
    said["hours_by_learners"] = {str(size): h for size, h in hours.items()}
    said["K"] = smallest_K(here, job, batch) if learners > 1 else None
    if said["K"] is not None:
        reasons.append(f"were it kstep, K = {said['K']} is the smallest that keeps averages under a tenth of the time")


def as_possible(choice: Choice, cluster: Cluster) -> Choice:
    """A hierarchy on one machine, or with one learner, is plain synchronous SGD, or single."""
    if cluster.learners == 1:
        return Choice("single", "single")
    if choice.strategy.startswith("hierarchical") and len(set(cluster.machine_names())) == 1:
        return Choice("sync", "sync")
    return choice


def learner_counts(cluster: Cluster) -> list[int]:
    """1, 2, 4, … and all of them."""
    return [*(2**n for n in range(cluster.learners.bit_length()) if 2**n < cluster.learners), cluster.learners]


def smallest_K(cluster: Cluster, job: PlannedJob, batch: int) -> int | None:
    for K in (1, 2, 4, 8, 16, 32, 64):
        if timed(cluster, replace(job, batch=batch), Choice("kstep", "kstep", settings={"K": K})).efficiency >= GOOD_ENOUGH:
            return K
    return None
