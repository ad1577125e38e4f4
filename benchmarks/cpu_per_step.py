"""CPU seconds per step of this tree against another checkout.

Both trees train the same task with the same settings, in interleaved rounds (A B, B A, ...). CPU seconds are those of all
processes of a run, the launcher included, between two moments after start-up; the steps between them come from the events.
The ratio is the geometric mean over rounds, with a 95 % interval by bootstrap over rounds.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main, select_names
from benchmarks.fault_runs import Job
from roundelay.errors import UsageError

TICKS = os.sysconf("SC_CLK_TCK")
TASKS = {
    "frames": ("frames", {"batch": 32, "epochs": 10000}),
    "blstm": ("blstm", {"batch": 8, "epochs": 1000, "task_options.samples": 2048}),
}
"""Name -> example and settings: short steps, and steps of speech size."""


def main(argv: Sequence[str]) -> int:
    p = parser("cpu_per_step", __doc__, "python -m benchmarks.cpu_per_step --against ../before/src --rounds 10 --json")
    p.add_argument("--against", type=Path, required=True, help="folder that holds the other roundelay package")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--seconds", type=float, default=6.0, help="measured seconds of a run (%(default)s)")
    p.add_argument("--learners", type=int, default=2)
    p.add_argument("--strategies", default="adpsgd", help="(%(default)s)")
    p.add_argument("--tasks", default="frames,blstm", help="(%(default)s)")
    p.add_argument("--cores", default="", help="CPUs of the runs, such as 0,1; default: all")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the runs")
    args = p.parse_args(argv)
    trees = {"this": fault_runs.ROOT / "src", "other": args.against.resolve()}
    if not (trees["other"] / "roundelay" / "__init__.py").is_file():
        raise UsageError("the folder holds no roundelay package", where="--against", hint="name the src folder of a checkout")
    if args.cores:
        os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
    fault_runs.adopt_orphans()
    results = []
    for task in select_names(args.tasks, TASKS, "tasks"):
        for strategy in args.strategies.split(","):
            results.append({"task": task, "strategy": strategy, **compare(task, strategy, trees, args)})
            log(json.dumps({k: v for k, v in results[-1].items() if k != "rounds"}))
    report = {"results": results, "learners": args.learners, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else table(results))
    return 0


def compare(task: str, strategy: str, trees: dict[str, Path], args: Any) -> dict[str, Any]:
    """Measure all rounds of one task and return the ratio of this tree to the other."""
    rounds = []
    for number in range(args.rounds):
        order = ["this", "other"] if number % 2 == 0 else ["other", "this"]
        values = {name: measure(task, strategy, trees[name], args) for name in order}
        rounds.append(values)
        log(f"{task} {strategy} round {number + 1}: " + json.dumps(values))
    good = [r for r in rounds if all("cpu_per_step" in value for value in r.values())]
    row: dict[str, Any] = {"failed_rounds": len(rounds) - len(good), "rounds": rounds}
    if not good:
        return row
    logs = [math.log(r["this"]["cpu_per_step"] / r["other"]["cpu_per_step"]) for r in good]
    low, high = bootstrap(logs)
    for name in trees:
        values = sorted(r[name]["cpu_per_step"] for r in good)
        row[f"{name}_ms"] = round(1000 * values[len(values) // 2], 4)
    ratio = math.exp(sum(logs) / len(logs))
    return row | {"ratio": round(ratio, 4), "low": round(math.exp(low), 4), "high": round(math.exp(high), 4)}


def bootstrap(values: list[float], draws: int = 10000) -> tuple[float, float]:
    """Return the 95 % interval of the mean."""
    rng = random.Random(0)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(draws))
    return means[round(0.025 * draws)], means[round(0.975 * draws) - 1]


def measure(task: str, strategy: str, tree: Path, args: Any) -> dict[str, Any]:
    """Run one tree until enough seconds are measured, kill it, and return its CPU seconds per step."""
    folder = Path(tempfile.mkdtemp(prefix="cpu-per-step-"))
    run = folder / "run"
    example, options = TASKS[task]
    settings = {**options, "strategy": strategy, "learners": args.learners, "run": run, "lr": 0.1, "log_every_s": 0.5}
    settings |= {"checkpoint_every_epochs": 100000, "progress": "none", "tensorboard": "false"}
    call = fault_runs.command(
        sys.executable, "-m", "roundelay", "train", example, *fault_runs.arguments_of(settings), *args.set
    )
    job = Job(folder, call, {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 120 + args.seconds
    size = 1 if strategy == "single" else args.learners
    try:
        if not job.wait_for(lambda: warmed_up(run, size), until, 0.1):
            return {"error": fault_runs.tail(folder / "out.txt"), "code": job.code}
        first = (time.time(), cpu_seconds(job.pid))
        job.wait_for(lambda: False, time.monotonic() + args.seconds)
        if job.code is not None:
            return {"error": "the run ended early", "code": job.code}
        last = (time.time(), cpu_seconds(job.pid))
        time.sleep(1.2)  # an event after the second moment
        steps = sum(steps_at(run, rank, last[0]) - steps_at(run, rank, first[0]) for rank in range(size))
        seconds = last[1] - first[1]
        return {"cpu_per_step": seconds / max(steps, 1e-9), "steps_per_s": round(steps / (last[0] - first[0]), 1)}
    finally:
        job.kill()
        job.finish(0.0)
        shutil.rmtree(folder, ignore_errors=True)


def warmed_up(run: Path, size: int) -> bool:
    """Return whether every rank has written three events with steps."""
    counts: dict[int, int] = {}
    for event in fault_runs.events_of(run, "steps"):
        counts[event["rank"]] = counts.get(event["rank"], 0) + 1
    return len(counts) == size and min(counts.values()) >= 3


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and of its descendants so far."""
    total = 0
    for pid in [root, *fault_runs.descendants(root)]:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def steps_at(run: Path, rank: int, moment: float) -> float:
    """Return the steps of a rank at a moment, interpolated between its events."""
    points = [(e["time"], float(e["step"])) for e in fault_runs.events_of(run, "steps") if e["rank"] == rank]
    before = max((p for p in points if p[0] <= moment), default=points[0])
    after = min((p for p in points if p[0] > moment), default=None)
    if after is None or after[0] == before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | strategy | this, ms/step | other, ms/step | ratio (95 % interval) |", "|---|---|---|---|---|"]
    for r in rows:
        interval = f"{r['ratio']:.3f} ({r['low']:.3f}-{r['high']:.3f})" if "ratio" in r else "failed"
        lines.append(f"| {r['task']} | {r['strategy']} | {r.get('this_ms', '')} | {r.get('other_ms', '')} | {interval} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
