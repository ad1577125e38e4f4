"""One learner of the network benchmark: a process in a network namespace that executes jobs, one JSON line each.

train      run a competitor and take snapshots of its weights with their times
costs      seconds of one exchange and one mean, for `benchmarks.overhead --link`
evaluate   held-out loss of the mean of several learners' snapshots: this worker's share of the held-out set

Snapshots are in memory that all workers share, so taking and evaluating them does not use the network.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import overhead
from benchmarks.competitors import FullRunner
from benchmarks.namespaces import end_with_parent
from roundelay.bench.competitors import Competitor, destroy_process_group
from roundelay.core import kernels
from roundelay.core.contracts import Task
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner
from roundelay.engine.trainer import train
from roundelay.errors import DataError, PeerLost
from roundelay.fleet.store import JobStore, connect_store, serve_store
from roundelay.launch.context import DistributedContext, create_context, single_process_context
from roundelay.launch.runtime import cpu_seconds
from roundelay.testing.tasks import Blstm

SLOTS = 32
"""Snapshots a learner keeps; when they are all taken every second one goes, and they are taken half as often."""
FIRST_PERIOD_S = 0.25
TIMEOUT_S = 60.0


@dataclass
class Snapshot:
    """A learner's weights at a time."""

    seconds: float
    samples: int
    """What this learner had computed by then."""
    slot: int


@dataclass
class SnapshotBuffer:
    """The snapshots of one learner, in memory that others can read."""

    path: Path
    parameters: int
    snapshots: list[Snapshot] = field(default_factory=list)
    period_s: float = FIRST_PERIOD_S

    def __post_init__(self) -> None:
        new = not self.path.exists()
        self._memory = np.memmap(self.path, np.float32, "w+" if new else "r+", shape=(SLOTS, self.parameters))
        if new:
            self._memory.fill(0.0)  # so that no snapshot waits for pages
        self._free = list(range(SLOTS))

    def due(self, now: float) -> bool:
        return not self.snapshots or now - self.snapshots[-1].seconds >= self.period_s

    def take(self, w: torch.Tensor, samples: int, now: float) -> None:
        if not self._free:
            self._free = [snapshot.slot for snapshot in self.snapshots[1::2]]
            self.snapshots = self.snapshots[::2]
            self.period_s *= 2
        slot = self._free.pop()
        torch.from_numpy(self._memory[slot]).copy_(w)
        self.snapshots.append(Snapshot(now, samples, slot))


@dataclass
class RunProgress:
    """Progress of a run with the engine."""

    learner: Learner | None = None
    samples: int = 0
    ended: float = 0.0
    cpu: float = 0.0


class TimedTask:
    """A task that records the time of its first loss."""

    def __init__(self, task: Task) -> None:
        self._task, self.samples = task, task.samples
        self.began, self.cpu = 0.0, 0.0
        self.build, self.batch, self.evaluate = task.build, task.batch, task.evaluate

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        if not self.began:
            self.began, self.cpu = time.perf_counter(), cpu_seconds()
        return self._task.loss(module, batch)


