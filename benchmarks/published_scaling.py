"""Published speed-ups, compared with simulated clusters.

Timing-only mode on the presets, whose values have sources (`roundelay list clusters --json`). One value is fitted, once for
all cells: the seconds per sample of a V100, to the published 40-fold speed-up at 5.2 hours. Four tables: speed-up over GPUs;
one slow learner of 16; rounds to agreement on the fixed and the randomized ring; flat against hierarchical.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import log, parser, run_main
from benchmarks.sim_probe import one_thread
from roundelay import topology
from roundelay.log.output import markdown_table
from roundelay.simulate import cluster as clusters
from roundelay.simulate.cluster import StragglerModel
from roundelay.simulate.run import SimulationResult, simulate_timing

PARAMETERS = 43_154_944
SAMPLES, EPOCHS = 33_860_000, 16.0
"""2000-hour Switchboard in chunks of 21 frames; the published runs take 16 epochs."""
SLOWDOWNS = (1, 2, 5, 10, 100)
SLOW_ONE = 5
RINGS = (4, 8, 16, 32, 64, 128)
DRAWS = 30


@dataclass(frozen=True)
class PublishedRun:
    """A run that was published."""

    gpus: int
    preset: str
    strategy: str
    batch: int
    hours: float | None
    about: str


RUNS = (
    PublishedRun(
        1, "v100-8x8", "single", 256, 208.0, "1 V100: derived from the 40-fold speed-up at 5.2 h; the pace is fitted to this"
    ),
    PublishedRun(16, "p100-16", "adpsgd", 160, 14.0, "16 P100, ADPSGD, global batch 2560 (Zhang et al., ICASSP 2019)"),
    PublishedRun(32, "v100-4x8", "hierarchical(adpsgd)", 128, 11.5, "32 V100, HYBRID (same paper); its batch is not published"),
    PublishedRun(64, "v100-8x8", "hierarchical(adpsgd)", 128, 5.2, "64 V100, H-ADPSGD, global batch 8192 (INTERSPEECH 2019)"),
    PublishedRun(
        64, "v100-128", "delay_by_one", 128, 2.28, "64 V100 of a POWER9 machine (ICASSP 2020); variant and batch not published"
    ),
    PublishedRun(128, "v100-128", "delay_by_one", 128, 1.98, "128 V100 of a POWER9 machine (ICASSP 2020); batch not published"),
)
COMPARED = ("sync", "adpsgd", "delay_by_one", "hierarchical(adpsgd)")


def time(preset: str, gpus: int, strategy: str, batch: int, steps: int, **more: Any) -> SimulationResult:
    cluster = clusters.load(preset).first(gpus)
    slow = more.pop("straggler", None)
    if slow is not None:
        cluster = replace(cluster, straggler=(slow,))
    return simulate_timing(
        cluster, parameters=PARAMETERS, strategy=strategy, batch=batch, steps=steps, samples=SAMPLES, epochs=EPOCHS, **more
    )


def main(argv: Sequence[str]) -> int:
    p = parser("published_scaling", __doc__, "python -m benchmarks.published_scaling --quick")
    p.add_argument("--quick", action="store_true", help="few steps per cell, no more than 16 GPUs: shows that it runs")
    args = p.parse_args(argv)
    one_thread()
    steps, most = (6, 16) if args.quick else (24, 128)
    report = {
        "speedup": speedup(steps, most),
        "straggler": straggler(steps, (1, 10)) if args.quick else straggler(5 * steps, SLOWDOWNS),
        "agreement": agreement(RINGS[:3] if args.quick else RINGS),
        "hierarchy": [] if args.quick else hierarchy(steps),
        "steps": steps,
    }
    print(json.dumps(report) if args.json else show(report))
    return 0


def speedup(steps: int, most: int) -> list[dict[str, Any]]:
    rows = []
    for run in RUNS:
        if run.gpus > most:
            continue
        for strategy in dict.fromkeys((run.strategy, *(COMPARED if run.gpus > 1 else ()))):
            outcome = time(run.preset, run.gpus, strategy, run.batch, steps)
            as_published = strategy == run.strategy
            rows.append(
                {
                    "gpus": run.gpus,
                    "cluster": run.preset,
                    "strategy": strategy,
                    "batch": run.batch,
                    "hours": outcome.hours,
                    "efficiency": outcome.efficiency,
                    "speedup": RUNS[0].hours / outcome.hours if RUNS[0].hours else None,
                    "published_hours": run.hours if as_published else None,
                    "about": run.about if as_published else "",
                }
            )
            log(
                f"{run.gpus:>4} GPUs  {strategy:<22} {outcome.hours:8.2f} h"
                + (f"  published {run.hours}" if as_published else "")
            )
    return rows


def straggler(steps: int, slowdowns: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds per epoch of the published model on 16 V100, one of them slowed. Many steps: on a ring it takes as many as there
    are learners until the last of them has felt it."""
    contestants: list[tuple[str, str, dict[str, Any]]] = [
        ("sync", "sync", {}),
        ("dpsgd", "dpsgd", {}),
        ("delay_by_one", "delay_by_one", {}),
        ("kstep, K = 8", "kstep", {"strategy_options": {"K": 8}}),
        ("adpsgd, ring", "adpsgd", {}),
        ("adpsgd, random_ring", "adpsgd", {"topology": "random_ring"}),
    ]
    rows = []
    for name, strategy, more in contestants:
        seconds = {}
        for factor in slowdowns:
            slow = StragglerModel(float(factor), learner=SLOW_ONE) if factor > 1 else None
            seconds[str(factor)] = SAMPLES / time("v100-8x8", 16, strategy, 128, steps, straggler=slow, **more).samples_per_s
        times = {k: v / seconds["1"] for k, v in seconds.items()}
        rows.append({"contestant": name, "epoch_s": seconds, "times": times})
        log(f"straggler  {name:<20} " + "  ".join(f"x{k}: {v:.2f}" for k, v in times.items()))
    return rows


