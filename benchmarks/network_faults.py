"""Training on three machines while their network fails: vanished machines, resets, delay, loss, a slow link.

Three network namespaces on the switch of `benchmarks.vswitch`, one learner on each, started by RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT; rank 0 serves the store. Steps last 30 ms and the model has 1 MB. Every case reports exit codes, seconds, the
steps of each rank as a share of rank 0's, ranks declared failed, untrained samples, and for a fault in the middle steps
and exchanges per second around it. Needs root.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import fault_runs
from benchmarks.common import log, parser, run_main, select_names
from benchmarks.fault_runs import Job
from benchmarks.faults_task import TaskRecord, count_samples, read_records
from benchmarks.vswitch import SwitchedMachines, enter_namespace

SIZE, BATCH, EPOCHS, PORT = 3, 16, 2.0, 29500
STEP_S = 0.03
Action = Callable[[SwitchedMachines, Job, dict[int, int]], None]


@dataclass(frozen=True)
class NetworkCase:
    """What happens to the network of a run."""

    about: str
    network: tuple[dict[str, Any], ...] = ()
    """Commands to the switch before the run."""
    fault: Action | None = None
    """Called in the middle of the run, with the process id of every rank."""
    codes: tuple[frozenset[int], ...] = field(default=(frozenset({0}),) * SIZE)
    """Exit codes of each rank that are right."""
    healthy: frozenset[int] = frozenset(range(SIZE))
    """Ranks that must not be declared failed."""
    ratio: float = 0.0
    """Least steps of a remote rank as a share of rank 0's."""
    offload: bool = True


def cut(port: int, *, power_off: bool) -> Action:
    """Return a fault: a machine vanishes without a last packet; with `power_off` its process ends too."""

    def fault(machines: SwitchedMachines, job: Job, pids: dict[int, int]) -> None:
        machines.send(cut=port)
        if power_off:
            time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.kill(pids[port], signal.SIGKILL)

    return fault


def block(a: int, b: int) -> Action:
    """Return a fault: two machines no longer reach each other, but all others."""

    def fault(machines: SwitchedMachines, job: Job, pids: dict[int, int]) -> None:
        machines.send(block=[a, b])

    return fault


def resets(count: int, pause_s: float) -> Action:
    """Return a fault: `count` resets of random connections, one after the other."""

    def fault(machines: SwitchedMachines, job: Job, pids: dict[int, int]) -> None:
        number, until = 0, time.monotonic() + 20 * count * pause_s
        while number < count and job.poll() is None and time.monotonic() < until:
            number += machines.send(reset=1)["reset"]
            time.sleep(pause_s)
        (job.folder / "resets.txt").write_text(str(number))

    return fault


OK, LOST, ANY = frozenset({0}), frozenset({4}), frozenset(range(-64, 256))
DEAD = frozenset({-signal.SIGKILL})


def rtt(ms: float, ratio: float) -> NetworkCase:
    return NetworkCase(f"round trip {ms:g} ms", ({"delay_ms": ms / 2},), ratio=ratio)


CASES: dict[str, NetworkCase] = {
    "control": NetworkCase("no fault"),
    "rtt10": rtt(10, 0.95),
    "rtt50": rtt(50, 0.95),
    "rtt100": rtt(100, 0.95),
    "rtt300": rtt(300, 0.0),
    "loss5": NetworkCase("5 % of the frames are lost", ({"loss": 0.05},), offload=False),
    "slow1": NetworkCase("rank 1 sends 256 kbit/s", ({"rate_kbit": 256, "port": 1},), offload=False),
    "slow_all": NetworkCase("every rank sends 256 kbit/s", ({"rate_kbit": 256},), offload=False),
    "down2": NetworkCase("link of rank 2 down", (), cut(2, power_off=False), (OK, OK, LOST), frozenset({0, 1})),
    "off2": NetworkCase("machine of rank 2 without power", (), cut(2, power_off=True), (OK, OK, DEAD), frozenset({0, 1})),
    "down0": NetworkCase("link of the store's machine down", (), cut(0, power_off=False), (ANY, LOST, LOST), frozenset()),
    "off0": NetworkCase("store's machine without power", (), cut(0, power_off=True), (DEAD, LOST, LOST), frozenset()),
    "edge12": NetworkCase("ranks 1 and 2 no longer reach each other", (), block(1, 2)),
    "resets": NetworkCase("50 connections reset", (), resets(50, 0.2)),
}


