"""Measure this machine, or the link between two machines, and write a cluster file for `simulate` and `plan`.

compute     seconds per sample and per step, from three batch sizes, while both learners compute
exchange    one pair average in shared memory
mean        one all-reduce of the model: bandwidth, latency and CPU seconds of the link

Started alone, the command measures two learners on this machine. Started under torchrun with one rank on each of two
machines, it measures the link between them instead of shared memory. Where a machine has no more cores than learners,
transfers run on the core of the learner, so the file gets their CPU seconds, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundelay.core import kernels
from roundelay.core.contracts import Task
from roundelay.errors import PeerLost, UsageError
from roundelay.launch.context import DistributedContext, context_from_env, under_launcher
from roundelay.launch.runtime import cpu_seconds
from roundelay.log.output import emit
from roundelay.testing.pools import ProcessPool
from roundelay.testing.tasks import Blstm
from roundelay.topology.resolver import SeededMatching

logger = logging.getLogger(__name__)

LEARNERS = 2
BURST = 8
"""Exchanges that are timed together, so that clock resolution and scheduling do not matter."""
POLL_S = 0.0005
TIMEOUT_S = 300.0
STEP_SECONDS = 3.0
"""How long the steps of one batch size are measured."""
SOURCE = "measured by roundelay calibrate"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="roundelay calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples: roundelay calibrate --out here.toml;  torchrun … -m roundelay calibrate --out two-machines.toml",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    check_arguments(args)
    torch.set_num_threads(1)
    if under_launcher():
        measured = measure_ranks(args.batch, args.repeats)
        if measured is None:
            return 0
        machine, link = measured
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        with ProcessPool(LEARNERS, "shm") as pool:
            machine, link = measure_machine(pool, args.batch, args.repeats), None
    path = write_cluster_file(Path(args.out), cluster_tree(machine, link))
    record = {"file": str(path), "batch": args.batch, "cores": os.cpu_count(), "machine": machine, "link": link}
    emit(json.dumps(record) if args.json else f"wrote {path}: try roundelay plan {path}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="calibrated.toml", help="the cluster file to write (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples per learner and step (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repetitions; medians count (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError for numbers that must be positive and are not."""
    for name in ("batch", "repeats", "seconds"):
        if name in args and not getattr(args, name) > 0:
            raise UsageError(f"--{name} must be > 0 (got {getattr(args, name)})", where=f"--{name}", hint="see --help")


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_machine(pool: ProcessPool, batch: int, repeats: int) -> dict[str, float]:
    """Measure compute, shared memory and loopback with the two learners of `pool`."""
    parameters = parameter_count(Blstm())
    step_s: dict[int, list[float]] = {size: [] for size in batch_sizes(batch)}
    for _ in range(repeats):  # interleaved, because the speed of the machine drifts
        for size, seconds in step_s.items():
            seconds.append(max(pool.run(step_seconds, Blstm(), size, STEP_SECONDS, size=LEARNERS, timeout_s=TIMEOUT_S)))
    machine = {"parameters": float(parameters), **compute_model({n: statistics.median(s) for n, s in step_s.items()}, batch)}
    logger.info("a step of %d samples takes %.1f ms", batch, 1000 * machine["step_s"])
    exchanges = [pool.run(exchange_seconds, parameters, size=LEARNERS, timeout_s=TIMEOUT_S)[0] for _ in range(repeats)]
    machine["exchange_s"] = statistics.median(exchanges)
    means = [pool.run(mean_seconds, parameters, size=LEARNERS, timeout_s=TIMEOUT_S) for _ in range(repeats)]
    machine |= link_model(means, parameters)
    logger.info("an exchange takes %.2f ms, a mean %.2f ms", 1000 * machine["exchange_s"], 1000 * machine["mean_s"])
    return machine


