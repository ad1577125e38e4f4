"""Cost of one exchange and one mean, compared with lower bounds.

copy        one memory copy of the model: the lower bound of any exchange
send_recv   a gloo send and receive of the model in both directions: the lower bound between machines
exchange    one exchange of two learners, from the step that makes it due to the average on both sides
mean        one global mean
buffers     model-sized buffers of a learner beyond weights, gradients and optimizer state, per strategy (measured)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import log, parser, run_main
from benchmarks.namespaces import NetnsMachines, check_namespaces
from benchmarks.netns_cluster import NetnsCluster
from roundelay.comm.mpi_backend import MpiCommunicator
from roundelay.comm.torch_backend import TorchCommunicator, gloo
from roundelay.core import kernels
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import Learner
from roundelay.launch.context import DistributedContext
from roundelay.strategies import STRATEGIES
from roundelay.strategies.step import StepInfo
from roundelay.testing.mpi_pool import MpiPool
from roundelay.testing.pools import ProcessPool
from roundelay.topology.resolver import SeededMatching

SIZES = {"1M": 1_000_000, "10M": 10_000_000, "43M": 43_154_944}
BURST = 8
"""Exchanges timed together, so that the clock's and the scheduler's grain does not count."""


def main(argv: Sequence[str]) -> int:
    p = parser(
        "overhead",
        __doc__,
        "python -m benchmarks.overhead --sizes 1M --json;  sudo python -m benchmarks.overhead --link 1000 --sizes 10M",
    )
    p.add_argument("--sizes", default=",".join(SIZES))
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--no-buffers", action="store_true", help="leave out the count of buffers")
    p.add_argument("--link", type=int, default=0, metavar="MBIT", help="only this: two machines on a link of MBIT Mbit/s")
    args = p.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    results: list[dict[str, Any]] = []
    if args.link:
        results = between_machines(args.link, [SIZES[size] for size in args.sizes.split(",")], args.repeats)
        print(json.dumps({"results": results}) if args.json else table({"results": results}))
        return 0
    for backend in ("shm", "torch", "mpi"):
        if backend == "mpi" and find_spec("mpi4py") is None:
            print("mpi: left out, mpi4py is not installed", file=sys.stderr, flush=True)
            continue
        with MpiPool(2) if backend == "mpi" else ProcessPool(2, backend) as pool:
            for size in args.sizes.split(","):
                costs_s = pool.run(costs, SIZES[size], args.repeats, size=2, timeout_s=600)[0]
                results.append({"backend": backend, "parameters": SIZES[size], **costs_s})
                log(describe(results[-1]))
    report: dict[str, Any] = {"results": results}
    if not args.no_buffers:
        report["buffers"] = count_buffers()
        print(f"buffers beyond weights, gradients, optimizer: {report['buffers']}", file=sys.stderr, flush=True)
    print(json.dumps(report) if args.json else table(report))
    return 0


def between_machines(mbit: int, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """The same between two network namespaces on a cable."""
    check_namespaces()
    results: list[dict[str, Any]] = []
    with (
        NetnsMachines(2, mbit) as machines,
        NetnsCluster(machines, [1, 1], "roundelay.testing.tasks:SyntheticFrames", {}) as workers,
    ):
        for parameters in sizes:
            costs_s = workers.all("costs", 600.0, parameters=parameters, repeats=repeats)[0]
            results.append({"backend": f"torch, {mbit} Mbit/s", "parameters": parameters, **costs_s})
            log(describe(results[-1]))
    return results


def timed(what: Callable[[], Any]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def costs(context: DistributedContext, parameters: int, repeats: int) -> dict[str, Any]:
    """Seconds of each operation, interleaved; as rank 0 sees them."""
    comm: Any = context.comm
    assert isinstance(comm, TorchCommunicator | MpiCommunicator)
    x, y = torch.randn(parameters), torch.zeros(parameters)
    published = comm.publish(x)
    gossip_handle = comm.gossip(published, SeededMatching("ring", 2, 0), 1.0)
    bare: Any = gloo(comm.store, "bare", context.rank, 2, getattr(comm, "bind_address", "127.0.0.1"), 120.0)
    small = torch.zeros(1)
    seen: dict[str, list[float]] = {"copy_s": [], "send_recv_s": [], "exchange_s": [], "mean_s": []}
    done = 0

    total = 0.0

    def completed() -> float:
        nonlocal total
        total += gossip_handle.pop_metrics()["exchanges"]
        return total

    def send_and_receive() -> None:
        receiving, sending = bare.recv([y], 1 - context.rank, 0), bare.send([x], 1 - context.rank, 0)
        sending.wait()
        receiving.wait()

    def exchange() -> None:
        nonlocal done
        for _ in range(BURST):  # one after the other: a rank makes up for at most two exchanges
            done += 1
            if context.rank == 0:
                gossip_handle.notify_step()
            while completed() < done:
                time.sleep(0.0002)

    for number in range(repeats + 1):
        for name, what, count in (
            ("copy_s", lambda: y.copy_(x), 1),
            ("send_recv_s", send_and_receive, 1),
            ("exchange_s", exchange, BURST),
            ("mean_s", lambda: comm.all_reduce_mean(x).wait(), 1),
        ):
            comm.all_reduce_mean(small).wait()
            took = timed(what) / count if name != "copy_s" or context.rank == 0 else 0.0
            comm.all_reduce_mean(small).wait()
            if number:
                seen[name].append(took)
    gossip_handle.finish()
    metrics: dict[str, Any] = {name: round(statistics.median(values), 6) for name, values in seen.items()}
    metrics |= {name.replace("_s", "_range_s"): [round(min(v), 6), round(max(v), 6)] for name, v in seen.items()}
    if context.rank == 0:
        metrics["exchange_over_copy"] = round(
            statistics.median(m / c for m, c in zip(seen["exchange_s"], seen["copy_s"], strict=True)), 3
        )
    metrics["exchange_over_send_recv"] = round(
        statistics.median(m / s for m, s in zip(seen["exchange_s"], seen["send_recv_s"], strict=True)), 3
    )
    return metrics


# -- buffers -----------------------------------------------------------------------------------------------------------

BIG = 10_000_000


def count_buffers() -> dict[str, float]:
    """Peak memory of a learner under each strategy against plain training, in models of 40 MB."""
    peaks = {}
    for name in ["", *(n for n in STRATEGIES if n != "single")]:
        with ProcessPool(2, "torch") as pool:  # fresh processes: the allocator keeps what earlier runs have used
            peaks[name] = max(pool.run(peak_memory, name, size=2, timeout_s=120))
    return {name: round((peak - peaks[""]) / (4 * BIG), 2) for name, peak in peaks.items() if name}


def peak_memory(context: DistributedContext, strategy: str) -> float:
    """The highest resident memory, in bytes, of a few steps of a model of 10 million parameters."""
    module = torch.nn.Linear(10_000, 1_000, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(2, 10_000)
    kernels.compile_for(torch.float32)  # the compiler's own memory is not a buffer
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks

    def compute() -> float:
        loss = module(x).square().mean()
        loss.backward()
        return float(loss.detach())

    if not strategy:
        for _ in range(12):
            optimizer.zero_grad(set_to_none=True)
            compute()
            optimizer.step()
    else:
        learner = Learner(context, module, optimizer, EngineConfig(strategy=strategy, strategy_options={}))
        learner.start()
        for k in range(12):
            learner.run_step(StepInfo(2, 2 * len(learner.machine), 4, 4 * k, 1 << 40), compute)
        peak = high_water()
        learner.finish()
        learner.close()
        return peak
    return high_water()


def high_water() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return float(line.split()[1]) * 1024
    return 0.0


# -- words -------------------------------------------------------------------------------------------------------------


def describe(r: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {1000 * r[f'{name}_s']:.2f} ms" for name in ("copy", "send_recv", "exchange", "mean"))
    ratios = f"exchange/copy {r['exchange_over_copy']}  exchange/send_recv {r['exchange_over_send_recv']}"
    return f"{r['backend']:<10} {r['parameters']:>11,} parameters  {times}  {ratios}"


def table(report: dict[str, Any]) -> str:
    lines = [
        "| backend | parameters | copy ms | send+recv ms | exchange ms | mean ms | exchange ÷ copy | exchange ÷ send+recv |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        ms = " | ".join(f"{1000 * r[f'{name}_s']:.2f}" for name in ("copy", "send_recv", "exchange", "mean"))
        lines.append(
            f"| {r['backend']} | {r['parameters']:,} | {ms} | {r['exchange_over_copy']} | {r['exchange_over_send_recv']} |"
        )
    if "buffers" in report:
        lines += [
            "",
            "| strategy | model-sized buffers |",
            "|---|---|",
            *(f"| {k} | {v} |" for k, v in report["buffers"].items()),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