def main(argv: Sequence[str]) -> int:
    p = parser("network_faults", __doc__, "sudo python -m benchmarks.network_faults --cases control,rtt100,down2 --json")
    p.add_argument("--cases", default=",".join(CASES), help="(%(default)s)")
    p.add_argument("--strategy", default="adpsgd")
    p.add_argument("--seconds", type=float, default=20.0, help="length of a run without a fault (%(default)s)")
    p.add_argument("--limit", type=float, default=150.0, help="seconds before a run counts as hung (%(default)s)")
    p.add_argument("--model", type=int, default=1_000_000, help="bytes of the model (%(default)s)")
    p.add_argument("--timeout", type=float, default=60.0, help="timeout_s of the runs (%(default)s)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the runs")
    p.add_argument("--keep", type=Path, help="folder for the files of the runs; default: deleted")
    args = p.parse_args(argv)
    names = select_names(args.cases, CASES, "cases")
    fault_runs.adopt_orphans()
    fault_runs.preload()
    rows = []
    for name in names:
        row = {"case": name, **run_case(CASES[name], args)}
        rows.append(row)
        log(json.dumps({key: value for key, value in row.items() if key != "series"}))
    report = {"results": rows, "environment": fault_runs.environment()}
    print(json.dumps(report) if args.json else table(rows))
    return 0 if not any(row["problems"] for row in rows) else 1


def run_case(case: NetworkCase, args: Any) -> dict[str, Any]:
    """Run one case on fresh machines and return what happened."""
    folder = Path(tempfile.mkdtemp(prefix="network-faults-"))
    with SwitchedMachines(SIZE, offload=case.offload) as machines:
        fault_runs.spared.add(machines.pid)
        for command in case.network:
            machines.send(**command)
        samples = round(args.seconds / STEP_S * SIZE * BATCH / EPOCHS)
        job = Job(folder, lambda: supervise(machines, folder, samples, args))
        fault_at = None
        if case.fault is not None:
            fault_at = wait_for_middle(job, folder, samples, args.limit)
            if fault_at is not None:
                case.fault(machines, job, read_pids(folder))
        row = job.finish(args.limit)
        row["switch"] = machines.send(stats=True)["stats"]
    fault_runs.spared.clear()
    row |= results(folder, samples, fault_at, case)
    row["about"] = case.about
    row["problems"] = problems(row, case)
    if row["problems"]:
        logs = [*sorted(folder.glob("out*.txt")), *sorted((folder / "run" / "log").glob("*.out"))]
        row["output"] = {path.name: fault_runs.tail(path, 4) for path in logs if path.exists()}
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        shutil.move(str(folder), str(args.keep / folder.name))
        row["folder"] = str(args.keep / folder.name)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def supervise(machines: SwitchedMachines, folder: Path, samples: int, args: Any) -> int:
    """Start one learner per machine, wait for all, and write their exit codes and seconds to codes.json."""
    settings: dict[str, Any] = {
        "task": "benchmarks.faults_task:CountedFrames",
        "task_options.records": folder / "records",
        "task_options.samples": samples,
        "task_options.held_out": 64,
        "task_options.sleep_s": STEP_S - 0.003,
        "task_options.model_bytes": args.model,
        "strategy": args.strategy,
        "batch": BATCH,
        "epochs": EPOCHS,
        "lr": 0.2,
        "log_every_s": 0.25,
        "timeout_s": args.timeout,
        "progress": "none",
        "tensorboard": "false",
        "run": folder / "run",
    }
    pids = {}
    began = time.monotonic()
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            learn(machines, rank, folder, {**settings, "bind_address": machines.address(rank)}, args.set)
        pids[rank] = pid
    write(folder / "pids.json", pids)
    codes: dict[int, int] = {}
    seconds = {}
    while len(codes) < SIZE:
        pid, status = os.waitpid(-1, 0)
        rank = next((rank for rank, own in pids.items() if own == pid), None)
        if rank is not None:
            codes[rank] = os.waitstatus_to_exitcode(status)
            seconds[rank] = round(time.monotonic() - began, 2)
            write(folder / "codes.json", {"codes": codes, "seconds": seconds})
    return 0


