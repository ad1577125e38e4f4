"""Held-out loss with more learners than cores, on the demo's features.

A learner of a time-sliced run is descheduled again and again, and an asynchronous strategy must average all the same. The
exchanges per gradient and the gradients in a row without an exchange show whether it does, the held-out loss what it costs.

Setting: 1,200 synthesized utterances, the `small` LSTM with 96 units, windows of 30 frames with 10 on both sides, 3 epochs,
global batch 64, SGD with momentum 0.9, cosine schedule, warm-up of 0.2 epochs, no clipping, no straggler. The features are
computed once, in --features, and kept there.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main

GLOBAL_BATCH = 64
SETTINGS = {
    "epochs": 3.0,
    "optimizer": "sgd",
    "momentum": 0.9,
    "schedule": "cosine",
    "warmup_epochs": 0.2,
    "max_grad_norm": 0.0,
    "straggler": "",
}
LIMIT_S = 240.0
LONG_RUN = 4
"""Gradients in a row without an exchange that are still good."""


def main(argv: Sequence[str]) -> int:
    p = parser("time_sliced", __doc__, "python -m benchmarks.time_sliced --learners 4,8 --runs 5 --json")
    p.add_argument("--features", type=Path, default=Path("/tmp/rdl-demo"), help="folder of the features (%(default)s)")
    p.add_argument("--learners", default="4", help="numbers of learners (%(default)s)")
    p.add_argument("--strategies", default="adpsgd", help="strategies, such as adpsgd,sync (%(default)s)")
    p.add_argument("--topology", default="ring")
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--rate", type=float, default=1.0)
    p.add_argument("--cores", default="", help="CPUs that the learners share, such as 0,1; default: all")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the run")
    p.add_argument("--no-record", action="store_true", help="do not record the order of updates")
    p.add_argument("--only-features", action="store_true", help="compute the features and stop")
    args = p.parse_args(argv)
    if args.cores:
        os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
    file = configuration(args.features)
    if args.only_features:
        return 0
    fault_runs.adopt_orphans()
    fault_runs.preload()
    rows = []
    for number in range(args.runs):  # interleaved: a slow minute of the machine hits every case
        for learners in (int(n) for n in args.learners.split(",")):
            for strategy in args.strategies.split(","):
                row = {"strategy": strategy, "learners": learners, "run": number, **train(file, strategy, learners, args)}
                rows.append(row)
                log(json.dumps(row))
    report = {"results": summary(rows), "runs": rows, "rate": args.rate, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else table(report["results"]))
    return 0


def configuration(folder: Path) -> Path:
    """Compute the features and alignments if they are missing. Return the file with the settings of a training run."""
    from roundelay import config
    from roundelay.recipes import config as recipe_config
    from roundelay.recipes.demo import DEMO_STAGES, RECIPE
    from roundelay.recipes.network_stage import training_config
    from roundelay.recipes.pipeline import run_stages
    from roundelay.recipes.pipeline_context import PipelineContext

    recipe = recipe_config.load(RECIPE, [])
    context = PipelineContext(recipe, folder, jobs=os.cpu_count() or 1, progress="none")
    folder.mkdir(parents=True, exist_ok=True)
    run_stages(context, DEMO_STAGES, "align")
    settings = {key: value for key, value in recipe.train.items() if key not in ("learners", "batch", "lr")} | SETTINGS
    train_config = training_config(context, settings, context.layout.alignments(), recipe.seed)
    file = folder / "time_sliced.toml"
    partial = folder / f".time_sliced-{os.getpid()}"
    partial.write_text(config.dumps(train_config), encoding="utf-8")
    partial.replace(file)
    return file


def train(file: Path, strategy: str, learners: int, args: Any) -> dict[str, Any]:
    """Train once and return loss, exchanges and speed."""
    folder = Path(tempfile.mkdtemp(prefix="time-sliced-"))
    run = folder / "run"
    settings = {"strategy": strategy, "learners": learners, "batch": GLOBAL_BATCH // learners, "lr": args.rate, "run": run}
    settings |= {"topology": args.topology, "progress": "none", "tensorboard": "false", "checkpoint_every_epochs": 100}
    if strategy == "adpsgd" and not args.no_record:
        settings["record_order"] = "true"
    call = fault_runs.cli("train", str(file), *fault_runs.arguments_of(settings), *args.set)
    job = fault_runs.Job(folder, call, {"OMP_NUM_THREADS": "1"})
    row = job.finish(LIMIT_S)
    if row["code"] != 0:
        return {**row, "output": fault_runs.tail(folder / "out.txt"), "folder": str(folder)}
    for key in ("orphans", "rest_s", "leaks", "hung"):
        row.pop(key)
    final = [e for e in fault_runs.events_of(run, "evaluation") if e.get("final")]
    row["loss"] = round(final[-1]["metrics"]["loss"], 4) if final else None
    row |= mixing(fault_runs.events_of(run, "summary"))
    if (run / "record").is_dir():
        row["recorded"] = recorded_runs(run / "record")
    shutil.rmtree(folder, ignore_errors=True)
    return row


def mixing(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the summaries of all learners say about exchanges. Numbers that newer versions add are kept by learner."""
    steps = sum(e.get("steps", 0) for e in summaries)
    exchanges = sum(e.get("exchanges", 0) for e in summaries)
    elapsed = max((e["elapsed_s"] for e in summaries), default=0.0)
    row: dict[str, Any] = {
        "gradients": round(steps),
        "exchanges": round(exchanges),
        "exchanges_per_gradient": round(exchanges / max(steps, 1), 3),
        "samples_per_s": round(sum(e["samples"] for e in summaries) / max(elapsed, 1e-9)),
        "staleness_mean": round(statistics.mean([e["staleness_mean"] for e in summaries] or [0.0]), 3),
        "staleness_max": max((int(k) for e in summaries for k in e["staleness"]), default=0),
    }
    extra = sorted({key for e in summaries for key in e if "without" in key or "between" in key or "gap" in key})
    return row | {key: [e.get(key) for e in summaries] for key in extra}


