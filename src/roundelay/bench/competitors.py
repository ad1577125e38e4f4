"""Training loops that are compared with each other: each trains the same task in the same processes, turn by turn.

compute     plain torch on the same cores without communication: the upper bound
ddp         torch DistributedDataParallel over gloo
others      a strategy of Roundelay with its default settings
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from roundelay.comm.torch_store import TorchStore
from roundelay.core.contracts import Task
from roundelay.engine.config import EngineConfig
from roundelay.engine.learner import Learner, slowdown
from roundelay.launch.context import DistributedContext, create_context
from roundelay.launch.runtime import cpu_seconds
from roundelay.strategies.step import StepInfo

_torch_stores: list[TorchStore] = []
"""The store of the default process group, which torch does not keep alive."""

WARMUP_STEPS = 6
STEPS_MULTIPLE = 4
"""Competitors with collectives take a multiple of this number of steps per turn, so that averages every 4 steps line up."""
WITHOUT_WAITING = ("single", "adpsgd", "asgd", "hierarchical(adpsgd)")
"""Strategies whose learners do not wait for each other and may take different numbers of steps."""

Step = Callable[[], None]


@dataclass(frozen=True)
class Competitor:
    """A training loop by name. An empty `strategy` means one of torch's own loops."""

    name: str
    strategy: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    """Settings of the engine that differ from the defaults."""

    @property
    def uses_engine(self) -> bool:
        return bool(self.strategy)

    @property
    def free_running(self) -> bool:
        """True if learners may take different numbers of steps in the same time."""
        return self.name == "compute" or self.strategy in WITHOUT_WAITING


class CompetitorRunner:
    """One competitor on one rank: `step()` trains one batch. All ranks must create their runners in the same order."""

    def __init__(
        self,
        entry: Competitor,
        context: DistributedContext,
        task: Task,
        batch: int,
        lr: float,
        momentum: float,
        straggler: str = "",
    ) -> None:
        self.entry, self.context, self.task, self.batch, self.lr, self.momentum = entry, context, task, batch, lr, momentum
        self.straggler, self.steps = straggler, 0
        self.slowdown = slowdown(straggler, context.size, context.rank)
        torch.manual_seed(0)
        self.module = task.build()
        self.learner: Learner | None = None
        self.step = self._create_step()

    def _create_step(self) -> Step:
        if self.entry.uses_engine:
            return self.engine_step()
        return self.compute_step() if self.entry.name == "compute" else self.ddp_step()

    def next_batch(self) -> Any:
        """Return the batch of this step. Ranks read disjoint batches of the same epoch."""
        samples, global_batch = self.task.samples, self.batch * self.context.size
        start = (self.steps * global_batch + self.context.rank * self.batch) % max(samples - self.batch, 1)
        return self.task.batch(self.steps * global_batch // samples, start, start + self.batch)

    def create_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=self.lr, momentum=self.momentum)

    def run_compute(self, compute: Callable[[], None]) -> None:
        """Call `compute`, then sleep as long as the injected slowdown of this rank asks for."""
        began = time.perf_counter()
        compute()
        if self.slowdown > 1.0:
            time.sleep((self.slowdown - 1.0) * (time.perf_counter() - began))

    def backward(self, module: torch.nn.Module) -> None:
        self.task.loss(module, self.next_batch()).backward()

    def compute_step(self, after_step: Step = lambda: None) -> Step:
        """Create a plain torch step; `after_step` runs after the optimizer."""
        optimizer = self.create_optimizer(self.module)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            self.run_compute(lambda: self.backward(self.module))
            optimizer.step()
            after_step()
            self.steps += 1

        return step

    def init_process_group(self) -> None:
        """Create torch's default process group once per process, on the store of this context. Collective."""
        if not dist.is_initialized():
            store: Any = self.context.comm.store  # a JobStore: torch's own loops need processes
            _torch_stores.append(TorchStore(store.under("ddp/"), 300.0))
            dist.init_process_group("gloo", store=_torch_stores[-1], rank=self.context.rank, world_size=self.context.size)

    def ddp_step(self) -> Step:
        self.init_process_group()
        model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        optimizer = self.create_optimizer(model)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            self.run_compute(lambda: self.backward(model))
            optimizer.step()
            self.steps += 1

        return step

    def engine_step(self, context: DistributedContext | None = None, straggler: str | None = None) -> Step:
        """Create a step of a strategy in `context`, by default the context of this runner."""
        context = context or self.context
        straggler = self.straggler if straggler is None else straggler
        options = EngineConfig(strategy=self.entry.strategy, straggler=straggler, **dict(self.entry.options))
        self.learner = learner = Learner(context, self.module, self.create_optimizer(self.module), options)
        learner.start()
        global_batch, node_batch = self.batch * context.size, self.batch * len(learner.machine)

        def compute() -> float:
            loss = self.task.loss(self.module, self.next_batch())
            loss.backward()
            return float(loss.detach())

        def step() -> None:
            learner.run_step(StepInfo(self.batch, node_batch, global_batch, self.steps * global_batch, 1 << 62), compute)
            self.steps += 1

        return step

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.context.size > 1:
            self.context.comm.all_reduce_mean(torch.zeros(1)).wait()

    def weights(self) -> torch.Tensor:
        """Return a copy of the current weights as one vector."""
        if self.learner is not None:
            return self.learner.worker.w.clone()
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])

    def finish(self) -> None:
        """Finish background exchanges. Collective."""
        if self.learner is not None:
            self.learner.finish()

    def close(self) -> None:
        if self.learner is not None:
            self.learner.close()