def learn(machines: SwitchedMachines, rank: int, folder: Path, settings: dict[str, Any], extra: Sequence[str]) -> None:
    """Become the learner of one machine. Does not return."""
    code = 1
    try:
        enter_namespace(machines.host(rank))
        out = os.open(folder / f"out-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(SIZE), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank),
            MASTER_ADDR=machines.address(0), MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="lan0", OMP_NUM_THREADS="1",
        )  # fmt: skip
        code = fault_runs.cli("train", "frames", *fault_runs.arguments_of(settings), *extra)()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def read_pids(folder: Path) -> dict[int, int]:
    return {int(rank): pid for rank, pid in json.loads((folder / "pids.json").read_text()).items()}


def wait_for_middle(job: Job, folder: Path, samples: int, limit_s: float) -> float | None:
    """Wait until 35 % of the samples are trained. Return the wall-clock time, or None if the run ended before."""
    until = job.began + limit_s

    def middle() -> bool:
        size = sum(path.stat().st_size for path in (folder / "records").glob("*.txt"))
        return size >= 0.35 * samples * EPOCHS / BATCH * 2 * 50  # two records of about 50 bytes per batch

    return time.time() if job.wait_for(middle, until, 0.05) else None


# -- results -----------------------------------------------------------------------------------------------------------


def results(folder: Path, samples: int, fault_at: float | None, case: NetworkCase) -> dict[str, Any]:
    """Return what a run has left in its files."""
    run, records = folder / "run", [r for r in read_records(folder / "records") if r.stop - r.start <= BATCH]
    ended = {"codes": {}, "seconds": {}}
    with suppress(OSError):
        ended = json.loads((folder / "codes.json").read_text())
    lost = fault_runs.events_of(run, "lost")
    declared: dict[int, float] = {}
    for event in lost:
        declared.setdefault(int(event["lost"]), float(event["time"]))
    row: dict[str, Any] = {
        "codes": [ended["codes"].get(str(rank)) for rank in range(SIZE)],
        "rank_seconds": [ended["seconds"].get(str(rank)) for rank in range(SIZE)],
        "declared": sorted(declared),
        "declared_by": sorted({(e["rank"], e["lost"]) for e in lost}),
        **count_samples(records, samples, EPOCHS, BATCH, declared),
        **steps_by_rank(records),
        "exchanges": [sum(e["exchanges"] for e in fault_runs.events_of(run, "steps") if e["rank"] == r) for r in range(SIZE)],
        "model": fault_runs.model_problem(run) or "verified",
    }
    with suppress(OSError):
        row["resets"] = int((folder / "resets.txt").read_text())
    if fault_at is not None:
        row["series"] = {
            "steps": {
                r: per_second([t.wall for t in records if t.kind == "graded" and t.rank == r], fault_at) for r in range(SIZE)
            },
            "exchanges": {r: exchanges_per_second(run, r, fault_at) for r in range(SIZE)},
        }
        survivors = [r for r in range(SIZE) if r in case.healthy]
        row |= around_fault(records, run, survivors, fault_at)
    return row


def steps_by_rank(records: list[TaskRecord]) -> dict[str, Any]:
    """Return the steps of every rank, and as a share of rank 0's while all ranks were training."""
    times = [[r.wall for r in records if r.kind == "graded" and r.rank == rank] for rank in range(SIZE)]
    row: dict[str, Any] = {"steps": [len(t) for t in times]}
    if all(times):
        first, last = max(t[0] for t in times) + 1.0, max(max(t) for t in times) - 0.5
        counts = [sum(first <= x <= last for x in t) for t in times]
        row["ratio"] = [round(count / max(counts[0], 1), 3) for count in counts]
        row["steps_per_s"] = [round(count / max(last - first, 1e-9), 2) for count in counts]
        gaps = [b - a for t in times for a, b in itertools.pairwise(t)]
        row["longest_gap_s"] = round(max(gaps, default=0.0), 2)
        row["median_step_s"] = round(statistics.median(gaps or [0.0]), 4)
    return row


