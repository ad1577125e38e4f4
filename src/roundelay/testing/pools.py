"""A pool of processes for tests and benchmarks that run many small jobs one after another."""

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
from roundelay.fleet.store import JobStore, StoreClient, connect_store, serve_store
from roundelay.launch.context import DistributedContext, create_context

JobFunction = Callable[..., Any]


class ProcessPool:
    """`size` worker processes. `run(job, size=n)` calls job(context, *args) on n of them and returns the results by rank.

    `nodes`: the node name of each worker; by default all are on one node.
    """

    def __init__(self, size: int, backend: str = "auto", nodes: Sequence[str] | None = None) -> None:
        self.size, self.backend = size, backend
        self.nodes = list(nodes or ["here"] * size)
        self._server = serve_store("127.0.0.1")
        self._numbers = itertools.count()
        self._members: list[tuple[Any, Connection]] = []

    def __enter__(self) -> ProcessPool:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_worker, args=(child_end, rank, self._server.port, self.nodes[rank]), daemon=True)
            process.start()
            child_end.close()
            self._members.append((process, parent_end))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill all workers."""
        for process, pipe in self._members:
            process.kill()
            process.join(5)
            pipe.close()
        self._members = []

    def run(
        self, job: JobFunction, *args: Any, size: int | None = None, timeout_s: float = 60.0, simulate_nodes: int = 0
    ) -> list[Any]:
        """Run a job on the first `size` workers and return their results by rank. Blocks.

        Raises PeerLost if a worker fails, or after timeout_s; a timeout also stops the pool.
        """
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
                missing = sorted(set(range(size)) - set(results))
                raise PeerLost(
                    failure or f"job {number} did not finish in {timeout_s:.0f} s",
                    where=f"ranks {missing} of {size}, backend {self.backend}",
                )
            pipe: Any
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    results[rank], problem = pipe.recv()
                except (EOFError, ConnectionError):
                    results[rank], problem = None, "the process exited"
                if problem is not None and failure is None:
                    failure = f"rank {rank}: {problem}"
                    deadline = min(deadline, time.monotonic() + 15.0)
        if failure is not None:
            raise PeerLost(f"job failed: {failure}", where=f"backend {self.backend}")
        return [results[rank] for rank in range(size)]


def _worker(pipe: Connection, rank: int, port: int, node: str) -> None:
    """Run one process of the pool."""
    run_jobs(pipe, rank, node, connect_store("127.0.0.1", port, 60.0))


def run_jobs(pipe: Connection, rank: int, node: str, server: StoreClient) -> None:
    """Run the jobs that arrive on the pipe, until it is closed."""
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
                node,
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
            gc.collect()  # learners have reference cycles, and few objects of a model hold much memory
            if not frozen:  # exclude torch and numba from later collections, which would take longer than most jobs
                gc.freeze()
                frozen = True
