"""add and get on another learner's vector: MPI windows against messages to its agent. Started by mpirun with two processes:

    mpirun -n 2 python benchmarks/mpi_one_sided.py [--idle] [--repeats 15]

Rank 1 owns the vector and computes all the while (unless --idle); rank 0 measures. Prints one JSON object: median seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from roundelay.comm.mpi_backend import MpiCommunicator
from roundelay.comm.mpi_progress import MAX_SLEEP_IDLE_S, mpi_runtime
from roundelay.launch.context import context_from_env

SIZES = (100_000, 1_000_000, 10_000_000)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--idle", action="store_true", help="the owner of the vector does not compute")
    p.add_argument("--repeats", type=int, default=15)
    args = p.parse_args()
    torch.set_num_threads(1)
    context = context_from_env(backend="mpi", bind_address="auto", timeout_s=120, device="cpu", simulate_nodes=0, digest={})
    comm: Any = context.comm
    assert isinstance(comm, MpiCommunicator)
    seconds: dict[str, dict[str, float]] = {}
    for size in SIZES:
        seconds |= by_message(context.rank, comm, torch.randn(size), args.idle, args.repeats)
        seconds |= by_window(context.rank, comm, np.random.randn(size).astype(np.float32), args.idle, args.repeats)
    if context.rank == 0:
        print(json.dumps(seconds), flush=True)
    comm.all_reduce_mean(torch.zeros(1)).wait()
    context.close()


def by_message(rank: int, comm: MpiCommunicator, x: torch.Tensor, idle: bool, repeats: int) -> dict[str, dict[str, float]]:
    part = comm.new_group([0, 1], f"size-{len(x)}")
    assert part is not None
    part.publish(x)
    out = torch.empty_like(x)
    operations = {"get": lambda: part.remote_get(1, out), "add": lambda: part.remote_add(1, x)}
    seconds = measured(rank, comm, f"message {len(x)}", operations, idle, repeats)
    part.close()
    return seconds


def by_window(rank: int, comm: MpiCommunicator, x: np.ndarray, idle: bool, repeats: int) -> dict[str, dict[str, float]]:
    """The same on a window, called by the thread that needs the answer, while a thread of the owner lets MPI move on."""
    mpi = mpi_runtime().mpi
    window = mpi.Win.Create(x, disp_unit=x.itemsize, comm=mpi_runtime().comm)
    out, done = np.empty_like(x), threading.Event()

    def move_on() -> None:
        while not done.is_set():
            mpi_runtime().comm.Iprobe()
            time.sleep(MAX_SLEEP_IDLE_S / 5)

    threading.Thread(target=move_on, daemon=True).start()

    def get() -> None:
        window.Lock(1, mpi.LOCK_SHARED)
        window.Get(out, 1)
        window.Unlock(1)

    def add() -> None:
        window.Lock(1, mpi.LOCK_EXCLUSIVE)
        window.Accumulate(x, 1, op=mpi.SUM)
        window.Unlock(1)

    seconds = measured(rank, comm, f"window {len(x)}", {"get": get, "add": add}, idle, repeats)
    done.set()
    comm.all_reduce_mean(torch.zeros(1)).wait()
    window.Free()
    return seconds


def measured(
    rank: int, comm: MpiCommunicator, name: str, operations: dict[str, Callable[[], Any]], idle: bool, repeats: int
) -> dict[str, dict[str, float]]:
    comm.all_reduce_mean(torch.zeros(1)).wait()
    seconds: dict[str, float] = {}
    if rank == 0:
        for name_, call in operations.items():
            times = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            seconds[name_] = round(statistics.median(times[1:]), 6)
        comm.store.set(f"measured/{name}", "1")
    else:
        a = torch.randn(256, 256)
        while comm.store.get(f"measured/{name}") is None:
            for _ in range(20):
                time.sleep(0.001) if idle else a.mm(a)
    comm.all_reduce_mean(torch.zeros(1)).wait()
    return {name: seconds} if rank == 0 else {}


if __name__ == "__main__":
    main()
