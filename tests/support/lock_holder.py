"""A process that uses the vector of another rank of its node, and stops itself at an exact point while it holds the lock."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from roundelay.comm.gossip.pair_average import PairAverager
from roundelay.comm.shared_memory import ShmVectors, is_stopped
from roundelay.comm.vectors import GOSSIPS, ROUNDS
from roundelay.core import kernels
from roundelay.core.wait import wait_until
from roundelay.fleet.store import JobStore, connect_store, serve_store

SIZE = 1001
POINTS = {"before": 0, "middle": SIZE // 2, "after": SIZE}
TIMEOUT_S = 60.0
START_S = 100.0
"""Starting a process imports torch, which takes long on a busy machine."""


def open_vectors(port: int, rank: int) -> ShmVectors:
    store = JobStore(connect_store("127.0.0.1", port, START_S), "holder/")
    return ShmVectors(range(2), rank, torch.zeros(SIZE, dtype=torch.float64), store, "test", START_S)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def mappings() -> int:
    """Return the number of vectors of rank 0 that this process maps or has open."""
    with open("/proc/self/maps", encoding="ascii") as file:
        mapped = sum("memfd:roundelay-w-0" in line for line in file)
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return mapped + sum("memfd:roundelay-w-0" in os.readlink(link) for link in links if os.path.islink(link))


def average_and_stop(a: Tensor, b: Tensor, point: str) -> None:
    """Average like the kernel, and stop after some elements; the next one is written on one side only."""
    average, done = kernels.compiled_pair_average, POINTS[point]  # type: ignore[attr-defined]
    average(a[:done], b[:done])
    if 0 < done < SIZE:
        mean = (a[done] + b[done]) / 2
        a[done] = mean
        stop()
        b[done] = mean
        done += 1
    else:
        stop()
    average(a[done:], b[done:])


def serve(pipe: Connection, port: int) -> None:
    """Run the operations that arrive on the pipe as rank 1."""
    torch.set_num_threads(1)
    vectors = open_vectors(port, 1)
    kernels.compiled_pair_average = kernels.pair_average  # type: ignore[attr-defined]
    pipe.send(None)
    while True:
        operation, point, vector = pipe.recv()
        result: Any = None
        if operation == "average":
            with vectors.lock(1) as own:
                own.vector.copy_(vector)
            kernels.pair_average = (
                (lambda a, b, point=point: average_and_stop(a, b, point)) if point else kernels.compiled_pair_average  # type: ignore[attr-defined]
            )
            result = PairAverager(vectors).average(0, int(vectors.header(1)[ROUNDS]), TIMEOUT_S)
        elif operation == "add":
            with vectors.lock(0) as other:
                other.vector[: POINTS[point]].add_(vector[: POINTS[point]])
                stop()
                other.vector[POINTS[point] :].add_(vector[POINTS[point] :])
        pipe.send((result, vectors.vector(1).clone(), mappings()))


class LockHolder:
    """The process of rank 1, and the vectors of rank 0 in this process."""

    def __init__(self) -> None:
        server = serve_store("127.0.0.1")
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, server.port), daemon=True)
        self._process.start()
        child.close()
        self.vectors = open_vectors(server.port, 0)
        self.vectors._own_lock_s = TIMEOUT_S  # a move before that is one because the holder is stopped
        self.vectors.header(0)[GOSSIPS] = 1
        self._busy = True
        self.result()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, operation: str, point: str | None, vector: Tensor | None = None) -> None:
        """Start an operation of rank 1; with a point, return when its process has stopped there."""
        self._busy = True
        self._pipe.send((operation, point, vector))
        if point is not None:
            wait_until(lambda: is_stopped(self.pid), TIMEOUT_S, lambda: TimeoutError("not stopped"), poll_s=0.001)

    def result(self) -> Any:
        """Continue the process; return (result of the operation, vector of rank 1, its mappings of vectors of rank 0)."""
        os.kill(self.pid, signal.SIGCONT)
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError("no answer from the holder of the lock")
        self._busy = False
        return self._pipe.recv()

    def finish(self) -> None:
        if self._busy:
            self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)
        self.vectors.close()
