"""A pool of processes shared by all tests that need ranks but no command line, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundelay.core import kernels
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.testing.mpi_pool import MpiPool
from roundelay.testing.pools import ProcessPool

SIZE = 4
TIMEOUT_S = 60.0


class Crew:
    """Process pools, recreated after a failure so that one broken test does not break the next."""

    def __init__(self) -> None:
        self._pools: dict[bool, ProcessPool] = {}

    def on(self, backend: str) -> Any:
        """Return a runner on this backend. On `auto` the ranks are split into two simulated nodes."""
        if backend == "threads":
            return run_threads

        def run(job: Any, *args: Any, size: int, simulate_nodes: int = 0) -> list[Any]:
            return self._run(backend, job, args, size, simulate_nodes or (2 if backend == "auto" else 0))

        return run

    def _run(self, backend: str, job: Any, args: tuple[Any, ...], size: int, simulate_nodes: int) -> list[Any]:
        by_mpi = backend == "mpi"
        if by_mpi:
            pytest.importorskip("mpi4py")
        if by_mpi not in self._pools:
            self._pools[by_mpi] = (MpiPool(SIZE) if by_mpi else ProcessPool(SIZE)).__enter__()
            self._pools[by_mpi].run(warm_up, timeout_s=4 * TIMEOUT_S)  # imports may be slow
        pool = self._pools[by_mpi]
        pool.backend = backend
        try:
            return pool.run(job, *args, size=size, simulate_nodes=simulate_nodes, timeout_s=TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._pools = {}


def warm_up(context: DistributedContext) -> int:
    """Compile and import everything that is slow the first time."""
    kernels.compile_for(torch.float32)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    return context.rank