class NetnsWorker:
    """A process that waits for jobs."""

    def __init__(self) -> None:
        env = os.environ
        self.rank, self.size = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.machine, self.host = env["GROUP_RANK"], env["HOST_ADDRESS"]
        self.folder = Path(env["SNAPSHOTS"])
        module, name = env["TASK"].split(":")
        self.task: Task = getattr(importlib.import_module(module), name)(**json.loads(env["TASK_SETTINGS"]))
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        if self.rank == 0:
            self._server = serve_store(address, port)
        self._store = connect_store(address, port, TIMEOUT_S)
        self.module = self.task.build()
        self.parameters = sum(p.numel() for p in self.module.parameters())
        # warm up now, so that no learner starts its first run late
        kernels.compile_for(torch.float32)
        self.task.batch(0, 0, 1)
        self.task.evaluate(self.module.eval(), 0, 64)

    def buffer(self) -> SnapshotBuffer:
        return SnapshotBuffer(self.folder / f"{self.rank}", self.parameters)

    def create_context(self, number: int) -> DistributedContext:
        return create_context(
            JobStore(self._store, f"job/{number}/"),
            self.rank,
            self.size,
            self.machine,
            backend="auto",
            bind_address=self.host,
            timeout_s=TIMEOUT_S,
            device=torch.device("cpu"),
            simulate_nodes=0,
            digest={},
        )

    def train(
        self,
        number: int,
        name: str,
        strategy: str,
        options: dict[str, Any],
        lr: float,
        momentum: float,
        batch: int,
        samples: int,
    ) -> dict[str, Any]:
        """A run of `samples` samples in all, `batch` at a time here."""
        entry = Competitor(name, strategy, tuple(options.items()))
        try:
            return self._run(entry, number, lr, momentum, batch, samples)
        except (DataError, PeerLost) as error:  # at this rate the loss is no number: that is a result
            return {"failure": str(error)}

    def _run(self, entry: Competitor, number: int, lr: float, momentum: float, batch: int, samples: int) -> dict[str, Any]:
        context = single_process_context("cpu") if entry.strategy == "single" else self.create_context(number)
        if entry.uses_engine:
            return self._train_with_engine(context, TrainConfig(
                strategy=entry.strategy, bind_address=self.host, timeout_s=TIMEOUT_S, epochs=samples / self.task.samples,
                batch=batch, lr=lr, momentum=momentum, eval_at_checkpoint=False, progress="none", **dict(entry.options),
            ))  # fmt: skip
        return self._train_with_torch(entry, context, lr, momentum, batch, samples)

    def _train_with_engine(self, context: DistributedContext, config: TrainConfig) -> dict[str, Any]:
        """One of our strategies, in the loop that `roundelay train` runs."""
        task, buffer, run = TimedTask(self.task), self.buffer(), RunProgress()

        def on_step(learner: Learner) -> None:
            worker = learner.worker
            run.learner, run.samples = learner, run.samples + worker.step_info.local_samples
            run.ended, run.cpu = time.perf_counter(), cpu_seconds()
            if worker.is_node_leader and buffer.due(run.ended):
                with worker.shared_weights.locked() if worker.shared_weights is not None else nullcontext():
                    buffer.take(worker.w, run.samples, run.ended)

        summary = train(task, context, config, on_step=on_step)
        if run.learner is not None and run.learner.worker.is_node_leader:
            buffer.take(run.learner.flat.phi, run.samples, run.ended)  # by now the mean of all
        gossip_handle = run.learner.worker.gossip_handle if run.learner is not None else None
        kept = ("steps", "exchanges", "bytes", "waiting_s", "own_s", "staleness_mean")
        return {
            "began": task.began,
            "ended": run.ended,
            "cpu_s": run.cpu - task.cpu,
            "samples": run.samples,
            "snapshots": [asdict(snapshot) for snapshot in buffer.snapshots],
            "rounds": gossip_handle.rounds if gossip_handle is not None else 0,
            **{key: summary.get(key, 0) for key in kept},
        }

    def _train_with_torch(
        self, entry: Competitor, context: DistributedContext, lr: float, momentum: float, batch: int, samples: int
    ) -> dict[str, Any]:
        """One of torch's own, for the same samples in the same order."""
        buffer = self.buffer()
        runner = FullRunner(entry, context, self.task, batch, lr, momentum)
        try:
            runner.barrier()
            began, cpu = time.perf_counter(), cpu_seconds()
            steps = samples // (batch * context.size)
            for step in range(steps):
                runner.step()
                now = time.perf_counter()
                if buffer.due(now) or step == steps - 1:
                    buffer.take(runner.weights(), runner.steps * batch, now)
            cpu = cpu_seconds() - cpu
            runner.barrier()
        finally:
            runner.close()
            destroy_process_group()
            context.close()
        return {
            "began": began,
            "ended": now,
            "cpu_s": cpu,
            "samples": runner.steps * batch,
            "steps": runner.steps,
            "snapshots": [asdict(snapshot) for snapshot in buffer.snapshots],
        }

    def costs(self, number: int, parameters: int, repeats: int) -> dict[str, Any]:
        """What a exchange and a mean cost between these machines."""
        context = self.create_context(number)
        try:
            return overhead.costs(context, parameters, repeats)
        finally:
            context.close()

    def mean(self, number: int, parameters: int) -> dict[str, float]:
        """What a mean takes between these machines, for `python -m benchmarks.calibrate`."""
        from roundelay.simulate import calibrate

        context = self.create_context(number)
        try:
            return calibrate.mean_seconds(context, parameters)
        finally:
            context.close()

    def pace(self, number: int, batch: int) -> dict[str, float]:
        """Seconds of a step of learners that compute side by side and say nothing."""
        from roundelay.simulate import calibrate

        context = self.create_context(number)
        try:
            return {"step_s": calibrate.step_seconds(context, Blstm(), batch, calibrate.STEP_SECONDS)}
        finally:
            context.close()

    def timed(self, number: int, strategy: str, batch: int, steps: int) -> dict[str, float]:
        """A run of the ordinary loop, only its times."""
        from benchmarks import calibrate

        return calibrate.real_run(self.create_context(number), strategy, "", batch, steps)

    def evaluate(self, snapshots: Sequence[Sequence[int]], part: int, parts: int) -> tuple[float, float]:
        """Sum of losses and count, of this part of the held-out set, at the mean of snapshots given as (rank, slot)."""
        mean = torch.zeros(self.parameters)
        for rank, slot in snapshots:
            buffer = np.memmap(self.folder / f"{rank}", np.float32, "r", shape=(SLOTS, self.parameters))
            mean += torch.from_numpy(np.array(buffer[slot])) / len(snapshots)
        torch.nn.utils.vector_to_parameters(mean, self.module.parameters())
        self.module.eval()
        with torch.no_grad():
            return self.task.evaluate(self.module, part, parts)["loss"]


def main() -> None:
    """Answers jobs until standard input ends."""
    end_with_parent()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, prints to the error stream: answers stay whole lines
    member = NetnsWorker()
    print(json.dumps({"parameters": member.parameters, "samples": member.task.samples}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": getattr(member, job.pop("job"))(**job)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        gc.collect()  # models of the last job
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
