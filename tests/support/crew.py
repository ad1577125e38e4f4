"""Four processes that serve every test which needs processes and no command line, on every backend."""

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
PATIENCE_S = 60.0


class Crew:
    """A pool that is made anew after a failure, so that one broken test does not break the next."""

    def __init__(self) -> None:
        self._pools: dict[bool, ProcessPool] = {}

    def on(self, backend: str) -> Any:
        """A runner on this backend. On `auto` the crew pretends to be two machines: shared memory inside, connections between."""
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
            self._pools[by_mpi].run(wake_up, timeout_s=4 * PATIENCE_S)  # imports take as long as they take
        pool = self._pools[by_mpi]
        pool.backend = backend
        try:
            return pool.run(job, *args, size=size, simulate_nodes=simulate_nodes, timeout_s=PATIENCE_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._pools = {}


def wake_up(context: DistributedContext) -> int:
    """Everything a process pays for once."""
    kernels.compile_for(torch.float32)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    return context.rank
