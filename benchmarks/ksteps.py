"""K-step averaging with learning in virtual time: what a larger K costs and saves.

The example task on 4 and on 20 learners, with equal samples: fixed K from 1 to 64, the rule of `adaptive_kstep`, ASGD at
four rates, and `single`. Reported are the held-out loss, the averages and bytes per learner, and the virtual time on a
network of 1 Gbit/s. All but ASGD use one rate, tuned for `single`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import log, parser, run_main
from benchmarks.sim_probe import LearningRun, learn, one_thread
from roundelay.engine.config import TrainConfig
from roundelay.errors import UsageError
from roundelay.log.output import markdown_table
from roundelay.simulate.cluster import Cluster, ComputeModel, LinkModel, LinkModels, MachineGroup, SpeedModel
from roundelay.testing.tasks import SyntheticFrames

FIXED = (1, 2, 4, 8, 16, 32, 64)
ASGD_RATES = (0.5, 1.0, 2.0, 4.0)
"""Times the common rate: the published finding is that ASGD needs smaller ones as learners are added."""
RATE = 1.0
TASK = SyntheticFrames(samples=2560, held_out=256, hidden=16, frames=8)
EPOCHS = 8.0
PER_LEARNER = {1: 64, 4: 16, 20: 4}
"""Batch of a learner: 64, 64 and 80 samples in all."""
ETHERNET = Cluster(
    name="ethernet",
    about="one learner per machine, 1 Gbit/s; a model of the size of the published one would take 1.4 s to send",
    learner=ComputeModel(seconds_per_sample=1e-3, jitter=SpeedModel("gaussian", 0.1)),
    link=LinkModels(between=LinkModel(1.0, 100.0)),
)


def run(size: int, strategy: str, settings: dict[str, Any], rate: float, epochs: float, seed: int) -> LearningRun:
    config = TrainConfig(
        strategy=strategy, strategy_options=settings, seed=seed, schedule="cosine", warmup_epochs=0.05 * epochs,
        log_every_s=1e9, epochs=epochs, batch=PER_LEARNER[size], lr=rate, momentum=0.9,
    )  # fmt: skip
    cluster = replace(ETHERNET, machines=(MachineGroup(size, 1),))
    return learn(cluster, replace(TASK, seed=seed), config, looks=1, seed=seed)


def main(argv: Sequence[str]) -> int:
    p = parser("ksteps", __doc__, "python -m benchmarks.ksteps --quick")
    p.add_argument("--quick", action="store_true", help="4 learners, one epoch, three K: shows that it runs")
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--learners", default="4,20", help="only these numbers of learners, such as 20")
    args = p.parse_args(argv)
    one_thread()
    sizes = [4] if args.quick else [int(n) for n in args.learners.split(",")]
    fixed = FIXED[::3] if args.quick else FIXED
    epochs = 1.0 if args.quick else EPOCHS
    if not set(sizes) <= set(PER_LEARNER) - {1}:
        raise UsageError(f"--learners {args.learners}", where="ksteps", hint="choose among 4 and 20")
    report = table(sizes, fixed, epochs, 1 if args.quick else args.seeds)
    print(json.dumps(report) if args.json else show(report))
    return 0


def contestants(fixed: Sequence[int]) -> list[tuple[str, str, dict[str, Any], float]]:
    """(name, strategy, settings, rate)."""
    rows: list[tuple[str, str, dict[str, Any], float]] = [(f"K = {K}", "kstep", {"K": K}, RATE) for K in fixed]
    rows.append(("adaptive K", "adaptive_kstep", {"K": 8}, RATE))
    rows += [(f"asgd, rate x {r:g}", "asgd", {}, RATE * r) for r in ASGD_RATES]
    return rows


def table(sizes: Sequence[int], fixed: Sequence[int], epochs: float, seeds: int) -> dict[str, Any]:
    single = [run(1, "single", {}, RATE, epochs, seed) for seed in range(seeds)]
    rows = [row_of("single", 1, RATE, single)]
    for size in sizes:
        for name, strategy, settings, rate in contestants(fixed):
            runs = [run(size, strategy, settings, rate, epochs, seed) for seed in range(seeds)]
            rows.append(row_of(name, size, rate, runs))
            log(f"{size:>3} learners  {name:<18} loss {rows[-1]['loss']:.4f}  averages {rows[-1]['averages']}")
    return {
        "results": rows,
        "verdicts": [verdict(rows, size) for size in sizes],
        "seeds": seeds,
        "epochs": epochs,
        "rate": RATE,
    }


def row_of(name: str, size: int, rate: float, runs: list[LearningRun]) -> dict[str, Any]:
    done = [m.outcome for m in runs if m.outcome is not None]
    per_learner = max(len(done), 1)
    return {
        "contestant": name,
        "learners": size,
        "rate": rate,
        "loss": sum(m.loss for m in runs) / len(runs),
        "averages": round(sum(m.averages for m in runs) / len(runs)),
        "megabytes_per_learner": sum(o.bytes_per_step * o.steps / size for o in done) / per_learner / 1e6,
        "virtual_s": sum(o.elapsed_s for o in done) / per_learner,
        "staleness": sum(o.staleness_mean for o in done) / per_learner,
    }


def verdict(rows: Sequence[dict[str, Any]], size: int) -> dict[str, Any]:
    """Is the adaptive K at most the best fixed K's loss, with no more averages?"""
    mine = [r for r in rows if r["learners"] == size]
    fixed = [r for r in mine if r["contestant"].startswith("K =")]
    adaptive = next(r for r in mine if r["contestant"] == "adaptive K")
    best = min(fixed, key=lambda r: r["loss"])
    cheaper = [r for r in fixed if r["averages"] <= adaptive["averages"]]
    return {
        "learners": size,
        "best_fixed": best["contestant"],
        "best_fixed_loss": best["loss"],
        "best_fixed_averages": best["averages"],
        "adaptive_loss": adaptive["loss"],
        "adaptive_averages": adaptive["averages"],
        "holds": adaptive["loss"] <= best["loss"] and adaptive["averages"] <= best["averages"],
        "best_fixed_loss_with_no_more_averages": min((r["loss"] for r in cheaper), default=None),
    }


def show(report: dict[str, Any]) -> str:
    head = ["", "learners", "rate", "held-out loss", "averages", "MB sent per learner", "virtual s", "staleness"]
    keys = ("contestant", "learners", "rate", "loss", "averages", "megabytes_per_learner", "virtual_s", "staleness")
    lines = [markdown_table(head, [[r[k] for k in keys] for r in report["results"]]), ""]
    for v in report["verdicts"]:
        lines.append(
            f"{v['learners']} learners: adaptive {v['adaptive_loss']:.4f} with {v['adaptive_averages']} averages; best fixed: "
            f"{v['best_fixed']} with {v['best_fixed_loss']:.4f} and {v['best_fixed_averages']}: "
            + ("at most that loss with no more averages" if v["holds"] else "not better on both counts")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
