"""Estimate what a slow rank costs a run, from the events of that run.

The pace of every rank (seconds of compute, data and update per sample) comes from the run's summaries; the time of a
collective comes from the rank that waited least. The run is then simulated twice: as it was, to be compared with the
measurement, and with the slow rank at the median pace.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundelay.engine.config import EngineConfig
from roundelay.errors import DataError, UsageError
from roundelay.launch.context import fake_machines
from roundelay.metrics.events import read_events
from roundelay.simulate.cluster import Cluster, ComputeModel, MachineGroup, StragglerModel
from roundelay.simulate.run import simulate_timing

STEPS = 200


@dataclass(frozen=True)
class RankSummary:
    """Totals of one rank of a run."""

    samples: int
    steps: int
    own_s: float
    comm_s: float
    elapsed_s: float

    @property
    def pace(self) -> float:
        """Return the seconds of own work per sample."""
        return self.own_s / max(self.samples, 1)


def rank_summaries(run: Path) -> dict[int, RankSummary]:
    """Read the summaries of all ranks from a run's events.

    Raises:
        DataError: the run has no events, or fewer than two ranks wrote a summary.
    """
    path = run / "events.jsonl"
    if not path.is_file():
        raise DataError("events.jsonl is missing", where=str(path), hint="name the directory of a completed run")
    summaries = {}
    for event in read_events(path):
        if event.get("event") == "summary" and event.get("samples"):
            summaries[int(event["rank"])] = RankSummary(
                int(event["samples"]), int(event["steps"]), float(event["own_s"]), float(event["waiting_s"]),
                float(event["elapsed_s"]),
            )  # fmt: skip
    if len(summaries) < 2 or sorted(summaries) != list(range(len(summaries))):
        raise DataError(
            f"the events must hold the summaries of at least 2 ranks (got {len(summaries)})",
            where=str(path),
            hint="name the directory of a completed run with several learners",
        )
    return summaries


def straggler_cost(run: Path, rank: int, options: EngineConfig, batch: int, parameters: int) -> dict[str, Any]:
    """Return measured and simulated samples/s, and the samples/s with `rank` at the median pace.

    Raises:
        UsageError: the run has no such rank.
        DataError: see `rank_summaries`.
    """
    summaries = rank_summaries(run)
    if rank not in summaries:
        raise UsageError(
            f"rank must be between 0 and {len(summaries) - 1} (got {rank})", where="rank", hint="choose a rank of this run"
        )
    paces = [summaries[r].pace for r in range(len(summaries))]
    usual = statistics.median(pace for r, pace in enumerate(paces) if r != rank)
    collective_s = min(summary.comm_s / max(summary.steps, 1) for summary in summaries.values())
    names = fake_machines(["here"] * len(summaries), options.simulate_nodes)
    cluster = Cluster(
        name=f"as measured in {run.name}",
        machines=tuple(MachineGroup(1, names.count(name)) for name in dict.fromkeys(names)),
        learner=ComputeModel(seconds_per_sample=usual, seconds_per_step=collective_s),
        # a factor lengthens the whole step, but only the rank's own work is slower
        straggler=tuple(
            StragglerModel((batch * pace + collective_s) / (batch * usual + collective_s), learner=r)
            for r, pace in enumerate(paces)
        ),
    )

    def simulated(stragglers: tuple[StragglerModel, ...]) -> float:
        return simulate_timing(
            replace(cluster, straggler=stragglers), parameters=parameters, strategy=options.strategy,
            topology=options.topology, strategy_options=options.strategy_options, batch=batch, steps=STEPS, seed=options.seed,
        ).samples_per_s  # fmt: skip

    as_it_was = simulated(cluster.straggler)
    normal = simulated(tuple(s for s in cluster.straggler if s.learner != rank))
    samples = sum(summary.samples for summary in summaries.values())
    return {
        "run": str(run),
        "rank": rank,
        "strategy": options.strategy,
        "slowdown": paces[rank] / usual,
        "measured_samples_per_s": samples / max(summary.elapsed_s for summary in summaries.values()),
        "simulated_samples_per_s": as_it_was,
        "if_normal_samples_per_s": normal,
        "gain": normal / as_it_was,
        "seconds_per_sample": {str(r): pace for r, pace in enumerate(paces)},
    }
