"""Seconds of a run with one slow learner, against the ideal.

Gradients sleep, so that the cores are not the limit: --step seconds, and `--slowdown` times as long on the last rank. The ideal
time is what a perfect division of the samples would take with the measured steps. A run should end within the ideal time plus
one batch of the slow learner plus 0.3 s.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main
from benchmarks.fault_runs import Job
from benchmarks.faults_task import count_samples, read_records

BATCH, SPARE_S = 16, 0.3


def main(argv: Sequence[str]) -> int:
    p = parser("straggler_tail", __doc__, "python -m benchmarks.straggler_tail --slowdown 30 --runs 3 --json")
    p.add_argument("--learners", type=int, default=4)
    p.add_argument("--slowdown", type=float, default=30.0)
    p.add_argument("--step", type=float, default=0.03, help="seconds of a gradient of a normal learner (%(default)s)")
    p.add_argument("--seconds", type=float, default=6.5, help="length of an ideal run (%(default)s)")
    p.add_argument("--strategy", default="adpsgd")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the runs")
    args = p.parse_args(argv)
    fault_runs.adopt_orphans()
    fault_runs.preload()
    rows = []
    for _ in range(args.runs):
        rows.append(run_once(args))
        log(json.dumps(rows[-1]))
    report = {"results": rows, "slowdown": args.slowdown, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else table(rows))
    return 0 if not any(row["problems"] for row in rows) else 1


def run_once(args: Any) -> dict[str, Any]:
    """Train once; return the seconds from the first gradient to the last, and what they should have been."""
    folder = Path(tempfile.mkdtemp(prefix="straggler-tail-"))
    fast, slow_s = args.learners - 1, args.step * args.slowdown
    batches = round(args.seconds * (fast / args.step + 1 / slow_s))
    settings: dict[str, Any] = {
        "task": "benchmarks.faults_task:CountedFrames",
        "task_options.records": folder / "records",
        "task_options.samples": batches * BATCH,
        "task_options.held_out": 64,
        "task_options.sleep_s": args.step,
        "task_options.slow": f"{args.learners - 1}:{slow_s}",
        "strategy": args.strategy,
        "learners": args.learners,
        "batch": BATCH,
        "epochs": 1.0,
        "lr": 0.2,
        "checkpoint_every_epochs": 100,
        "progress": "none",
        "tensorboard": "false",
        "run": folder / "run",
    }
    job = Job(
        folder, fault_runs.cli("train", "frames", *fault_runs.arguments_of(settings), *args.set), {"OMP_NUM_THREADS": "1"}
    )
    row = job.finish(10 * args.seconds + 90)
    records = [r for r in read_records(folder / "records") if r.stop - r.start <= BATCH]
    row |= count_samples(records, batches * BATCH, 1.0, BATCH)
    steps = {rank: [r.monotonic for r in records if r.kind == "batch" and r.rank == rank] for rank in range(args.learners)}
    ends = [r.monotonic for r in records if r.kind == "graded"]
    evaluations = [r.monotonic for r in records if r.kind == "evaluate"]
    row["steps"] = [len(times) for times in steps.values()]
    row["problems"] = [] if row["code"] == 0 and not row["never"] else [f"exit {row['code']}, {row['never']} untrained"]
    if ends and all(len(times) > 1 for times in list(steps.values())[:-1]):
        lengths = [statistics.median(b - a for a, b in itertools.pairwise(times)) for times in list(steps.values())[:-1]]
        slow_times = steps[args.learners - 1]
        slow_s = statistics.median(b - a for a, b in itertools.pairwise(slow_times)) if len(slow_times) > 1 else slow_s
        began = min(times[0] for times in steps.values() if times)
        ideal = batches / (sum(1 / length for length in lengths) + 1 / slow_s)
        # the final evaluation begins when all gradients are done and the average is known
        row["trained_s"] = round(max(ends) - began, 2)
        row["until_evaluation_s"] = round(max(evaluations, default=max(ends)) - began, 2)
        row |= {"ideal_s": round(ideal, 2), "slow_batch_s": round(slow_s, 2), "accepted_s": round(ideal + slow_s + SPARE_S, 2)}
        if row["until_evaluation_s"] > row["accepted_s"]:
            row["problems"].append(f"{row['until_evaluation_s']} s, accepted {row['accepted_s']} s")
    if row["problems"]:
        row["output"] = fault_runs.tail(folder / "out.txt")
    shutil.rmtree(folder, ignore_errors=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    names = ("exit code", "training s", "until the final evaluation s", "ideal s", "accepted s", "steps", "problems")
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for r in rows:
        cells = [r.get(key, "") for key in ("code", "trained_s", "until_evaluation_s", "ideal_s", "accepted_s", "steps")]
        lines.append(f"| {' | '.join(map(str, cells))} | {'; '.join(r['problems'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
