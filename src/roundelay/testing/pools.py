"""A pool of learner processes that outlives a job: for tests and tables that run many small jobs one after another."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from roundelay.errors import PeerLost
from roundelay.fleet.store import JobStore, TCPStore, connect_store, serve_store
from roundelay.launch.context import DistributedContext, create_context

JobFunction = Callable[..., Any]


class ProcessPool:
    """`size` processes; `run(job, size=n)` calls job(context, *args) on n of them and returns their results by rank."""

    def __init__(self, size: int, backend: str = "auto", simulate_nodes: Sequence[str] | None = None) -> None:
        self.size, self.backend = size, backend
        self.simulate_nodes = list(simulate_nodes or ["here"] * size)
        self._server = serve_store("127.0.0.1")
        self._numbers = itertools.count()
        self._members: list[tuple[Any, Connection]] = []

    def __enter__(self) -> ProcessPool:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_member, args=(theirs, rank, self._server.port, self.simulate_nodes[rank]), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process, pipe in self._members:
            process.kill()
            process.join(5)
            pipe.close()
        self._members = []

    def run(
        self, job: JobFunction, *args: Any, size: int | None = None, timeout_s: float = 60.0, simulate_nodes: int = 0
    ) -> list[Any]:
        """Runs a job on the first `size` members. A hang is an error after timeout_s, and ends the pool."""
        size = size or self.size
        number = next(self._numbers)
        for rank in range(size):
            self._members[rank][1].send((job, args, number, size, self.backend, simulate_nodes))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        pipes: dict[Any, int] = {self._members[rank][1]: rank for rank in range(size)}
        failure: str | None = None
        while len(results) < size:
            ready = wait([p for p, r in pipes.items() if r not in results], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                late = sorted(set(range(size)) - set(results))
                raise PeerLost(
                    failure or f"job {number} did not end in {timeout_s:.0f} s",
                    where=f"ranks {late} of {size}, backend {self.backend}",
                )
            pipe: Any
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    results[rank], problem = pipe.recv()
                except (EOFError, ConnectionError):
                    results[rank], problem = None, "its process has ended"
                if problem is not None and failure is None:
                    failure = f"rank {rank}: {problem}"
                    deadline = min(deadline, time.monotonic() + 15.0)
        if failure is not None:
            raise PeerLost(f"a job failed: {failure}", where=f"backend {self.backend}")
        return [results[rank] for rank in range(size)]


def _member(pipe: Connection, rank: int, port: int, machine: str) -> None:
    """A process of the pool."""
    do_jobs(pipe, rank, machine, connect_store("127.0.0.1", port, 60.0))


def do_jobs(pipe: Connection, rank: int, machine: str, server: TCPStore) -> None:
    """Does what comes out of the pipe until it is closed."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    frozen = False
    while True:
        try:
            job, args, number, size, backend, simulate_nodes = pipe.recv()
        except EOFError:
            return
        context: DistributedContext | None = None
        try:
            context = create_context(
                JobStore(server, f"pool/{number}/"),
                rank,
                size,
                machine,
                backend=backend,
                bind_address="127.0.0.1",
                timeout_s=30.0,
                device=torch.device("cpu"),
                simulate_nodes=simulate_nodes,
                digest={},
            )
            pipe.send((job(context, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
        finally:
            if context is not None:
                context.close()
            del job, args, context
            gc.collect()  # learners are full of cycles, and a model is few objects but many bytes
            if not frozen:  # what torch and numba have built stays: to look through it every time takes longer than most jobs
                gc.freeze()
                frozen = True
