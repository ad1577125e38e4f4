"""A learner: a module, its optimizer and a strategy at one place of the job.

`roundelay.join` gives one to people who keep their own loop; the training loop of `roundelay train` is built on the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from roundelay import strategies
from roundelay.core.contracts import EventWriter
from roundelay.core.flat import Flat
from roundelay.core.update_log import UpdateLog
from roundelay.data.epoch_order import epoch_order
from roundelay.engine.config import EngineConfig
from roundelay.engine.heartbeat import HeartbeatMonitor
from roundelay.engine.run_metadata import environment, mixing
from roundelay.engine.sharding import BatchLease, DynamicSharding, ShardPlan, StaticSharding
from roundelay.engine.straggler import slowdown
from roundelay.errors import DataError, PeerLost, UsageError
from roundelay.launch.context import DistributedContext
from roundelay.metrics.recorder import MetricsRecorder
from roundelay.optim.adapter import OptimizerAdapter
from roundelay.optim.lr_schedule import lr_schedule
from roundelay.strategies.base import Strategy, innermost
from roundelay.strategies.step import StepInfo
from roundelay.strategies.worker import Worker
from roundelay.topology.resolver import SeededTopologies


def build_strategy(options: EngineConfig) -> Strategy:
    """The strategy with its settings; `topology` goes to whichever strategy has such a setting."""
    defaults = {"topology": options.topology} if options.topology else {}
    return strategies.build(options.strategy, options.strategy_options, defaults)


class Learner:
    """One learner of the job. A context manager: leaving it averages the living learners' models into the module."""

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: EngineConfig,
        events: EventWriter | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.context, self.options = context, options
        self.strategy = strategy or build_strategy(options)
        self.flat = Flat(module)
        self.optimizer = OptimizerAdapter(self.flat, optimizer, options.max_grad_norm)
        self.module = module
        traits = self.strategy.traits
        hierarchical = traits.hierarchical
        machine = context.machine_of(context.rank) if hierarchical else [context.rank]
        self.machine, self.node_leaders = machine, context.node_leaders if hierarchical else list(range(context.size))
        self.job = context.comm
        node = self.job.new_group(machine, f"machine-{machine[0]}") if len(machine) > 1 else None
        comm = self.job if not hierarchical or context.size == 1 else self.job.new_group(self.node_leaders, "leaders") or node
        assert comm is not None
        self._communicators = [n for n in (node, comm) if n is not None and n is not self.job]
        if context.size > 1:
            self.job.broadcast(self.flat.phi)  # everybody begins as rank 0 does
        self.worker = Worker(
            comm,
            self.flat,
            self.optimizer,
            SeededTopologies(options.seed),
            context.runtime.clock,
            shares_weights=traits.shares_weights and context.rank in self.node_leaders,
            deterministic_reduce=options.deterministic_reduce,
            weight_gradients=traits.sample_weighting == "gradient",
            steps_per_exchange=options.steps_per_exchange,
            node=node,
        )
        self.events = events or context.runtime.events(None, context.rank)
        self.recorder = MetricsRecorder(self.worker, self.job, self.events, options.log_every_s, context.runtime)
        self.watchdog = HeartbeatMonitor(
            self.worker, self.job, context, self.events, options.timeout_s, lambda: self.recorder.last
        )
        self.sharding: StaticSharding | DynamicSharding | None = None
        self.completed: list[tuple[int, int]] = []
        self.steps = 0
        self.position = 0
        self._slow = slowdown(options.straggler, context.size, context.rank)
        self._claim: BatchLease | None = None
        self._own_loader = False
        self._has_schedule = options.schedule != "constant" or options.warmup_epochs > 0
        self._left = self._finished = False
        self.update_log: UpdateLog | None = None
        self._brought: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def size(self) -> int:
        """Learners in the whole job."""
        return self.context.size

    # -- life ------------------------------------------------------------------------------------------------------

    def record(self, update_log: UpdateLog) -> None:
        """From now on, before the start, the order of events is noted down; so that they can be done again in that order."""
        self.update_log = update_log
        self.worker.record(update_log)

    def start(self, **about: Any) -> None:
        """`about`: what else a report should know of this run."""
        if self.rank == 0:
            self.events.write(
                "start",
                **about,
                strategy=self.options.strategy,
                learners=self.size,
                hosts=self.context.hosts,
                parameters=self.flat.phi.numel(),
                mixing=mixing(self.strategy, self.context, self.node_leaders),
                environment=environment(self.context.device),
            )
        self.strategy.start(self.worker)
        self.watchdog.start()
        self.recorder.start()

    def __enter__(self) -> Learner:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()

    def leave(self) -> None:
        """No more work: comes to the rendezvous that others still have before them."""
        finish = getattr(innermost(self.strategy), "finish", None)
        if finish is None or self._left or not self.worker.is_node_leader:
            return
        self._left = True
        if isinstance(self.sharding, DynamicSharding):
            self.worker.step_info = self.sharding.empty_step()
        finish(self.worker)

    def finish(self) -> Tensor:
        """No more work: leave the exchanges together, then take the average of the living as the module's weights."""
        if self._finished:
            return self.flat.phi
        self._finished = True
        self.leave()
        if self.worker.gossip_handle is not None:
            with self.worker.timer("comm"):
                self.worker.gossip_handle.finish()
        self.recorder.record()
        mean = self.final_average()
        if self.update_log is not None:
            self.update_log.close(self._brought)  # all have come to the closing mean: nobody adds to anybody any more
        self.flat.phi.copy_(mean)
        return self.flat.phi

    def final_average(self) -> Tensor:
        """The mean of the living workers' w, on every learner; their buffers become the mean of their buffers."""
        worker = self.worker
        if self.context.size == 1:
            return worker.last()
        mean = worker.last()
        if self.update_log is not None and worker.is_node_leader:
            self._brought = mean.clone()
        buffers = self.flat.buffer_vector()
        if worker.is_node_leader and worker.size > 1:
            comm = worker.comm
            living = json.loads(self.job.store.claim("closing-members", json.dumps(comm.live_ranks())))
            if len(living) < comm.size:
                part = comm.new_group(living, "closing")
                if part is None:
                    raise PeerLost(
                        "the others took this rank for dead: it gave no sign of life for too long, and they ended without it",
                        where=f"rank {self.context.rank}",
                        hint="the machine may have been suspended or crowded; go on from the last checkpoint with resume=auto",
                    )
                self._communicators.append(part)
                comm = part
            if comm.size > 1:
                mean = comm.all_reduce_mean(mean, None, self.options.deterministic_reduce).wait()
                if buffers.numel():
                    buffers = comm.all_reduce_mean(buffers, None, self.options.deterministic_reduce).wait()
        if worker.node is not None:
            worker.node.broadcast(mean)
            if buffers.numel():
                worker.node.broadcast(buffers)
        if buffers.numel():
            self.flat.load_buffers(buffers)
        return mean

    def close(self) -> None:
        self.watchdog.stop()
        self.worker.close()
        for comm in reversed(self._communicators):
            comm.close()
        self.context.close()
        self.events.close()

    # -- one step --------------------------------------------------------------------------------------------------

    def run_step(self, step_info: StepInfo, compute: Callable[[], float] | None, span: tuple[int, int] | None = None) -> None:
        """One step of the strategy on this share of the data."""
        worker = self.worker
        self.optimizer.set_position(step_info.position)
        worker.begin(
            step_info, self._checked(compute, step_info.local_samples) if compute is not None else (lambda: float("nan"))
        )
        if step_info.local_samples:
            self.recorder.samples += step_info.local_samples
        self.strategy.step(worker)
        worker.end()
        self.steps += 1
        self.position = max(self.position, span[1] if span is not None else step_info.position + step_info.global_samples)
        if span is not None and self.worker.is_node_leader:
            self.completed.append(span)
            if isinstance(self.sharding, DynamicSharding):
                self.sharding.complete(span)
        self.recorder.stepped()

    def latest_metrics_of_all_ranks(self) -> list[dict[str, Any]]:
        """The last metrics of all learners that have some, so far as they are known here; costs the others nothing."""
        mine = [{"rank": self.context.rank, **self.recorder.last}] if self.recorder.last else []
        return mine + self.watchdog.metrics()

    def _checked(self, compute: Callable[[], float], samples: int) -> Callable[[], float]:
        def run() -> float:
            loss = self.context.runtime.compute(compute, samples, self._slow)
            if not math.isfinite(loss):
                raise DataError(
                    f"the loss is {loss}",
                    where=f"rank {self.context.rank}, step {self.steps}, sample {self.position}",
                    hint="lower the rate (lr=…), add a warm-up or max_grad_norm=…; resume=auto goes on from the last good checkpoint",
                )
            return loss

        return run

    def shard(
        self, samples: int, total: int, batches: Sequence[int], first: int = 0, missing_ranges: Sequence[tuple[int, int]] = ()
    ) -> StaticSharding | DynamicSharding:
        """How the data is dealt in this run; also what the schedule and the learners' weights go by."""
        o = self.options
        if self._has_schedule:
            self.optimizer.factor = lr_schedule(o.schedule, samples, total, o.warmup_epochs, o.anneal_after_epochs)
        dealt = ShardPlan(samples, total, batches, self.context.rank, self.machine, self.node_leaders, first)
        self.position = first
        race = self.strategy.traits.sharding == "dynamic"
        survives = self.strategy.traits.survives_failures
        self.sharding = (
            DynamicSharding(dealt, self.job.store, missing_ranges, survives, lambda: self.watchdog.dead)
            if race
            else StaticSharding(dealt)
        )
        return self.sharding

    # -- for people with a loop of their own -----------------------------------------------------------------------

    def claim(self, dataset: Any, batch: int = 64, epochs: float = 1.0) -> Iterator[TensorBatch]:
        """Batches of a dataset (anything with len and []), dealt or raced for as the strategy says; ends on all learners
        by protocol. Every sample is seen once per epoch by somebody. Call step() once for every batch."""
        if self.sharding is not None:
            raise UsageError(
                "claim() was called a second time", where="learner.claim", hint="call it once, with epochs=… for several passes"
            )
        samples = len(dataset)
        if samples == 0:
            raise DataError("the dataset is empty", where="learner.claim", hint="check what it was made from")
        sharding = self.shard(samples, round(samples * epochs), [batch] * self.context.size)
        orders: dict[int, Any] = {}
        for claim in sharding:
            if claim.epoch not in orders:
                orders = {claim.epoch: epoch_order(self.options.seed, claim.epoch, samples)}
            self._claim = claim
            yield collate(dataset, orders[claim.epoch][claim.start : claim.stop])
            if self._claim is not None:
                raise UsageError(
                    "a batch went by without learner.step()", where="learner.claim", hint="call step() once per batch"
                )

    def until_all_done(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Items of one's own loader, of any length; ends when everybody's loader has ended. Strategies with a rendezvous let
        a learner whose loader has ended join the others' steps with weight 0."""
        traits = self.strategy.traits
        if traits.sharding == "dynamic" and (not traits.shares_weights or len(self.machine) > 1):
            raise UsageError(
                f"{self.options.strategy} cannot tell when the others' loaders end: it races for work and yet waits for all",
                where="learner.until_all_done",
                hint="use learner.claim(dataset), or sharding='static', or a strategy without a rendezvous such as adpsgd",
            )
        if self._has_schedule:
            raise UsageError(
                "a schedule needs to know how many samples there are in all",
                where="learner.until_all_done",
                hint="use learner.claim(dataset), or schedule='constant' and a torch.optim.lr_scheduler of your own",
            )
        self._own_loader = True
        yield from loader
        if self.strategy.traits.sharding == "static":
            while self._join_in():
                pass

    def _join_in(self) -> bool:
        step_info = self._own_share(0)
        if step_info.global_samples == 0:
            return False
        self.run_step(step_info, None)
        return True

    def _own_share(self, samples: int) -> StepInfo:
        size = self.context.size
        if self.strategy.traits.sharding == "dynamic":
            position = self.job.store.add("claimed", samples) - samples
            return StepInfo(samples, samples, samples * size, position)
        total = machine = samples
        if size > 1:
            counts = torch.zeros(size, dtype=torch.float64)
            counts[self.context.rank] = samples
            counts = size * self.job.all_reduce_mean(counts).wait()
            total, machine = round(float(counts.sum())), round(float(counts[self.machine].sum()))
        return StepInfo(samples, machine, total, self.position)

    def step(self, closure: Callable[[], Tensor], samples: int) -> float:
        """One step: `closure` returns the loss of this learner's batch of `samples` samples; backward is done here."""

        def compute() -> float:
            loss = closure()
            loss.backward()
            return float(loss.detach())

        if self._own_loader:
            self.run_step(self._own_share(samples), compute)
        else:
            if self._claim is None:
                raise UsageError(
                    "step() without a batch",
                    where="learner.step",
                    hint="iterate over learner.claim(...) or until_all_done(...)",
                )
            claim, self._claim = self._claim, None
            if samples not in (claim.step_info.local_samples,):
                raise UsageError(
                    f"step() was told of {samples} samples, the batch has {claim.step_info.local_samples}",
                    where="learner.step",
                    hint="pass len(batch)",
                )
            self.run_step(claim.step_info, compute, claim.span)
        return self.worker.loss

    @contextmanager
    def swapped_weights(self, vector: Tensor) -> Iterator[nn.Module]:
        """The module with other weights, for the length of a block."""
        keep = self.flat.phi.clone()
        self.flat.phi.copy_(vector)
        training = self.module.training
        self.module.eval()
        try:
            yield self.module
        finally:
            self.module.train(training)
            self.flat.phi.copy_(keep)


class TensorBatch:
    """Samples stacked field by field: x, y, or fields[i]."""

    def __init__(self, fields: Sequence[Tensor], samples: int) -> None:
        self.fields, self._samples = fields, samples

    @property
    def x(self) -> Tensor:
        return self.fields[0]

    @property
    def y(self) -> Tensor:
        return self.fields[1]

    def __len__(self) -> int:
        return self._samples


def collate(dataset: Any, places: Any) -> TensorBatch:
    """The samples at these places as one batch; of no places, an empty one."""
    chosen = [int(p) for p in places]
    items = [dataset[p] for p in (chosen or [0])]
    rows = [item if isinstance(item, tuple | list) else (item,) for item in items]
    fields = [torch.stack([torch.as_tensor(row[f]) for row in rows]) for f in range(len(rows[0]))]
    return TensorBatch(fields if chosen else [field[:0] for field in fields], len(chosen))
