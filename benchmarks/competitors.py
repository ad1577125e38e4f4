"""Who can be measured: each contestant trains the same task for a while at one context and says how far it got.

ceiling     plain torch on the same cores, without any communication
alone       our own engine without any communication: each learner is a job of its own
ddp         torch DistributedDataParallel;  ddp_fp16: with the fp16 hook;  ddp_accumulate: one all-reduce per 4 batches
periodic    torch PeriodicModelAverager, K = 8
any other   a strategy of ours, under its name, with its default settings
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from roundelay.core.contracts import Task
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import Learner, slowdown
from roundelay.launch.context import DistributedContext, create_context, single_process_context
from roundelay.launch.runtime import cpu_seconds
from roundelay.strategies.step import StepInfo

WARM_STEPS = 6
OTHERS = ("ceiling", "ddp", "ddp_fp16", "ddp_accumulate", "periodic")


@dataclass(frozen=True)
class Competitor:
    """A contestant with its settings."""

    name: str
    strategy: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the engine that differ from the defaults."""

    @property
    def ours(self) -> bool:
        return self.name not in OTHERS

    @property
    def free(self) -> bool:
        """Learners go at their own pace."""
        return self.name in ("ceiling", "alone") or self.strategy in ("adpsgd", "asgd", "hierarchical(adpsgd)")


Step = Callable[[], None]


class Runner:
    """One contestant at one context, ready to step."""

    def __init__(
        self,
        entry: Competitor,
        context: DistributedContext,
        task: Task,
        batch: int,
        slow: str,
        lr: float,
        momentum: float,
        seed: int = 0,
    ) -> None:
        self.entry, self.context, self.task, self.batch, self.lr, self.momentum = entry, context, task, batch, lr, momentum
        self.steps = 0
        self.seed = seed
        self._slow = slowdown(slow, context.size, context.rank)
        self._slow_setting = slow
        torch.manual_seed(seed)
        self.module = task.build()
        self.learner: Learner | None = None
        self._close: list[Callable[[], None]] = []
        self.step = self._prepare()

    def _prepare(self) -> Step:
        if self.entry.ours:
            return self._ours()
        return {"ceiling": self._ceiling, "periodic": self._periodic}.get(self.entry.name, self._ddp)()

    def next_batch(self) -> Any:
        """The batch of this step: learners walk through the epochs side by side."""
        samples, whole = self.task.samples, self.batch * self.context.size
        context = (self.steps * whole + self.context.rank * self.batch) % (samples - self.batch)
        return self.task.batch(self.steps * whole // samples, context, context + self.batch)

    def _timed(self, compute: Callable[[], None]) -> None:
        began = time.perf_counter()
        compute()
        if self._slow > 1.0:
            time.sleep((self._slow - 1.0) * (time.perf_counter() - began))

    def _optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=self.lr, momentum=self.momentum)

    def _backward(self, module: torch.nn.Module) -> None:
        self.task.loss(module, self.next_batch()).backward()

    def _ceiling(self) -> Step:
        optimizer = self._optimizer(self.module)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            self._timed(lambda: self._backward(self.module))
            optimizer.step()
            self.steps += 1

        return step

    def _join_torch(self) -> None:
        if dist.is_initialized():
            return
        store: Any = self.context.comm.store  # a JobStore: torch's own contestants need processes
        dist.init_process_group(
            "gloo", store=PrefixStore(f"{store.prefix}ddp", store.tcp), rank=self.context.rank, world_size=self.context.size
        )

    def _ddp(self) -> Step:
        self._join_torch()
        model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        if self.entry.name == "ddp_fp16":
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = self._optimizer(model)
        every = 4 if self.entry.name == "ddp_accumulate" else 1

        def step() -> None:
            last = (self.steps + 1) % every == 0
            if self.steps % every == 0:
                optimizer.zero_grad(set_to_none=True)

            def compute() -> None:
                with nullcontext() if last else model.no_sync():
                    (self.task.loss(model, self.next_batch()) / every).backward()

            self._timed(compute)
            if last:
                optimizer.step()
            self.steps += 1

        return step

    def _periodic(self) -> Step:
        self._join_torch()
        optimizer = self._optimizer(self.module)
        averager = PeriodicModelAverager(period=8)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            self._timed(lambda: self._backward(self.module))
            optimizer.step()
            averager.average_parameters(self.module.parameters())
            self.steps += 1

        return step

    def _ours(self) -> Step:
        context, slow = self.context, self._slow_setting
        if self.entry.name == "alone":
            context, slow = single_process_context("cpu"), f"0:{self._slow}" if self._slow > 1.0 else ""
        options = EngineConfig(strategy=self.entry.strategy, straggler=slow, **dict(self.entry.options))
        self.learner = learner = Learner(context, self.module, self._optimizer(self.module), options)
        self.learner.start()
        self._close.append(learner.close)
        size, batch = context.size, self.batch
        machine = batch * len(learner.machine)

        def compute() -> float:
            loss = self.task.loss(self.module, self.next_batch())
            loss.backward()
            return float(loss.detach())

        def step() -> None:
            learner.run_step(StepInfo(batch, machine, batch * size, self.steps * batch * size, 1 << 62), compute)
            self.steps += 1

        return step

    def barrier(self) -> None:
        self.context.comm.all_reduce_mean(torch.zeros(1)).wait() if self.context.size > 1 else None

    def vector(self) -> torch.Tensor:
        """The weights as they are now."""
        if self.learner is not None:
            return self.learner.worker.w.clone()
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])

    def finish(self) -> None:
        if self.learner is not None:
            self.learner.finish()

    def close(self) -> None:
        for close in reversed(self._close):
            close()


