"""Many learners of a tiny model on one machine: they start, train and leave.

For every number of learners: seconds to the first gradient and to the end, exit code, samples untrained, processes and shared
memory left behind, CPU seconds of the launcher, which serves the store, and the requests that its store has answered.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main
from benchmarks.fault_runs import Job
from benchmarks.faults_task import count_samples, read_records

BATCH = 4


def main(argv: Sequence[str]) -> int:
    p = parser("many_learners", __doc__, "python -m benchmarks.many_learners --learners 16,32,64,128 --json")
    p.add_argument("--learners", default="16,32,64,128", help="numbers of learners (%(default)s)")
    p.add_argument("--steps", type=int, default=20, help="steps per learner (%(default)s)")
    p.add_argument("--strategy", default="adpsgd")
    p.add_argument("--topology", default="random_ring")
    p.add_argument("--limit", type=float, default=600.0, help="seconds before a run counts as hung (%(default)s)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the runs")
    args = p.parse_args(argv)
    fault_runs.adopt_orphans()
    fault_runs.preload()
    rows = []
    for learners in (int(n) for n in args.learners.split(",")):
        rows.append({"learners": learners, **run_once(learners, args)})
        log(json.dumps(rows[-1]))
    report = {"results": rows, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else table(rows))
    return 0 if not any(row["problems"] for row in rows) else 1


def run_once(learners: int, args: Any) -> dict[str, Any]:
    """Train once with this number of learners and return what happened."""
    folder = Path(tempfile.mkdtemp(prefix="many-learners-"))
    run, samples = folder / "run", learners * BATCH * args.steps
    settings: dict[str, Any] = {
        "task": "benchmarks.faults_task:CountedFrames",
        "task_options.records": folder / "records",
        "task_options.samples": samples,
        "task_options.held_out": 64,
        "task_options.hidden": 4,
        "task_options.phones": 4,
        "task_options.frames": 4,
        "strategy": args.strategy,
        "topology": args.topology,
        "learners": learners,
        "batch": BATCH,
        "epochs": 1.0,
        "lr": 0.1,
        "timeout_s": 120,
        "checkpoint_every_epochs": 100,
        "progress": "none",
        "tensorboard": "false",
        "run": run,
    }
    call = fault_runs.cli("train", "frames", *fault_runs.arguments_of(settings), *args.set)
    job = Job(folder, lambda: count_store_calls(folder / "calls.txt", call), {"OMP_NUM_THREADS": "1"})
    cpu, least, until = 0.0, available_gb(), job.began + args.limit
    while job.poll() is None and time.monotonic() < until:
        cpu = max(cpu, own_cpu_seconds(job.pid))
        least = min(least, available_gb())
        time.sleep(0.1)
    row = job.finish(args.limit, 10.0)
    records = read_records(folder / "records")
    begins = [r.monotonic - job.began for r in records if r.kind == "batch"]
    row["first_gradient_s"] = round(min(begins, default=float("nan")), 2)
    row |= count_samples(records, samples, 1.0, BATCH)
    row |= {"launcher_cpu_s": round(cpu, 2), "least_available_gb": round(least, 1)}
    row["ranks_that_trained"] = len({r.rank for r in records if r.kind == "graded"})
    row["declared"] = sorted({int(e["lost"]) for e in fault_runs.events_of(run, "lost")})
    calls = int((folder / "calls.txt").read_text()) if (folder / "calls.txt").exists() else 0
    row |= {"store_calls": calls, "store_calls_per_learner": round(calls / learners, 1)}
    row["model"] = fault_runs.model_problem(run) or "verified"
    row["problems"] = [key for key in ("hung", "orphans", "leaks", "never", "declared") if row[key]]
    if row["code"] != 0:
        row["problems"].append(f"exit {row['code']}")
        row["output"] = fault_runs.tail(folder / "out.txt", 8)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def count_store_calls(path: Path, call: Callable[[], int]) -> int:
    """Run a command that serves a store; write the number of requests that its store has answered."""
    from roundelay.fleet.embedded_store import EmbeddedStore

    answer, close = EmbeddedStore._answer, EmbeddedStore.close
    calls = [0]

    def counted(*arguments: Any) -> None:
        calls[0] += 1
        answer(*arguments)

    def closed(self: EmbeddedStore) -> None:
        path.write_text(str(calls[0]))
        close(self)

    EmbeddedStore._answer, EmbeddedStore.close = counted, closed  # type: ignore[method-assign]
    return call()


def own_cpu_seconds(pid: int) -> float:
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def available_gb() -> float:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) / 1e6


def table(rows: list[dict[str, Any]]) -> str:
    keys = ("learners", "code", "seconds", "first_gradient_s", "launcher_cpu_s", "store_calls", "never", "orphans")
    lines = [f"| {' | '.join(keys)} | problems |", "|" + "---|" * (len(keys) + 1)]
    for r in rows:
        lines.append(f"| {' | '.join(str(r[key]) for key in keys)} | {'; '.join(r['problems'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