def recorded_runs(folder: Path) -> dict[str, Any]:
    """Return exchanges per gradient and the gradients in a row between exchanges, from the recorded order of every vector."""
    from roundelay.core.update_log import FIELDS, Op

    parts = [np.frombuffer(path.read_bytes(), dtype="<i8") for path in sorted(folder.glob("rank-*.bin"))]
    rows = np.concatenate([part[: len(part) // FIELDS * FIELDS].reshape(-1, FIELDS) for part in parts])
    rows = rows[rows[:, 0] != Op.STEP]
    gradients = exchanges = 0
    lengths: list[int] = []
    for vector in np.unique(rows[:, 1]):
        mine = rows[rows[:, 1] == vector]
        length = 0
        for op in mine[np.argsort(mine[:, 2], kind="stable"), 0]:
            if op == Op.UPDATE:
                gradients, length = gradients + 1, length + 1
            elif op in (Op.PAIR_AVERAGE, Op.APPLY_HALF_DIFF):
                exchanges += 1
                lengths.append(length)
                length = 0
        lengths.append(length)
    runs = np.array([length for length in lengths if length] or [0])
    return {
        "exchanges_per_gradient": round(exchanges / max(gradients, 1), 3),
        "longest_run": int(runs.max()),
        "run_p99": float(np.percentile(runs, 99)),
        "share_of_runs_within_4": round(float((runs <= LONG_RUN).mean()), 4),
        "share_of_gradients_in_runs_within_4": round(float(runs[runs <= LONG_RUN].sum() / max(runs.sum(), 1)), 4),
        "exchanges_without_gradient": round(1 - len(runs) / max(len(lengths), 1), 3),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of every case."""
    result = []
    for case in dict.fromkeys((r["strategy"], r["learners"]) for r in rows):
        own = [r for r in rows if (r["strategy"], r["learners"]) == case]
        done = [r for r in own if r.get("loss") is not None]
        if not done:
            result.append({"strategy": case[0], "learners": case[1], "runs": 0, "failed": len(own)})
            continue
        losses = sorted(r["loss"] for r in done)
        row = {"strategy": case[0], "learners": case[1], "runs": len(done), "failed": len(own) - len(done)}
        row |= {"loss": statistics.median(losses), "losses": losses}
        for key in ("exchanges_per_gradient", "samples_per_s"):
            row[key] = statistics.median(r[key] for r in done)
        records = [r["recorded"] for r in done if "recorded" in r]
        if records:
            row["longest_run"] = max(r["longest_run"] for r in records)
            row["share_of_runs_within_4"] = statistics.median(r["share_of_runs_within_4"] for r in records)
        result.append(row)
    return result


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| strategy | learners | held-out loss, median (range) | exchanges/gradient | longest run | runs within 4 | samples/s |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for r in rows:
        if not r["runs"]:
            lines.append(f"| {r['strategy']} | {r['learners']} | failed | | | | |")
            continue
        spread = f"{r['loss']:.3f} ({r['losses'][0]:.3f}-{r['losses'][-1]:.3f})"
        share = f"{r['share_of_runs_within_4']:.1%}" if "longest_run" in r else ""
        lines.append(
            f"| {r['strategy']} | {r['learners']} | {spread} | {r['exchanges_per_gradient']:.2f} | {r.get('longest_run', '')} "
            f"| {share} | {r['samples_per_s']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(fault_runs.ROOT))
    run_main(main)
