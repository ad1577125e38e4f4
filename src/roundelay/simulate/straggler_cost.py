"""What if one rank were as fast as the others? From the events of a real run.

Every rank's own pace (seconds of compute, data and update per sample) is taken from the run's summaries, and what the quickest
rendezvous took from the rank that waited least. With these the run is simulated twice: as it was, which must come near to what
was measured and is shown beside it; and with the rank at the pace of the median.
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
    """What one rank did in a run."""

    samples: int
    steps: int
    own_s: float
    comm_s: float
    elapsed_s: float

    @property
    def pace(self) -> float:
        return self.own_s / max(self.samples, 1)


def ranks_of(run: Path) -> dict[int, RankSummary]:
    """The summaries in a run's events."""
    path = run / "events.jsonl"
    if not path.is_file():
        raise DataError("this run has no events", where=str(path), hint="give the directory of a run that came to its end")
    found = {}
    for event in read_events(path):
        if event.get("event") == "summary" and event.get("samples"):
            found[int(event["rank"])] = RankSummary(
                int(event["samples"]), int(event["steps"]), float(event["own_s"]), float(event["waiting_s"]),
                float(event["elapsed_s"]),
            )  # fmt: skip
    if len(found) < 2 or sorted(found) != list(range(len(found))):
        raise DataError(
            f"the events hold the summaries of {len(found)} ranks",
            where=str(path),
            hint="give a run of several learners that came to its end",
        )
    return found


def straggler_cost(run: Path, rank: int, options: EngineConfig, batch: int, parameters: int) -> dict[str, Any]:
    ran = ranks_of(run)
    if rank not in ran:
        raise UsageError(f"there is no rank {rank} in this run", where="rank", hint=f"ranks are 0 to {len(ran) - 1}")
    paces = [ran[r].pace for r in range(len(ran))]
    usual = statistics.median(pace for r, pace in enumerate(paces) if r != rank)
    rendezvous = min(r.comm_s / max(r.steps, 1) for r in ran.values())
    names = fake_machines(["here"] * len(ran), options.simulate_nodes)
    cluster = Cluster(
        name=f"as measured in {run.name}",
        machines=tuple(MachineGroup(1, names.count(name)) for name in dict.fromkeys(names)),
        learner=ComputeModel(seconds_per_sample=usual, seconds_per_step=rendezvous),
        # a factor lengthens the whole step, but only the rank's own part of it is its own
        straggler=tuple(
            StragglerModel((batch * pace + rendezvous) / (batch * usual + rendezvous), learner=r)
            for r, pace in enumerate(paces)
        ),
    )

    def rate(slow: tuple[StragglerModel, ...]) -> float:
        return simulate_timing(
            replace(cluster, straggler=slow), parameters=parameters, strategy=options.strategy, topology=options.topology,
            strategy_options=options.strategy_options, batch=batch, steps=STEPS, seed=options.seed,
        ).samples_per_s  # fmt: skip

    as_it_was = rate(cluster.straggler)
    normal = rate(tuple(s for s in cluster.straggler if s.learner != rank))
    measured = sum(r.samples for r in ran.values()) / max(r.elapsed_s for r in ran.values())
    return {
        "run": str(run),
        "rank": rank,
        "strategy": options.strategy,
        "slowdown": paces[rank] / usual,
        "measured_samples_per_s": measured,
        "simulated_samples_per_s": as_it_was,
        "if_normal_samples_per_s": normal,
        "gain": normal / as_it_was,
        "seconds_per_sample": {str(r): pace for r, pace in enumerate(paces)},
    }
