"""Running a job in virtual time: the same `job(context, ...)` that processes and threads run."""

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
"""What tests run on: learners that are now a little faster, now a little slower."""


class SimulatedCluster:
    """Learners on a virtual cluster."""

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
        """`machines`: the machine of every rank, where the cluster does not say; `events`: where events go when the plan has
        no run directory; `spans`: how many stretches of time to keep for drawing."""
        names = list(machines) if machines is not None else cluster.machine_names()
        if size is not None:
            names = names[:size]
        speeds = cluster.speeds() if machines is None else [1.0] * len(names)
        self.cluster, self.size, self.machines = cluster, len(names), names
        self.job = SimulatedJob(cluster, names, model_bytes=model_bytes, seed=seed)
        self.job.spans_wanted = spans
        self._sinks: dict[Path | None, EventSink] = {None: EventSink(events)} if events is not None else {}
        self.hosts = [SimulatedRuntime(self.job, rank, speeds[rank], self._sinks) for rank in range(self.size)]
        self.results: list[Any] = [None] * self.size
        self.problems: list[tuple[int, BaseException, str]] = []

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.job.world.now

    @property
    def digest(self) -> str:
        """A fingerprint of the order of events."""
        return self.job.world.digest

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls work(context, *args) on every learner; returns the results by rank, None for the dead."""
        kernels.compile_for(torch.float32)
        dice = torch.get_rng_state()
        world = self.job.world
        tasks = [world.spawn(f"rank {rank}", lambda rank=rank: self._live(rank, work, args)) for rank in range(self.size)]  # type: ignore[misc]
        for failure in self.cluster.failures:
            for rank in range(self.size):
                if rank == failure.learner or self.job.network.machine[rank] == failure.machine:
                    world.at(failure.at_s, lambda rank=rank: self._die(rank, tasks[rank]))  # type: ignore[misc]
        patience = gc.get_threshold()
        gc.set_threshold(500_000, 50, 100)  # thousands of learners are many objects, and looking through them finds nothing
        try:
            world.run()
        finally:
            gc.set_threshold(*patience)
            torch.set_rng_state(dice)
            for sink in self._sinks.values():
                sink.close()
        return self._judge()

    def _live(self, rank: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            comm = SimulatedCommunicator(self.job, range(self.size), rank, "all")
            names = self.machines
            context = DistributedContext(comm, rank, self.size, names, names, torch.device("cpu"), runtime=self.hosts[rank])
            self.results[rank] = work(context, *args)
        except greenlet.GreenletExit:
            raise
        except BaseException as error:
            self.problems.append((rank, error, traceback.format_exc()))
            if isinstance(error, Interrupted):
                return  # all stop together
            self.job.bury(rank, f"ended in an error: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        finally:
            for feed in self.hosts[rank].feeds:
                feed.stop()

    def _die(self, rank: int, task: Any) -> None:
        if rank in self.job.dead or task.green.dead:
            return
        self.job.world.kill(task)
        self.results[rank] = None
        self.job.bury(rank, f"failed at {self.now:.6g} s")

    def _judge(self) -> list[Any]:
        """The results, or the error that is the cause of the others."""
        if not self.problems:
            return self.results
        survived = any(rank not in self.job.dead for rank in range(self.size))
        if self.cluster.failures and survived and all(isinstance(error, PeerLost) for _, error, _ in self.problems):
            return self.results  # they went with the dead of their machine
        for _, error, _ in self.problems:
            if isinstance(error, RoundelayError) and not isinstance(error, PeerLost):
                raise error
        rank, error, trace = self.problems[0]
        if isinstance(error, PeerLost):
            raise error
        raise PeerLost(f"a job failed: rank {rank}: {trace}", where="virtual time")


def run_simulated(
    job: Callable[..., Any], *args: Any, size: int, simulate_nodes: int = 0, cluster: Cluster = PLAIN, seed: int = 0
) -> list[Any]:
    """A runner beside `run_threads` and `Pool.run`: for the battery, and for strategies out of the tree."""
    names = fake_machines(["here"] * size, simulate_nodes)
    return SimulatedCluster(replace(cluster, machines=(MachineGroup(1, size),)), machines=names, seed=seed).run(job, *args)
