"""Kill one learner at each of its store calls in turn, before and after the call, and check what is left.

Every step of the protocols of start, leases, checkpoints, failure reports and finishing is a store call, so a death at each of
them is a death at each step. With `--second` another learner has been killed before, and the calls are counted from the moment
at which the victim knows of that failure or reports it.

A run is right if it ends with exit code 0, a verified model and no untrained sample, or, while learners still start, with exit
code 4 within 15 s. No run hangs, leaves a process, or leaks shared memory.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main
from benchmarks.fault_runs import Job
from benchmarks.faults_task import count_samples, read_records
from benchmarks.kill_matrix import STARTUP_LIMIT_S, totals

BATCH, SAMPLES, EPOCHS = 16, 240, 2.0
WHEN = ("before", "after")
FIRST_DEATH_AFTER = 8
"""Store calls between the first lease of the learner that dies first, with `--second`, and its death."""


def main(argv: Sequence[str]) -> int:
    p = parser("kill_calls", __doc__, "python -m benchmarks.kill_calls --ranks 0,2 --json")
    p.add_argument("--strategy", default="adpsgd")
    p.add_argument("--learners", type=int, default=3)
    p.add_argument("--ranks", default="0,2", help="victims (%(default)s)")
    p.add_argument("--second", action="store_true", help="rank 1 dies first")
    p.add_argument("--step", type=int, default=1, help="calls between two deaths (%(default)s)")
    p.add_argument("--first", type=int, default=1, help="first call to die at (%(default)s)")
    p.add_argument("--most", type=int, default=400, help="last call to die at (%(default)s)")
    p.add_argument("--limit", type=float, default=60.0, help="seconds before a run counts as hung (%(default)s)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the runs")
    p.add_argument("--keep", type=Path, help="folder for the files of runs with a wrong outcome; default: deleted")
    args = p.parse_args(argv)
    fault_runs.adopt_orphans()
    fault_runs.preload()
    rows: list[dict[str, Any]] = []
    for rank in (int(text) for text in args.ranks.split(",")):
        survived = 0
        for number in range(args.first, args.most + 1, args.step):
            row = kill_once(rank, number, WHEN[number // args.step % 2], args)
            rows.append(row)
            log(json.dumps(row))
            survived = survived + 1 if row["late"] else 0
            if survived == 2:  # the run has fewer calls
                break
    report = {"totals": totals(rows), "runs": rows, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else json.dumps(report["totals"], indent=1))
    return 0 if not report["totals"]["wrong"] else 1


def die_at(rank: int, number: int, when: str, note: Path, counts: Callable[[str, Any, Any], bool]) -> None:
    """Make a rank kill itself at its `number`-th store call since `counts(operation, arguments, reply)` was true.

    Call it before the learners are forked. All threads of the rank count, that of the heartbeats too.
    """
    from roundelay.fleet.store_client import StoreClient

    original, lock, calls = StoreClient.call, threading.Lock(), itertools.count(1)
    counting: list[bool] = []

    def die(operation: str) -> None:
        note.write_text(f"{time.monotonic()} {operation}")
        os.kill(os.getpid(), signal.SIGKILL)

    def call(self: StoreClient, operation: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        if os.environ.get("RANK") != str(rank):
            return original(self, operation, *arguments, wait_s=wait_s)
        with lock:
            if not counting and counts(operation, arguments, None):
                counting.append(True)
            now = bool(counting) and next(calls) == number
        if now and when == "before":
            die(operation)
        reply = original(self, operation, *arguments, wait_s=wait_s)
        if now:
            die(operation)
        if not counting and counts(operation, arguments, reply):
            counting.append(True)
        return reply

    StoreClient.call = call  # type: ignore[method-assign]


def concerns_a_lease(operation: str, arguments: Any, reply: Any) -> bool:
    """Return whether a store call writes a lease: its rank has begun to train."""
    return operation == "compare_and_set" and any("lease/" in key for key in arguments[0])


def concerns_a_failure(operation: str, arguments: Any, reply: Any) -> bool:
    """Return whether a store call reports a failure, or its reply contains one."""
    if operation == "compare_and_set" and any("failed/" in key for key in arguments[0]):
        return True
    return isinstance(reply, dict) and any("failed/" in key and value is not None for key, value in reply.items())


def kill_once(rank: int, number: int, when: str, args: Any) -> dict[str, Any]:
    """Run once and return what happened."""
    folder = Path(tempfile.mkdtemp(prefix="kill-calls-"))
    settings: dict[str, Any] = {
        "task": "benchmarks.faults_task:CountedFrames",
        "task_options.records": folder / "records",
        "task_options.samples": SAMPLES,
        "task_options.held_out": 16,
        "task_options.sleep_s": 0.02 if args.second else 0.005,
        "strategy": args.strategy,
        "learners": args.learners,
        "batch": BATCH,
        "epochs": EPOCHS * (2 if args.second else 1),
        "lr": 0.2,
        "checkpoint_every_epochs": 0.5,
        "timeout_s": 15,
        "progress": "none",
        "tensorboard": "false",
        "run": folder / "run",
    }
    arguments = ["train", "frames", *fault_runs.arguments_of(settings), *args.set]
    folder.mkdir(exist_ok=True)

    def run() -> int:
        if args.second:
            die_at(1, FIRST_DEATH_AFTER, "after", folder / "first", concerns_a_lease)
        die_at(rank, number, when, folder / "died", concerns_a_failure if args.second else lambda *_: True)
        return fault_runs.cli(*arguments)()

    job = Job(folder, run, {"OMP_NUM_THREADS": "1"})
    row = job.finish(args.limit)
    records = [r for r in read_records(folder / "records") if r.stop - r.start <= BATCH]
    epochs = EPOCHS * (2 if args.second else 1)
    died = (folder / "died").read_text().split() if (folder / "died").exists() else []
    first = min((r.monotonic for r in records if r.kind == "batch"), default=float("inf"))
    failed: dict[int, float] = {}
    for event in fault_runs.events_of(folder / "run", "lost"):
        failed.setdefault(int(event["lost"]), float(event["time"]))
    row |= {"rank": rank, "call": number, "when": when, "operation": died[1] if died else "", "late": not died}
    row |= {"starting": bool(died) and float(died[0]) < first, "killed": [rank] * bool(died), "declared": sorted(failed)}
    row["after_kill_s"] = round(job.began + row["seconds"] - float(died[0]), 2) if died else 0.0
    row |= count_samples(records, SAMPLES, epochs, BATCH, failed)
    row["model"] = fault_runs.model_problem(folder / "run") or "verified"
    row["problems"] = problems(row)
    if row["problems"]:
        row["output"] = fault_runs.tail(folder / "out.txt", 8)
    if row["problems"] and args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            row["folder"] = shutil.move(str(folder), str(args.keep / folder.name))
    shutil.rmtree(folder, ignore_errors=True)
    return row


def problems(row: dict[str, Any]) -> list[str]:
    """Return how an outcome differs from the expected one."""
    wrong = [name for name, value in (("hang", row["hung"]), ("orphans", row["orphans"]), ("leak", row["leaks"])) if value]
    if row["code"] == 0:
        if row["model"] != "verified":
            wrong.append(f"exit 0: {row['model']}")
        if row["never"] or row["only_failed"]:
            wrong.append("exit 0: untrained samples")
    elif not row["hung"]:
        in_time = row["starting"] and row["code"] == 4 and row["after_kill_s"] <= STARTUP_LIMIT_S
        wrong += [] if in_time else [f"exit {row['code']} after {row['after_kill_s']} s"]
    return wrong


if __name__ == "__main__":
    run_main(main)