def per_second(times: list[float], zero: float) -> dict[int, int]:
    """Count times by second before and after `zero`."""
    counts: dict[int, int] = {}
    for t in times:
        counts[int((t - zero) // 1)] = counts.get(int((t - zero) // 1), 0) + 1
    return {second: counts.get(second, 0) for second in range(min(counts), max(counts) + 1)} if counts else {}


def exchanges_per_second(run: Path, rank: int, zero: float) -> dict[int, int]:
    """Count a rank's exchanges by second before and after `zero`, from its events."""
    counts: dict[int, int] = {}
    for event in fault_runs.events_of(run, "steps"):
        if event["rank"] == rank:
            second = int((event["time"] - zero) // 1)
            counts[second] = counts.get(second, 0) + int(event["exchanges"])
    return {second: counts.get(second, 0) for second in range(min(counts), max(counts) + 1)} if counts else {}


def around_fault(records: list[TaskRecord], run: Path, ranks: Sequence[int], zero: float) -> dict[str, Any]:
    """Return how long the healthy ranks were without gradients and without exchanges after a fault."""
    steps_gap = exchange_gap = 0.0
    for rank in ranks:
        times = sorted(r.wall for r in records if r.kind == "graded" and r.rank == rank and r.wall > zero - 2)
        steps_gap = max([steps_gap, *(b - a for a, b in itertools.pairwise(times))])
        own = [e for e in fault_runs.events_of(run, "steps") if e["rank"] == rank and e["time"] > zero - 2]
        last = zero - 2
        for event in own:
            if event["exchanges"]:
                exchange_gap = max(exchange_gap, event["time"] - event["elapsed_s"] - last)
                last = event["time"]
        if own:
            exchange_gap = max(exchange_gap, own[-1]["time"] - last)
    return {"longest_s_without_gradient": round(steps_gap, 2), "longest_s_without_exchange": round(exchange_gap, 2)}


def problems(row: dict[str, Any], case: NetworkCase) -> list[str]:
    """Return how an outcome differs from the expected one."""
    wrong = ["hang"] if row["hung"] else []
    wrong += [f"rank {r}: exit {code}" for r, code in enumerate(row["codes"]) if code not in case.codes[r]]
    wrong += [f"rank {r} declared failed" for r in row["declared"] if r in case.healthy]
    if row["codes"][0] == 0 or row["codes"][1] == 0:
        if row["model"] != "verified":
            wrong.append(row["model"])
        if row["never"] or row["only_failed"]:
            wrong.append(f"{row['never'] + row['only_failed']} samples untrained")
    if case.ratio and min(row.get("ratio", [0.0])) < case.ratio:
        wrong.append(f"ratio {min(row.get('ratio', [0.0]))}")
    if case.fault is not None and case.healthy and row.get("longest_s_without_exchange", 0.0) > 10:
        wrong.append(f"{row['longest_s_without_exchange']} s without an exchange")
    if row["orphans"] or row["leaks"]:
        wrong.append("orphans or leaks")
    return wrong


def table(rows: list[dict[str, Any]]) -> str:
    names = ("case", "exit codes", "seconds", "steps", "share of rank 0's", "declared failed", "untrained")
    lines = [f"| {' | '.join(names)} | without gradient, exchange | problems |", "|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        gaps = ", ".join(str(r.get(f"longest_s_without_{what}", "")) for what in ("gradient", "exchange"))
        lines.append(
            f"| {r['case']} | {r['codes']} | {r['seconds']} | {r['steps']} | {r.get('ratio', '')} | {r['declared']} "
            f"| {r['never']} | {gaps} | {'; '.join(r['problems'])} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