@dataclass
class Timing:
    """Steps, seconds and CPU seconds of one competitor over all its turns."""

    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


def run_contest(
    context: DistributedContext,
    entries: Sequence[Competitor],
    task: Task,
    batch: int,
    seconds: float,
    backend: str,
    straggler: str = "",
    turns: int = 4,
    runner: type[CompetitorRunner] = CompetitorRunner,
    lr: float = 0.01,
    momentum: float = 0.9,
) -> dict[str, dict[str, float]]:
    """Run all competitors for `seconds` each and return this rank's metrics by competitor. Collective.

    The competitors take short turns in alternating order, because the speed of a shared machine drifts within seconds.
    """
    torch.set_num_threads(1)
    runners: list[CompetitorRunner] = []
    try:
        for number, entry in enumerate(entries):
            own = child_context(context, f"competitor/{number}/", backend)
            runners.append(runner(entry, own, task, batch, lr, momentum, straggler))
        timings = [Timing() for _ in runners]
        steps = [warm_up(one, seconds / turns) for one in runners]
        for turn in range(turns):
            order = range(len(runners)) if turn % 2 == 0 else reversed(range(len(runners)))
            for number in order:
                run_turn(runners[number], timings[number], seconds / turns, steps[number])
        return {one.entry.name: collect_metrics(one, timing) for one, timing in zip(runners, timings, strict=True)}
    finally:
        for one in reversed(runners):
            one.close()
        destroy_process_group()
        for one in runners:
            one.context.close()


def destroy_process_group() -> None:
    """Destroy torch's default process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def child_context(context: DistributedContext, prefix: str, backend: str) -> DistributedContext:
    """Create a context with keys and groups of its own. Collective."""
    store: Any = context.comm.store
    return create_context(
        store.under(prefix), context.rank, context.size, "here", backend=backend, bind_address="127.0.0.1", timeout_s=120.0,
        device=torch.device("cpu"), simulate_nodes=0, digest={},
    )  # fmt: skip


def warm_up(runner: CompetitorRunner, seconds: float) -> int:
    """Take the slow first steps and return how many steps fit into `seconds`, the same number on all ranks. Collective."""
    runner.barrier()
    for _ in range(WARMUP_STEPS):
        runner.step()
    runner.barrier()
    began = time.perf_counter()
    for _ in range(WARMUP_STEPS):
        runner.step()
    step_s = torch.tensor([(time.perf_counter() - began) / WARMUP_STEPS])
    if runner.context.size > 1:
        step_s = runner.context.comm.all_reduce_mean(step_s).wait()
    return max(STEPS_MULTIPLE, round(seconds / float(step_s)) // STEPS_MULTIPLE * STEPS_MULTIPLE)


def run_turn(runner: CompetitorRunner, timing: Timing, seconds: float, steps: int) -> None:
    """Train for `seconds`, or for `steps` steps where the ranks wait for each other. Collective."""
    runner.barrier()
    first, cpu, began = runner.steps, cpu_seconds(), time.perf_counter()
    if runner.entry.free_running:
        while time.perf_counter() - began < seconds:
            runner.step()
    else:
        for _ in range(steps):
            runner.step()
    timing.seconds += time.perf_counter() - began
    timing.cpu_s += cpu_seconds() - cpu
    timing.steps += runner.steps - first
    runner.barrier()


def collect_metrics(runner: CompetitorRunner, timing: Timing) -> dict[str, float]:
    """Finish a competitor and return its metrics. Collective."""
    metrics = {
        "samples_per_s": timing.steps * runner.batch / timing.seconds,
        "cpu_s": timing.cpu_s,
        "steps": float(timing.steps),
    }
    runner.finish()
    if runner.learner is not None:
        runner.learner.recorder.record()
        total = runner.learner.recorder.total
        metrics["exchanges_per_step"] = total["exchanges"] / max(total["steps"], 1)
    runner.barrier()
    return metrics
