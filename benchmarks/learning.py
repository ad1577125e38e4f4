"""Held-out loss of every strategy against one learner, from the same samples.

The example task, several numbers of learners, one global batch. Every strategy uses the best of the same three rates; the
median over seeds counts, against `single` with the same global batch and samples. Two controls show that the task separates
good from bad: `half` is single with half the samples, `never` are learners that average only at the end.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import parser, run_main
from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.launch.context import DistributedContext
from roundelay.strategies import STRATEGIES
from roundelay.testing.pools import ProcessPool
from roundelay.testing.tasks import SyntheticFrames

GLOBAL_BATCH = 64
EPOCHS = 8.0
RATES = (0.5, 1.0, 2.0)
"""The best rate of `single` is the middle one, so the best rate of every strategy is inside the range."""
TOLERANCE = 1.03
CONTROLS_AT_LEAST = 1.10


@dataclass(frozen=True)
class LearningCase:
    """A strategy with its documented settings."""

    strategy: str
    settings: tuple[tuple[str, Any], ...] = ()
    epochs: float = EPOCHS
    simulate_nodes: int = 0


CONTESTANTS: dict[str, LearningCase] = {
    "single": LearningCase("single"),
    "half": LearningCase("single", epochs=EPOCHS / 2),
    "never": LearningCase("kstep", (("K", 1_000_000_000),)),
} | {
    name: LearningCase("hierarchical(adpsgd)", simulate_nodes=2) if name == "hierarchical" else LearningCase(name)
    for name in STRATEGIES
    if name != "single"
}
CONTESTANTS["adpsgd_random"] = LearningCase("adpsgd", (("topology", "random_ring"),))
ALONE = ("single", "half")


def main(argv: Sequence[str]) -> int:
    p = parser("learning", __doc__, "python -m benchmarks.learning --learners 4 --seeds 1")
    p.add_argument("--quick", action="store_true", help="4 learners, one seed")
    p.add_argument("--learners", default="4,5,7")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--competitors", default=",".join(CONTESTANTS))
    p.add_argument("--epochs", type=float, default=EPOCHS, help="fewer for a look only: the losses are then not comparable")
    p.add_argument("--backend", default="shm", choices=["shm", "torch", "auto"])
    args = p.parse_args(argv)
    sizes = [4] if args.quick else [int(n) for n in args.learners.split(",")]
    seeds = 1 if args.quick else args.seeds
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [n for n in args.competitors.split(",") if n != "single"]
    with ProcessPool(max(sizes), args.backend) as pool:
        single = run_all(pool, "single", 1, seeds, args.epochs)
        rows = [{"contestant": "single", "learners": 1, **single, "ratio": 1.0}]
        for size in sizes:
            for name in names:
                if name in ALONE and size != sizes[0]:
                    continue
                results = run_all(pool, name, 1 if name in ALONE else size, seeds, args.epochs)
                rows.append(
                    {
                        "contestant": name,
                        "learners": 1 if name in ALONE else size,
                        **results,
                        "ratio": results["loss"] / single["loss"],
                    }
                )
    report = {"results": rows, "seeds": seeds, "global_batch": GLOBAL_BATCH, "epochs": args.epochs, "rates": RATES}
    print(json.dumps(report) if args.json else table(rows))
    return 0


def batches(size: int) -> list[int]:
    """The global batch, shared out as evenly as it goes."""
    return [GLOBAL_BATCH * (r + 1) // size - GLOBAL_BATCH * r // size for r in range(size)]


def learn(context: DistributedContext, who: LearningCase, rate: float, seed: int) -> float:
    """The held-out loss that a contestant ends with."""
    settings = dict(who.settings)
    config = TrainConfig(
        strategy=who.strategy,
        topology=settings.pop("topology", "ring"),
        strategy_options=settings,
        seed=seed,
        schedule="cosine",
        warmup_epochs=0.05 * who.epochs,
        log_every_s=60.0,
        epochs=who.epochs,
        batch=batches(context.size),
        lr=rate,
        momentum=0.9,
        progress="none",
    )
    result = train(SyntheticFrames(seed=seed), context, config)
    return float(result["metrics"]["loss"]) if "metrics" in result else float("nan")


def run_all(pool: ProcessPool, name: str, size: int, seeds: int, epochs: float) -> dict[str, Any]:
    """All rates and seeds: the best rate by its median, and that median."""
    who = replace(CONTESTANTS[name], epochs=CONTESTANTS[name].epochs * epochs / EPOCHS)
    if name == "bmuf":
        who = replace(who, settings=(("K", max(2, round(16 / size))),))  # the documented choice: K L = 16
    losses: dict[float, list[float]] = {}
    for rate in RATES:
        losses[rate] = []
        for seed in range(seeds):
            try:
                results = pool.run(learn, who, rate, seed, size=size, simulate_nodes=who.simulate_nodes, timeout_s=300)[0]
            except Exception as error:  # a rate that diverges is a result: it is not the best of the three
                if "the loss is" not in str(error):
                    raise
                results = float("inf")
            losses[rate].append(results)
    medians = {rate: statistics.median(values) for rate, values in losses.items()}
    best = min(medians, key=lambda rate: medians[rate])
    by_rate = "  ".join(f"{rate:g}: {value:.4f}" for rate, value in medians.items())
    print(f"{name:<16} {size} learners  {by_rate}", file=sys.stderr, flush=True)
    return {"loss": medians[best], "rate": best, "range": [min(losses[best]), max(losses[best])], "by_rate": medians}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| contestant | learners | held-out loss (range over seeds) | best rate | ÷ single |", "|---|---|---|---|---|"]
    for r in rows:
        low, high = r["range"]
        loss = f"{r['loss']:.4f} ({low:.4f}-{high:.4f})"
        lines.append(f"| {r['contestant']} | {r['learners']} | {loss} | {r['rate']:g} | {r['ratio']:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
