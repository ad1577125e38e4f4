"""Run a job in virtual time: the same function `job(context, ...)` that processes and threads run."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import greenlet
import torch

from roundelay.core import kernels
from roundelay.errors import Interrupted, PeerLost, RoundelayError
from roundelay.launch.context import DistributedContext, fake_machines
from roundelay.simulate.cluster import Cluster, ComputeModel, LinkModel, LinkModels, MachineGroup, SpeedModel
from roundelay.simulate.communicator import SimulatedCommunicator
from roundelay.simulate.job import SimulatedJob
from roundelay.simulate.runtime import EventSink, SimulatedRuntime

PLAIN = Cluster(
    name="plain",
    learner=ComputeModel(seconds_per_sample=1e-3, jitter=SpeedModel("gaussian", 0.1)),
    link=LinkModels(inside=LinkModel(100.0, 10.0, shared=False), between=LinkModel(10.0, 50.0)),
)
"""The default cluster of tests: step times vary by 10 %."""


class SimulatedCluster:
    """The learners of a cluster, ready to run one job."""

    def __init__(
        self,
        cluster: Cluster = PLAIN,
        *,
        size: int | None = None,
        machines: Sequence[str] | None = None,
        model_bytes: float = 0.0,
        seed: int = 0,
        events: Path | None = None,
        spans: int = 0,
    ) -> None:
        """Create one learner per rank.

        Args:
            size: use only the first `size` learners of the cluster.
            machines: the machine of every rank, instead of the machines of the cluster.
            model_bytes: bytes of a vector in timing-only mode; 0 to train for real.
            events: file for events if the run has no directory.
            spans: number of time intervals to keep for drawing.
        """
        names = list(machines) if machines is not None else cluster.machine_names()
        if size is not None:
            names = names[:size]
        speeds = cluster.speeds() if machines is None else [1.0] * len(names)
        self.cluster, self.size, self.machines = cluster, len(names), names
        self.job = SimulatedJob(cluster, names, model_bytes=model_bytes, seed=seed)
        self.job.max_spans = spans
        self._sinks: dict[Path | None, EventSink] = {None: EventSink(events)} if events is not None else {}
        self.runtimes = [SimulatedRuntime(self.job, rank, speeds[rank], self._sinks) for rank in range(self.size)]
        self.results: list[Any] = [None] * self.size
        self.errors: list[tuple[int, BaseException, str]] = []

    @property
    def now(self) -> float:
        """Return the virtual seconds since the start."""
        return self.job.loop.now

    @property
    def digest(self) -> str:
        """Return a hash of the order of events."""
        return self.job.loop.digest

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Call work(context, *args) on every learner and return the results by rank; None for failed ranks.

        Raises the first error that is not a consequence of another.
        """
        kernels.compile_for(torch.float32)
        rng_state = torch.get_rng_state()
        loop = self.job.loop
        processes = [
            loop.spawn(f"rank {rank}", lambda rank=rank: self._run_rank(rank, work, args))  # type: ignore[misc]
            for rank in range(self.size)
        ]
        for failure in self.cluster.failures:
            for rank in range(self.size):
                if rank == failure.learner or self.job.network.machine[rank] == failure.machine:
                    loop.at(failure.at_s, lambda rank=rank: self._fail_rank(rank, processes[rank]))  # type: ignore[misc]
        threshold = gc.get_threshold()
        gc.set_threshold(500_000, 50, 100)  # thousands of learners are many objects, and few of them are garbage
        try:
            loop.run()
        finally:
            gc.set_threshold(*threshold)
            torch.set_rng_state(rng_state)
            for sink in self._sinks.values():
                sink.close()
        return self._results_or_raise()

    def _run_rank(self, rank: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        runtime, names = self.runtimes[rank], self.machines
        try:
            comm = SimulatedCommunicator(self.job, range(self.size), rank, "all")
            context = DistributedContext(comm, rank, self.size, names, names, torch.device("cpu"), runtime=runtime)
            self.results[rank] = work(context, *args)
        except greenlet.GreenletExit:
            raise
        except BaseException as error:
            self.errors.append((rank, error, traceback.format_exc()))
            if isinstance(error, Interrupted):
                return  # all ranks stop together
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.job.mark_failed(rank, f"ended in an error: {first_line}")
        finally:
            for prefetcher in runtime.prefetchers:
                prefetcher.stop()

    def _fail_rank(self, rank: int, process: Any) -> None:
        if rank in self.job.failed or process.green.dead:
            return
        self.job.loop.kill(process)
        self.results[rank] = None
        self.job.mark_failed(rank, f"failed at {self.now:.6g} s")

    def _results_or_raise(self) -> list[Any]:
        """Return the results, or raise the error that caused all further errors."""
        if not self.errors:
            return self.results
        survived = any(rank not in self.job.failed for rank in range(self.size))
        if self.cluster.failures and survived and all(isinstance(error, PeerLost) for _, error, _ in self.errors):
            return self.results  # these ranks ended with a failed rank of their machine
        for _, error, _ in self.errors:
            if isinstance(error, RoundelayError) and not isinstance(error, PeerLost):
                raise error
        rank, error, trace = self.errors[0]
        if isinstance(error, PeerLost):
            raise error
        raise PeerLost(f"a job failed: rank {rank}: {trace}", where="virtual time")


def run_simulated(
    job: Callable[..., Any], *args: Any, size: int, simulate_nodes: int = 0, cluster: Cluster = PLAIN, seed: int = 0
) -> list[Any]:
    """Run a job on `size` learners in virtual time, as `run_threads` and `ProcessPool.run` do in real time.

    `simulate_nodes` > 0 splits the learners over that number of machines.
    """
    names = fake_machines(["here"] * size, simulate_nodes)
    return SimulatedCluster(replace(cluster, machines=(MachineGroup(1, size),)), machines=names, seed=seed).run(job, *args)