def measure_ranks(batch: int, repeats: int) -> tuple[dict[str, float], dict[str, float]] | None:
    """Measure compute and the link between the two ranks of a launched job. Rank 0 gets the result, rank 1 None."""
    with context_from_env(
        backend="torch", bind_address="auto", timeout_s=60.0, device="cpu", simulate_nodes=0, digest={"batch": batch}
    ) as context:
        if context.size != LEARNERS:
            raise UsageError(
                f"calibrate needs {LEARNERS} ranks (got {context.size})",
                where="torchrun",
                hint="start one process on each of two machines",
            )
        parameters = parameter_count(Blstm())
        step_s = {
            n: statistics.median(step_seconds(context, Blstm(), n, STEP_SECONDS) for _ in range(repeats))
            for n in batch_sizes(batch)
        }
        local = {
            "step_s": {str(n): s for n, s in step_s.items()},
            "mean": [mean_seconds(context, parameters) for _ in range(repeats)],
        }
        ranks = gather_json(context, "calibrate", local, TIMEOUT_S)
    if context.rank != 0:
        return None
    slowest = {n: max(rank["step_s"][str(n)] for rank in ranks) for n in step_s}
    exchange_s = pair_average_seconds(parameters)
    link = link_model([[rank["mean"][i] for rank in ranks] for i in range(repeats)], parameters)
    machine = {"parameters": float(parameters), "exchange_s": exchange_s, **compute_model(slowest, batch)}
    return machine, link


