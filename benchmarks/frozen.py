"""Stop one local learner with SIGSTOP, for a while and for good, and measure what the remaining learners lose.

Cases: `awhile` (--seconds, then SIGCONT), `forever`, and `lock`: stopped again and again for a moment at random instants before
it is stopped for good, so that it is likely to be stopped while it holds the lock of a shared vector. The exchanges and
gradients per second of the other learners are reported around the moment of the stop.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main, select_names
from benchmarks.fault_runs import Job
from benchmarks.faults_task import count_samples, read_records
from benchmarks.network_faults import around_fault, exchanges_per_second, per_second

CASES = {
    "awhile": "stopped for --seconds",
    "forever": "stopped for good",
    "lock": "stopped for good at a random instant, often",
}
LEARNERS, BATCH, STEP_S = 4, 16, 0.03


def main(argv: Sequence[str]) -> int:
    p = parser("frozen", __doc__, "python -m benchmarks.frozen --seconds 20 --cases awhile,forever --json")
    p.add_argument("--cases", default="awhile,forever", help="(%(default)s)")
    p.add_argument("--seconds", type=float, default=60.0, help="how long a learner is stopped (%(default)s)")
    p.add_argument("--rank", type=int, default=1, help="learner to stop (%(default)s)")
    p.add_argument("--strategy", default="adpsgd")
    p.add_argument("--tries", type=int, default=1)
    p.add_argument("--model", type=int, default=1_000_000, help="bytes of the model (%(default)s)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the runs")
    p.add_argument("--keep", type=Path, help="folder for the files of the runs; default: deleted")
    args = p.parse_args(argv)
    names = select_names(args.cases, CASES, "cases")
    fault_runs.adopt_orphans()
    fault_runs.preload()
    rng = random.Random(0)
    rows = []
    for name in names * args.tries:
        row = {"case": name, **freeze(name, args, rng)}
        rows.append(row)
        log(json.dumps({key: value for key, value in row.items() if key != "series"}))
    report = {"results": rows, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else table(rows))
    return 0 if not any(row["problems"] for row in rows) else 1


def freeze(case: str, args: Any, rng: random.Random) -> dict[str, Any]:
    """Run one case and return what happened."""
    folder = Path(tempfile.mkdtemp(prefix="frozen-"))
    run = folder / "run"
    # the remaining learners must still be training when the stopped one wakes up
    busy_s = args.seconds + 15 if case == "awhile" else 30.0
    samples, epochs = round(busy_s / STEP_S * LEARNERS * BATCH), 1.0
    settings: dict[str, Any] = {
        "task": "benchmarks.faults_task:CountedFrames",
        "task_options.records": folder / "records",
        "task_options.samples": samples,
        "task_options.held_out": 64,
        "task_options.sleep_s": STEP_S - 0.003 if case != "lock" else 0.0,
        "task_options.model_bytes": args.model,
        "strategy": args.strategy,
        "learners": LEARNERS,
        "batch": BATCH,
        "epochs": epochs,
        "lr": 0.2,
        "log_every_s": 0.25,
        "progress": "none",
        "tensorboard": "false",
        "run": run,
    }
    job = Job(
        folder, fault_runs.cli("train", "frames", *fault_runs.arguments_of(settings), *args.set), {"OMP_NUM_THREADS": "1"}
    )
    limit_s = 3 * busy_s + 90
    until = job.began + limit_s

    def begun() -> bool:
        ranks = {e["rank"] for e in fault_runs.events_of(run, "steps") if e["exchanges"]}
        return len(ranks) == LEARNERS or (args.strategy != "adpsgd" and bool(ranks))

    started = job.wait_for(begun, until, 0.1)
    job.wait_for(lambda: False, time.monotonic() + 3.0)
    pid = job.learners().get(args.rank, 0)
    stopped_at = time.time()
    if pid:
        stop(job, pid, case, args.seconds, rng, until)
    woken_at = time.time()
    finish_at = time.monotonic()
    row = job.finish(limit_s)
    row["after_s"] = round(time.monotonic() - finish_at, 2)
    row["started"] = started
    row |= results(folder, samples, epochs, args.rank, stopped_at)
    row["stopped_s"] = round(woken_at - stopped_at, 1) if case == "awhile" else None
    row["problems"] = problems(row)
    if row["problems"]:
        row["output"] = fault_runs.tail(folder / "out.txt", 8)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        shutil.move(str(folder), str(args.keep / folder.name))
        row["folder"] = str(args.keep / folder.name)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def stop(job: Job, pid: int, case: str, seconds: float, rng: random.Random, until: float) -> None:
    """Stop a process as the case says. Return at once if it stays stopped."""
    with suppress(ProcessLookupError):
        if case == "lock":
            for _ in range(40):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(rng.uniform(0.01, 0.05))
                os.kill(pid, signal.SIGCONT)
                time.sleep(rng.uniform(0.001, 0.05))
        os.kill(pid, signal.SIGSTOP)
        if case == "awhile":
            job.wait(min(time.monotonic() + seconds, until))
            os.kill(pid, signal.SIGCONT)


def results(folder: Path, samples: int, epochs: float, rank: int, stopped_at: float) -> dict[str, Any]:
    """Return what a run has left in its files."""
    run = folder / "run"
    records = [r for r in read_records(folder / "records") if r.stop - r.start <= BATCH]
    declared: dict[int, float] = {}
    for event in fault_runs.events_of(run, "lost"):
        declared.setdefault(int(event["lost"]), float(event["time"]))
    others = [r for r in range(LEARNERS) if r != rank]
    times = {r: [t.wall for t in records if t.kind == "graded" and t.rank == r] for r in range(LEARNERS)}
    return {
        "declared": sorted(declared),
        "declared_after_s": round(declared[rank] - stopped_at, 1) if rank in declared else None,
        **count_samples(records, samples, epochs, BATCH, declared),
        "steps": [len(times[r]) for r in range(LEARNERS)],
        "steps_after_waking": sum(a > b + 1 for b, a in itertools.pairwise(times[rank])),
        **around_fault(records, run, others, stopped_at),
        "series": {
            "steps": {r: per_second(times[r], stopped_at) for r in others},
            "exchanges": {r: exchanges_per_second(run, r, stopped_at) for r in others},
        },
        "model": fault_runs.model_problem(run) or "verified",
    }


def problems(row: dict[str, Any]) -> list[str]:
    """Return how an outcome differs from the expected one."""
    wrong = ["hang"] if row["hung"] else []
    if row["code"] != 0 and not row["hung"]:
        wrong.append(f"exit {row['code']}")
    if row["longest_s_without_exchange"] > 3.5:  # events are written every 0.25 s
        wrong.append(f"{row['longest_s_without_exchange']} s without an exchange")
    if row["longest_s_without_gradient"] > 1:
        wrong.append(f"{row['longest_s_without_gradient']} s without a gradient")
    if row["code"] == 0 and (row["never"] or row["only_failed"]):
        wrong.append(f"{row['never'] + row['only_failed']} samples untrained")
    if row["code"] == 0 and row["model"] != "verified":
        wrong.append(row["model"])
    if row["orphans"] or row["leaks"]:
        wrong.append("orphans or leaks")
    return wrong


def table(rows: list[dict[str, Any]]) -> str:
    names = (
        "case",
        "exit code",
        "seconds",
        "steps",
        "declared failed",
        "untrained",
        "without gradient",
        "without exchange",
        "problems",
    )
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for r in rows:
        lines.append(
            f"| {r['case']} | {r['code']} | {r['seconds']} | {r['steps']} | {r['declared']} | {r['never']} "
            f"| {r['longest_s_without_gradient']} s | {r['longest_s_without_exchange']} s | {'; '.join(r['problems'])} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