@dataclass
class Timing:
    """What a contestant has done so far, in all its turns."""

    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


def contest(
    context: DistributedContext,
    entries: Sequence[Competitor],
    task: Task,
    batch: int,
    slow: str,
    seconds: float,
    backend: str,
    turns: int = 4,
) -> dict[str, dict[str, float]]:
    """One round: all contestants stand ready in this process and take turns of seconds / turns, forwards and backwards.

    Returns this learner's metrics by contestant. Neighbours on a shared machine come and go within seconds; turns let
    everybody have the same share of them."""
    torch.set_num_threads(1)
    runners = []
    try:
        for number, entry in enumerate(entries):
            runners.append(Runner(entry, own_place(context, number, backend), task, batch, slow, lr=0.01, momentum=0.9))
        laps = [Timing() for _ in runners]
        steps = [warm(runner, seconds / turns) for runner in runners]
        for turn in range(turns):
            order = range(len(runners)) if turn % 2 == 0 else reversed(range(len(runners)))
            for number in order:
                run_turn(runners[number], laps[number], seconds / turns, steps[number])
        return {runner.entry.name: metrics(runner, lap) for runner, lap in zip(runners, laps, strict=True)}
    finally:
        for runner in reversed(runners):
            runner.close()
        leave_torch()
        for runner in runners:
            runner.context.close()


def leave_torch() -> None:
    """Leaves the process group that torch's own contestants share."""
    if dist.is_initialized():
        dist.destroy_process_group()


def own_place(context: DistributedContext, number: int, backend: str) -> DistributedContext:
    """A context of its own for each contestant, so that their keys and groups do not meet."""
    store: Any = context.comm.store
    return create_context(
        store.under(f"contestant/{number}/"), context.rank, context.size, "here", backend=backend, host="127.0.0.1", timeout_s=120.0,
        device=torch.device("cpu"), machines=0, digest={},
    )  # fmt: skip


def warm(runner: Runner, seconds: float) -> int:
    """First steps, which are slow; returns how many fit into a turn, for those who must all take the same number."""
    runner.barrier()
    for _ in range(WARM_STEPS):
        runner.step()
    runner.barrier()
    began = time.perf_counter()
    for _ in range(WARM_STEPS):
        runner.step()
    pace = torch.tensor([(time.perf_counter() - began) / WARM_STEPS])
    if runner.context.size > 1:
        pace = runner.context.comm.all_reduce_mean(pace).wait()
    return max(4, round(seconds / float(pace)) // 4 * 4)


def run_turn(runner: Runner, lap: Timing, seconds: float, steps: int) -> None:
    runner.barrier()
    first, cpu, began = runner.steps, cpu_seconds(), time.perf_counter()
    if runner.entry.free:
        while time.perf_counter() - began < seconds:
            runner.step()
    else:
        for _ in range(steps):
            runner.step()
    lap.seconds += time.perf_counter() - began
    lap.cpu_s += cpu_seconds() - cpu
    lap.steps += runner.steps - first
    runner.barrier()


def metrics(runner: Runner, lap: Timing) -> dict[str, float]:
    found = {"samples_per_s": lap.steps * runner.batch / lap.seconds, "cpu_s": lap.cpu_s, "steps": float(lap.steps)}
    runner.finish()
    if runner.learner is not None:
        runner.learner.recorder.record()
        total = runner.learner.recorder.total
        found["exchanges"] = float(total["exchanges"])
        found["meetings_per_gradient"] = total["exchanges"] / max(total["steps"], 1)
    runner.barrier()
    return found
