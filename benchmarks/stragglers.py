"""Held-out loss against virtual time with one slow learner of 16.

The example task on 16 equal learners, then with one of them slowed 2 and 10 times: AD-PSGD on the fixed and the randomized
ring, delay-by-one and synchronous SGD, at the same rate and over the same samples. Nothing is tuned per cell.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.common import log, parser, run_main
from benchmarks.sim_probe import LearningRun, learn, one_thread
from roundelay.engine.config import TrainConfig
from roundelay.log.output import markdown_table
from roundelay.simulate.cluster import (
    Cluster,
    ComputeModel,
    LinkModel,
    LinkModels,
    MachineGroup,
    SpeedModel,
    StragglerModel,
)
from roundelay.testing.tasks import SyntheticFrames

SIZE, SLOW_ONE = 16, 5
SLOWDOWNS = (1.0, 2.0, 10.0)
BATCH, RATE, EPOCHS = 4, 1.0, 8.0
TASK = SyntheticFrames(samples=2560, held_out=256, hidden=16, frames=8)
GOAL = 1.05
"""Times the loss that synchronous SGD ends with: who needs how long to get there?"""
CONTESTANTS = {
    "adpsgd, ring": ("adpsgd", "ring"),
    "adpsgd, random_ring": ("adpsgd", "random_ring"),
    "delay_by_one": ("delay_by_one", "ring"),
    "sync": ("sync", "ring"),
}
CLUSTER = Cluster(
    name="sixteen",
    about="16 machines with one learner each; sending the model takes a small part of a gradient",
    machines=(MachineGroup(SIZE, 1),),
    learner=ComputeModel(seconds_per_sample=1e-3, jitter=SpeedModel("gaussian", 0.05)),
    link=LinkModels(between=LinkModel(10.0, 50.0)),
)


def run(strategy: str, ring: str, slowdown: float, epochs: float, seed: int = 0) -> LearningRun:
    cluster = CLUSTER if slowdown == 1 else replace(CLUSTER, straggler=(StragglerModel(slowdown, learner=SLOW_ONE),))
    config = TrainConfig(
        strategy=strategy, topology=ring, seed=seed, schedule="cosine", warmup_epochs=0.05 * epochs, log_every_s=1e9,
        epochs=epochs, batch=BATCH, lr=RATE, momentum=0.9,
    )  # fmt: skip
    return learn(cluster, replace(TASK, seed=seed), config, looks=16, seed=seed)


def main(argv: Sequence[str]) -> int:
    p = parser("stragglers", __doc__, "python -m benchmarks.stragglers --quick")
    p.add_argument("--quick", action="store_true", help="a quarter of an epoch: shows that it runs")
    p.add_argument("--slowdowns", default=",".join(f"{s:g}" for s in SLOWDOWNS), help="only these, such as 1,10")
    p.add_argument("--epochs", type=float, default=EPOCHS, help=f"passes over the samples (default {EPOCHS:g})")
    args = p.parse_args(argv)
    one_thread()
    slowdowns = [1.0, 10.0] if args.quick else [float(s) for s in args.slowdowns.split(",")]
    report = table(slowdowns, 0.25 if args.quick else args.epochs)
    print(json.dumps(report) if args.json else show(report))
    return 0


def table(slowdowns: Sequence[float], epochs: float) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for slowdown in slowdowns:
        for name, (strategy, ring) in CONTESTANTS.items():
            learned = run(strategy, ring, slowdown, epochs)
            outcome = learned.outcome
            rows.append(
                {
                    "contestant": name,
                    "slowdown": slowdown,
                    "loss": learned.loss,
                    "virtual_s": outcome.elapsed_s if outcome else None,
                    "staleness": outcome.staleness_mean if outcome else None,
                    "steps_of_the_slow_one": outcome.per_learner[SLOW_ONE].get("steps") if outcome else None,
                    "looks": [asdict(look) for look in learned.looks],
                }
            )
            log(f"slowed {slowdown:g} x  {name:<20} loss {learned.loss:.4f} after {rows[-1]['virtual_s'] or 0:.2f} virtual s")
    goal = GOAL * next(r["loss"] for r in rows if r["contestant"] == "sync")
    for row in rows:
        row["goal_s"] = next((look["time_s"] for look in row["looks"] if look["loss"] <= goal), None)
    return {"results": rows, "goal": goal, "learners": SIZE, "epochs": epochs, "batch": BATCH, "rate": RATE}


def show(report: dict[str, Any]) -> str:
    head = [
        "",
        "slowed",
        "virtual s",
        "held-out loss",
        f"virtual s to loss {report['goal']:.3f}",
        "staleness",
        "steps of the slow one",
    ]
    keys = ("contestant", "slowdown", "virtual_s", "loss", "goal_s", "staleness", "steps_of_the_slow_one")
    return markdown_table(head, [[r[k] for k in keys] for r in report["results"]])


if __name__ == "__main__":
    run_main(main)