def gather_json(context: DistributedContext, key: str, value: Any, timeout_s: float) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective.

    Raises:
        PeerLost: a rank did not write its value within `timeout_s`.
    """
    store = context.comm.store
    store.set(f"{key}/{context.rank}", json.dumps(value))
    deadline = time.monotonic() + timeout_s
    values = []
    for rank in range(context.size):
        while (text := store.get(f"{key}/{rank}")) is None:
            if time.monotonic() > deadline:
                raise PeerLost(f"rank {rank} sent no measurement in {timeout_s:.0f} s", where=key, hint="see its log")
            time.sleep(0.01)
        values.append(json.loads(text))
    return values


def parameter_count(task: Task) -> int:
    return sum(p.numel() for p in task.build().parameters())


def batch_sizes(batch: int) -> tuple[int, int, int]:
    """Return the batch sizes that are measured: half, equal and double."""
    return max(1, batch // 2), batch, 2 * batch


def compute_model(step_s: Mapping[int, float], batch: int) -> dict[str, float]:
    """Fit seconds per sample and per step to measured steps; the line passes through the step of `batch` samples."""
    small, large = min(step_s), max(step_s)
    per_sample = (step_s[large] - step_s[small]) / (large - small)
    per_step = max(step_s[batch] - batch * per_sample, 0.0)
    if per_step == 0.0:
        per_sample = step_s[batch] / batch
    return {"seconds_per_sample": per_sample, "seconds_per_step": per_step, "step_s": step_s[batch]}


def link_model(runs: Sequence[Sequence[Mapping[str, float]]], parameters: int) -> dict[str, float]:
    """Turn the times of `mean_seconds`, by repetition and rank, into bandwidth, latency and CPU seconds per GB."""

    def median(key: str) -> float:
        return statistics.median(max(rank[key] for rank in run) for run in runs)

    mean, latency, size = median("mean_s"), median("latency_s"), 4.0 * parameters
    # with two learners, each sends the vector once: half of it to be reduced, half of it reduced
    return {
        "mean_s": mean,
        "latency_s": latency,
        "gbit_per_s": 8e-9 * size / max(mean - latency, 1e-9),
        "latency_us": 1e6 * latency / 2,
        "cpu_s_per_gb": 1e9 * median("cpu_s") / size,
    }


def mean_seconds(context: DistributedContext, parameters: int, repeats: int = 5) -> dict[str, float]:
    """Return the median seconds of a mean of a model and of one number, and the CPU seconds of the former. Collective."""
    comm, x, number = context.comm, torch.randn(parameters), torch.zeros(1)
    columns: dict[str, list[float]] = {"mean_s": [], "latency_s": [], "cpu_s": []}
    for repeat in range(repeats + 1):
        comm.all_reduce_mean(number).wait()
        began = time.perf_counter()
        comm.all_reduce_mean(number).wait()
        latency = time.perf_counter() - began
        began, cpu = time.perf_counter(), cpu_seconds()
        comm.all_reduce_mean(x).wait()
        times = {"mean_s": time.perf_counter() - began, "latency_s": latency, "cpu_s": cpu_seconds() - cpu}
        if repeat:  # the first one opens connections
            for name, seconds in times.items():
                columns[name].append(seconds)
    return {name: statistics.median(column) for name, column in columns.items()}


def exchange_seconds(context: DistributedContext, parameters: int, repeats: int = 5) -> float:
    """Return the median seconds of one background exchange between two learners. Collective."""
    comm: Any = context.comm
    gossip = comm.gossip(comm.publish(torch.randn(parameters)), SeededMatching("ring", LEARNERS, 0), 1.0)
    barrier = torch.zeros(1)
    done = 0.0

    def wait_for(count: float) -> None:
        nonlocal done
        while (done := done + gossip.pop_metrics()["exchanges"]) < count:
            time.sleep(POLL_S)

    times = []
    for repeat in range(repeats + 1):
        comm.all_reduce_mean(barrier).wait()
        began = time.perf_counter()
        for number in range(BURST):  # one after the other: a rank makes up for at most two exchanges
            if context.rank == 0:
                gossip.notify_step()
            wait_for(BURST * repeat + number + 1)
        times.append((time.perf_counter() - began) / BURST)
        comm.all_reduce_mean(barrier).wait()
    gossip.finish()
    return statistics.median(times[1:])


def pair_average_seconds(parameters: int, repeats: int = 5) -> float:
    """Return the median seconds of one pair average of two vectors in the memory of this process."""
    a, b = torch.randn(parameters), torch.randn(parameters)
    kernels.compile_for(torch.float32)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        kernels.pair_average(a, b)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def step_seconds(context: DistributedContext, task: Task, batch: int, seconds: float) -> float:
    """Return the mean seconds of a step of plain SGD while all ranks compute without communication. Collective."""
    module = task.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    times: list[float] = []
    if context.size > 1:
        context.comm.all_reduce_mean(torch.zeros(1)).wait()
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end or len(times) < 4:
        start = (len(times) * batch) % max(task.samples - batch, 1)
        data = task.batch(0, start, start + batch)
        optimizer.zero_grad(set_to_none=True)
        task.loss(module, data).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.fmean(times[1:])


# -- writing -----------------------------------------------------------------------------------------------------------


def cluster_tree(
    machine: Mapping[str, float], link: Mapping[str, float] | None = None, cores: int | None = None
) -> dict[str, Any]:
    """Return the values of a cluster file: two learners on one machine, or one on each of two machines joined by `link`."""
    crowded = (cores or os.cpu_count() or 1) <= LEARNERS
    size = 4 * machine["parameters"]
    tree: dict[str, Any] = {
        "about": SOURCE,
        "machines": [{"count": 1, "learners": LEARNERS}] if link is None else [{"count": LEARNERS, "learners": 1}],
        "learner": {key: machine[key] for key in ("seconds_per_sample", "seconds_per_step")},
        "memory": {"exchange_gb_per_s": 2e-9 * size / machine["exchange_s"], "contention": 0.5 if crowded else 0.0},
        "link": {},
        "sources": {"learner": SOURCE, "link": SOURCE, "memory": SOURCE},
    }
    if "gbit_per_s" in machine:
        tree["link"]["inside"] = {**link_table(machine, crowded), "shared": False}
    if link is not None:
        tree["link"]["between"] = link_table(link, crowded)
    return tree


def link_table(link: Mapping[str, float], crowded: bool) -> dict[str, Any]:
    names = ("gbit_per_s", "latency_us") + (("cpu_s_per_gb",) if crowded else ())
    return {name: link[name] for name in names}


def write_cluster_file(path: Path, tree: Mapping[str, Any]) -> Path:
    """Write a cluster file and return its path. Raises UsageError if the file cannot be written."""
    lines = [f"about = {json.dumps(tree['about'])}"]
    for machine in tree["machines"]:
        lines += ["", "[[machines]]", *(f"{key} = {value}" for key, value in machine.items())]
    tables = {"learner": tree["learner"], "memory": tree["memory"], "sources": tree["sources"]}
    tables |= {f"link.{name}": link for name, link in tree["link"].items()}
    write: Callable[[Any], str] = lambda value: json.dumps(value) if isinstance(value, str | bool) else f"{value:.6g}"  # noqa: E731
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {write(value)}" for key, value in table.items())]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where="--out", hint="choose another file") from error
    logger.info("wrote %s", path)
    return path