def agreement(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Rounds until the spread of the worst start is down to 1 %, counted by playing the rounds, and by the closed forms."""
    rows = []
    for size in sizes:
        ring_c = math.cos(2 * math.pi / size) ** 2
        random_c = 0.5 - 0.5 / (size - 1)
        second = (1 + 2 * math.cos(2 * math.pi / size)) / 3
        rows.append(
            {
                "learners": size,
                "T1_closed_form": math.ceil(math.log(0.01) / math.log(second)),
                "ring_played": played("ring", size, 0),
                "ring_closed_form": math.ceil(2 * math.log(0.01) / math.log(ring_c)) if ring_c > 1e-12 else 2,
                "random_played": float(np.mean([played("random_ring", size, seed) for seed in range(DRAWS)])),
                "random_closed_form": math.ceil(2 * math.log(0.01) / math.log(random_c)),
            }
        )
        log(f"agreement  {rows[-1]}")
    return rows


def played(name: str, size: int, seed: int) -> int:
    """Rounds of pairs on the slowest start (a wave around the ring) until the spread is down to 1 %."""
    w = np.cos(2 * np.pi * (np.arange(size) + 0.5) / size)
    start, rounds = float(np.linalg.norm(w)), 0
    while np.linalg.norm(w) > 0.01 * start:
        w = (w + w[topology.matching(name, rounds, size, seed)]) / 2
        rounds += 1
    return rounds


def hierarchy(steps: int) -> list[dict[str, Any]]:
    """Flat against hierarchical on 8 machines with 8 GPUs."""
    rows = []
    for strategy, batch in ((s, b) for b in (128, 32) for s in ("sync", "adpsgd", "hierarchical(adpsgd)")):
        outcome = time("v100-8x8", 64, strategy, batch, steps)
        workers = 8 if strategy.startswith("hier") else 64
        rows.append(
            {
                "strategy": strategy,
                "batch": batch,
                "epoch_h": outcome.hours / EPOCHS,
                "efficiency": outcome.efficiency,
                "megabytes_per_step": outcome.bytes_per_step / 1e6,
                "gap": topology.gap("ring", workers) if strategy != "sync" else 1.0,
                "staleness": outcome.staleness_mean,
            }
        )
        log(f"hierarchy  batch {batch:>3} {strategy:<22} {outcome.hours / EPOCHS:.3f} h per epoch")
    return rows


def show(report: dict[str, Any]) -> str:
    one = [
        [r["gpus"], r["cluster"], r["strategy"], r["batch"], r["hours"], r["published_hours"], r["speedup"], r["efficiency"]]
        for r in report["speedup"]
    ]
    factors = list(report["straggler"][0]["epoch_s"])
    two = [[r["contestant"], r["epoch_s"]["1"], *(r["times"][k] for k in factors[1:])] for r in report["straggler"]]
    keys = ("learners", "T1_closed_form", "ring_played", "ring_closed_form", "random_played", "random_closed_form")
    four = [
        [r[k] for k in ("strategy", "batch", "epoch_h", "efficiency", "megabytes_per_step", "gap")] for r in report["hierarchy"]
    ]
    return "\n\n".join(
        [
            markdown_table(["GPUs", "cluster", "strategy", "batch", "hours", "published", "speed-up", "efficiency"], one),
            markdown_table(["one of 16 slowed", "s per epoch", *(f"x{k}" for k in factors[1:])], two),
            markdown_table(["learners", "T_1", "ring, played", "ring, formula", "random, played", "random, formula"],
                     [[r[k] for k in keys] for r in report["agreement"]]),
            markdown_table(["8 x 8 GPUs", "batch", "h per epoch", "efficiency", "MB per learner and step", "gap"], four),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    run_main(main)
