"""Kill learners with SIGKILL in every phase of a run, for every strategy, and check what is left.

A case is STRATEGY/PHASE/VICTIM. Phases: startup (before the first gradient), training, saving (a checkpoint is being written),
evaluation (inside the task's evaluation), final (after the last gradient). Victims: one, two (at once), rank0, launcher.

Expected: strategies that survive failures end with exit code 0, a verified model and no untrained sample, or, after a kill
during start-up, with exit code 4 within 15 s. All other strategies end with exit code 4. After the death of the launcher its
learners exit. No run hangs, leaves a process, or leaks shared memory. A kill that came after the end counts as `late`.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main
from benchmarks.fault_runs import Job
from benchmarks.faults_task import count_samples, read_records

PHASES = ("startup", "training", "saving", "evaluation", "final")
VICTIMS = ("one", "two", "rank0", "launcher")
HIERARCHIES = ("hierarchical(adpsgd)", "hierarchical(sync)", "hierarchical(kstep)")
LEARNERS, BATCH, SAMPLES, EPOCHS = 4, 16, 768, 3.0
STARTUP_LIMIT_S = 15.0
LAUNCHER_GRACE_S = 20.0


def main(argv: Sequence[str]) -> int:
    p = parser("kill_matrix", __doc__, "python -m benchmarks.kill_matrix --only '^adpsgd/' --tries 2 --json")
    p.add_argument("--tries", type=int, default=1, help="kills per case (%(default)s)")
    p.add_argument("--only", default="", metavar="REGEX", help="cases to run, such as 'adpsgd/startup'")
    p.add_argument("--most", type=int, default=0, help="stop after N runs, spread over all cases; 0: no limit")
    p.add_argument("--limit", type=float, default=60.0, help="seconds before a run counts as hung (%(default)s)")
    p.add_argument("--timeout", type=float, default=15.0, help="timeout_s of the runs (%(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the runs")
    p.add_argument("--keep", type=Path, help="folder for the files of runs with a wrong outcome; default: deleted")
    p.add_argument("--list", action="store_true", help="print the cases and stop")
    args = p.parse_args(argv)
    cases = [case for case in all_cases() if re.search(args.only, case)]
    if args.list:
        print("\n".join(cases))
        return 0
    rng = random.Random(args.seed)
    rng.shuffle(cases)
    plan = (cases * args.tries)[: args.most or None]
    fault_runs.adopt_orphans()
    fault_runs.preload()
    rows: list[dict[str, Any]] = []
    startup: dict[str, float] = {}
    for number, case in enumerate(plan):
        row = {"case": case, **kill_once(case, args, rng, startup)}
        rows.append(row)
        log(f"{number + 1}/{len(plan)} {json.dumps(row)}")
    report = {"totals": totals(rows), "runs": rows, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else table(report))
    return 0 if not report["totals"]["wrong"] else 1


def strategies() -> list[str]:
    from roundelay.strategies import STRATEGIES

    return [name for name in STRATEGIES if name not in ("single", "hierarchical")] + list(HIERARCHIES)


def all_cases() -> list[str]:
    """Return the names of all cases: a strategy with one learner has a launcher only."""
    return [f"{name}/{phase}/{victim}" for name in strategies() for phase in PHASES for victim in VICTIMS]


def survives(strategy: str) -> bool:
    from roundelay.engine.config import TrainConfig
    from roundelay.engine.learner import build_strategy

    return bool(build_strategy(TrainConfig(strategy=strategy)).traits.survives_failures)


def settings_of(strategy: str, folder: Path, args: Any) -> list[str]:
    settings: dict[str, Any] = {
        "task": "benchmarks.faults_task:CountedFrames",
        "task_options.records": folder / "records",
        "task_options.samples": SAMPLES,
        "task_options.held_out": 64,
        "task_options.sleep_s": 0.01,
        "task_options.evaluate_s": 0.15,
        "strategy": strategy,
        "learners": LEARNERS,
        "batch": BATCH,
        "epochs": EPOCHS,
        "lr": 0.2,
        "checkpoint_every_epochs": 0.5,
        "timeout_s": args.timeout,
        "progress": "none",
        "tensorboard": "false",
        "run": folder / "run",
    }
    if strategy.startswith("hierarchical"):
        settings["simulate_nodes"] = 2
    return ["train", "frames", *fault_runs.arguments_of(settings), *args.set]


class Watch:
    """What a running job has done so far, from the records of its task and the files of its run."""

    def __init__(self, folder: Path) -> None:
        self.records, self.checkpoints = folder / "records", folder / "run" / "ckpt"
        self._offsets: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()
        self.samples = 0
        self.latest: dict[str, tuple[int, int]] = {}
        """Kind -> process id and rank of the latest record."""

    def read(self) -> None:
        """Read the records written since the last call."""
        with suppress(OSError):
            for path in self.records.iterdir():
                with open(path, "rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._offsets[path] = self._offsets.get(path, 0) + len(whole)
                for line in whole.decode().splitlines():
                    kind, rank, _, start, stop = line.split()[:5]
                    self.counts[kind] += 1
                    self.latest[kind] = (int(path.stem), int(rank))
                    if kind == "graded" and int(stop) - int(start) <= BATCH:
                        self.samples += int(stop) - int(start)

    def trained(self, samples: float) -> bool:
        self.read()
        return self.samples >= samples

    def begun(self, kind: str, count: int) -> bool:
        self.read()
        return self.counts[kind] >= count

    def is_saving(self) -> bool:
        with suppress(OSError):
            return any(name.startswith(".") for name in os.listdir(self.checkpoints))
        return False


def kill_once(case: str, args: Any, rng: random.Random, startup: dict[str, float]) -> dict[str, Any]:
    """Run one case and return what happened."""
    strategy, phase, victim = case.split("/")
    folder = Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    job = Job(folder, fault_runs.cli(*settings_of(strategy, folder, args)), {"OMP_NUM_THREADS": "1"})
    watch, until = Watch(folder), job.began + args.limit
    victims = choose(victim, rng)
    reached = wait_for_phase(job, watch, phase, until, rng, startup)
    pids = {-1: job.pid} | job.learners()
    moment, killed_at = time.time(), time.monotonic()
    killed = []
    for rank in victims:
        with suppress(KeyError, ProcessLookupError):
            if job.poll() is None:
                os.kill(pids[rank], signal.SIGKILL)
                killed.append(rank)
    row = job.finish(args.limit, LAUNCHER_GRACE_S if victim == "launcher" else 3.0)
    row["after_kill_s"] = round(max(0.0, job.began + row["seconds"] - killed_at), 2)
    run = folder / "run"
    failed = {}
    for event in fault_runs.events_of(run, "lost"):
        failed.setdefault(int(event["lost"]), float(event["time"]))
    row |= {"killed": killed, "reached": reached, "declared": sorted(failed)}
    row["late"] = not killed or not reached
    row |= count_samples(read_records(folder / "records"), SAMPLES, EPOCHS, BATCH, failed)
    row["model"] = fault_runs.model_problem(run) or "verified"
    row["samples_at_kill"] = watch.samples
    row["problems"] = problems(row, strategy, phase, victim)
    if row["problems"]:
        row["output"] = fault_runs.tail(folder / "out.txt", 8)
        row["killed_wall"] = round(moment, 3)
    if row["problems"] and args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        row["folder"] = str(args.keep / folder.name)
        shutil.move(str(folder), row["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    return row


def choose(victim: str, rng: random.Random) -> list[int]:
    """Return the ranks to kill; -1 is the launcher."""
    if victim == "launcher":
        return [-1]
    if victim == "rank0":
        return [0]
    return rng.sample(range(1 if victim == "one" else 0, LEARNERS), 1 if victim == "one" else 2)


def wait_for_phase(job: Job, watch: Watch, phase: str, until: float, rng: random.Random, startup: dict[str, float]) -> bool:
    """Wait until a run is at a random moment of a phase. Return False if it was not seen."""
    total = SAMPLES * EPOCHS
    if not job.wait_for(lambda: len(job.learners()) == LEARNERS, until, 0.001):
        return False
    if phase == "startup":
        began = time.monotonic()
        wait_s = rng.uniform(0, startup.get("s", 1.0))
        job.wait_for(lambda: watch.begun("batch", 1), began + wait_s)
        return not watch.begun("batch", 1)
    forked = time.monotonic()
    if not job.wait_for(lambda: watch.begun("batch", 1), until):
        return False
    startup["s"] = 0.7 * startup.get("s", time.monotonic() - forked) + 0.3 * (time.monotonic() - forked)
    if phase == "training":
        share = rng.uniform(0.05, 0.85)
        return job.wait_for(lambda: watch.trained(share * total), until)
    if phase == "saving":
        late = rng.uniform(0, 0.7) * total
        return job.wait_for(lambda: watch.trained(late), until) and job.wait_for(watch.is_saving, until, 0.0005)
    if phase == "evaluation":
        late = rng.uniform(0, 0.6) * total
        if not job.wait_for(lambda: watch.trained(late), until):
            return False
        count = watch.counts["evaluate"] + 1
        seen = job.wait_for(lambda: watch.begun("evaluate", count), until)
        time.sleep(rng.uniform(0, 0.1))
        return seen and job.poll() is None
    # final: the last gradients are done, or another rank does them; the final evaluation is part of the phase
    seen = job.wait_for(lambda: watch.trained(total - LEARNERS * BATCH), until)
    deadline = time.monotonic() + rng.uniform(0.0, 0.35)
    job.wait_for(lambda: False, min(deadline, until))
    return seen and job.poll() is None


def problems(row: dict[str, Any], strategy: str, phase: str, victim: str) -> list[str]:
    """Return how an outcome differs from the expected one."""
    wrong = []
    if row["hung"]:
        wrong.append("hang")
    if row["orphans"]:
        wrong.append("orphans")
    if row["leaks"]:
        wrong.append("leak")
    if row["code"] == 0:
        if row["model"] != "verified":
            wrong.append(f"exit 0: {row['model']}")
        if row["never"]:
            wrong.append("exit 0: untrained samples")
        if row["only_failed"]:
            wrong.append("exit 0: samples of failed ranks lost")
    if row["hung"] or row["late"]:
        return wrong
    if victim == "launcher":
        return wrong if row["code"] == -signal.SIGKILL else [*wrong, f"exit {row['code']}"]
    everything_dead = strategy.startswith("hierarchical") and victim == "two"  # one rank of each node may be lost
    if survives(strategy) and not everything_dead:
        accepted = row["code"] == 0 or (phase == "startup" and row["code"] == 4 and row["after_kill_s"] <= STARTUP_LIMIT_S)
    else:
        accepted = row["code"] == 4 or (row["code"] == 0 and (phase == "final" or survives(strategy)))
    return wrong if accepted else [*wrong, f"exit {row['code']} after {row['after_kill_s']:.0f} s"]


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of all outcomes."""
    kinds = Counter(problem for row in rows for problem in row["problems"])
    return {
        "runs": len(rows),
        "kills": sum(len(row["killed"]) for row in rows),
        "late": sum(row["late"] for row in rows),
        "hangs": sum(row["hung"] for row in rows),
        "orphans": sum(row["orphans"] for row in rows),
        "leaks": sum(len(row["leaks"]) for row in rows),
        "untrained_samples_on_exit_0": sum(row["never"] for row in rows if row["code"] == 0),
        "lost_samples_on_exit_0": sum(row["only_failed"] for row in rows if row["code"] == 0),
        "exit_0": sum(row["code"] == 0 for row in rows),
        "exit_0_verified": sum(row["code"] == 0 and row["model"] == "verified" for row in rows),
        "wrong": sum(bool(row["problems"]) for row in rows),
        "problems": dict(kinds),
        "longest_s": max((row["after_kill_s"] for row in rows), default=0.0),
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        "| strategy | phase | runs | exit codes | longest s after the kill | late | problems |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in report["runs"]:
        groups.setdefault(tuple(row["case"].split("/")[:2]), []).append(row)
    for (strategy, phase), rows in sorted(groups.items()):
        codes = " ".join(str(row["code"]) for row in rows)
        wrong = "; ".join(problem for row in rows for problem in row["problems"])
        longest = max(row["after_kill_s"] for row in rows)
        lines.append(f"| {strategy} | {phase} | {len(rows)} | {codes} | {longest} | {sum(r['late'] for r in rows)} | {wrong} |")
    return "\n".join([*lines, "", json.dumps(report["totals"])])


if __name__ == "__main__":
    run_main(main)
