"""A learner: one rank's module, optimizer and strategy, connected to the other ranks.

The training loop (`roundelay.engine.trainer`) and user loops (`roundelay.api.session`) both drive a learner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from roundelay import strategies
from roundelay.core.contracts import EventWriter
from roundelay.core.flat import Flat
from roundelay.core.update_log import UpdateLog
from roundelay.engine.closing import ClosingAverage, average_once
from roundelay.engine.config import EngineConfig
from roundelay.engine.heartbeat import HeartbeatMonitor
from roundelay.engine.run_metadata import environment, mixing
from roundelay.engine.sharding import DynamicSharding, ShardPlan, Span, StaticSharding
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
    """Build the configured strategy. The setting `topology` is passed on if the strategy has an option of that name."""
    defaults = {"topology": options.topology} if options.topology else {}
    return strategies.build(options.strategy, options.strategy_options, defaults)


def slowdown(straggler: str, size: int, rank: int) -> float:
    """Parse the setting `straggler`, such as "1:2.0,3:1.5", and return the factor of one rank; 1 if it is not listed."""
    factors: dict[int, float] = {}
    for part in filter(None, (p.strip() for p in straggler.split(","))):
        try:
            number, factor = part.split(":")
            factors[int(number)] = float(factor)
        except ValueError as error:
            raise UsageError(
                f"straggler must be a list of rank:factor (got '{part}')",
                where="straggler",
                hint='write straggler="1:2.0,3:1.5"',
            ) from error
    for slow_rank, times in factors.items():
        if not 0 <= slow_rank < size or times < 1.0:
            raise UsageError(
                f"straggler must name ranks 0 to {size - 1} with factors >= 1 (got {slow_rank}:{times:g})",
                where="straggler",
                hint='write straggler="1:2.0,3:1.5"',
            )
    return factors.get(rank, 1.0)


class Learner:
    """One learner of a job.

    As a context manager it starts the strategy, and at the end of the block loads the average of all live learners' models into
    the module. All ranks must create, start and finish their learner: these are collective calls. A learner belongs to one
    thread.
    """

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
        self.job = context.comm
        hierarchical = self.strategy.traits.hierarchical
        self.machine = context.machine_of(context.rank) if hierarchical else [context.rank]
        self.node_leaders = context.node_leaders if hierarchical else list(range(context.size))
        self.worker = self._create_worker(hierarchical)
        self.events = events or context.runtime.events(None, context.rank)
        self.recorder = MetricsRecorder(self.worker, self.job, self.events, options.log_every_s, context.runtime)
        self.watchdog = HeartbeatMonitor(
            self.worker, self.job, context, self.events, lambda: self.recorder.latest, options.failure_s
        )
        self.sharding: StaticSharding | DynamicSharding | None = None
        self.completed: list[Span] = []
        self.steps = 0
        self.position = 0
        """Global samples done by the latest known step of any rank."""
        self.has_schedule = options.schedule != "constant" or options.warmup_epochs > 0
        self.update_log: UpdateLog | None = None
        self._slowdown = slowdown(options.straggler, context.size, context.rank)
        self._left = self._finished = False
        self._final_weights: Tensor | None = None

    def _create_worker(self, hierarchical: bool) -> Worker:
        """Create the groups inside and between nodes, copy rank 0's weights to all ranks, and connect the worker."""
        context, options, machine = self.context, self.options, self.machine
        node = self.job.new_group(machine, f"machine-{machine[0]}") if len(machine) > 1 else None
        comm = self.job if not hierarchical or context.size == 1 else self.job.new_group(self.node_leaders, "leaders") or node
        assert comm is not None
        self.communicators = [c for c in (node, comm) if c is not None and c is not self.job]
        if context.size > 1:
            self.job.broadcast(self.flat.phi)
        traits = self.strategy.traits
        return Worker(
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

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def size(self) -> int:
        """Number of learners in the job."""
        return self.context.size

    # -- start and end -------------------------------------------------------------------------------------------------

    def record(self, update_log: UpdateLog) -> None:
        """Record the order of all updates in `update_log`, for a replay. Call it before `start`."""
        self.update_log = update_log
        self.worker.record(update_log)

    def start(self, **metadata: Any) -> None:
        """Start the strategy, the heartbeats and the recorder. Rank 0 writes `metadata` into the `start` event."""
        if self.rank == 0:
            self.events.write(
                "start",
                **metadata,
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
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.close(error)

    def leave(self) -> None:
        """Take part in the collectives that other learners still have to complete. Call it when there is no more work."""
        finish = getattr(innermost(self.strategy), "finish", None)
        if finish is None or self._left or not self.worker.is_node_leader:
            return
        self._left = True
        if isinstance(self.sharding, DynamicSharding):
            self.worker.step_info = self.sharding.empty_step()
        finish(self.worker)

    def finish(self) -> Tensor:
        """Drain the exchanges and load the average of all live learners' models into the module; return it as a vector.

        Blocks until all live ranks have called it. A second call returns at once.
        """
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
            self.update_log.close(self._final_weights)  # all ranks have finished: no remote updates can follow
        self.flat.phi.copy_(mean)
        return self.flat.phi

    def final_average(self) -> Tensor:
        """Return the mean of the live workers' w on every learner, and load the mean of their buffers. Collective.

        With a strategy that survives failures it is repeated without the ranks that fail meanwhile. Raises PeerLost if the
        other ranks finished without this one.
        """
        worker = self.worker
        if self.context.size == 1:
            return worker.last()
        mean = worker.last()
        if self.update_log is not None and worker.is_node_leader:
            self._final_weights = mean.clone()
        buffers = self.flat.buffer_vector()
        survives = self.strategy.traits.survives_failures
        if worker.is_node_leader and worker.size > 1:
            if survives:
                mean, buffers = ClosingAverage(self, [mean, buffers]).run()
            else:
                mean, buffers = average_once(worker.comm, [mean, buffers], self.options.deterministic_reduce)
        if worker.node is not None:
            try:
                for vector in (mean, buffers):
                    if vector.numel():
                        worker.node.broadcast(vector)
            except PeerLost:
                if not (survives and worker.is_node_leader):
                    raise
                # the leader has the mean; the rest of its node is lost
        if buffers.numel():
            self.flat.load_buffers(buffers)
        return mean

    def close(self, error: BaseException | None = None) -> None:
        """Stop all threads, close all connections and leave the job, after `error` as a failed rank."""
        self.watchdog.stop(error)
        self.worker.close()
        for comm in reversed(self.communicators):
            comm.close()
        self.context.close(error)
        self.events.close()

    # -- one step ------------------------------------------------------------------------------------------------------

    def run_step(self, step_info: StepInfo, compute: Callable[[], float] | None, span: Span | None = None) -> None:
        """Run one step of the strategy.

        `compute` runs forward and backward on this learner's batch and returns the loss; None if it has no samples in this
        step. `span`: global samples that are done after this step.
        """
        self.watchdog.raise_if_fenced()
        worker = self.worker
        self.optimizer.set_position(step_info.position)
        worker.begin(step_info, self.timed(compute, step_info.local_samples) if compute is not None else (lambda: float("nan")))
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
        self.recorder.on_step()

    def latest_metrics_of_all_ranks(self) -> list[dict[str, Any]]:
        """Return the latest metrics of this rank and of the live ranks whose heartbeats have arrived. Does not communicate."""
        own = [{"rank": self.context.rank, **self.recorder.latest}] if self.recorder.latest else []
        return own + self.watchdog.metrics()

    def timed(self, compute: Callable[[], float], samples: int) -> Callable[[], float]:
        """Wrap `compute`: slow it down by the straggler factor, and raise DataError if the loss is not finite."""

        def run() -> float:
            loss = self.context.runtime.compute(compute, samples, self._slowdown)
            if not math.isfinite(loss):
                raise DataError(
                    f"the loss must be finite (got {loss})",
                    where=f"rank {self.context.rank}, step {self.steps}, sample {self.position}",
                    hint="lower lr, or set warmup_epochs or max_grad_norm; continue from the last checkpoint with resume=auto",
                )
            return loss

        return run

    def shard(
        self, samples: int, total: int, batches: Sequence[int], first: int = 0, missing_ranges: Sequence[Span] = ()
    ) -> StaticSharding | DynamicSharding:
        """Set up the sharding of the data and the learning-rate schedule. All ranks must pass the same arguments.

        samples          samples in one epoch
        total            global samples of the whole run
        batches          batch size of every rank
        first            global samples done before
        missing_ranges   ranges before `first` that still have to be done
        """
        options = self.options
        if self.has_schedule:
            self.optimizer.factor = lr_schedule(
                options.schedule, samples, total, options.warmup_epochs, options.anneal_after_epochs
            )
        plan = ShardPlan(samples, total, batches, self.context.rank, self.machine, self.node_leaders, first)
        self.position = first
        traits = self.strategy.traits
        self.sharding = (
            DynamicSharding(
                plan,
                self.job.store,
                missing_ranges,
                traits.survives_failures,
                lambda: self.watchdog.failed,
                self.context.runtime.clock,
            )
            if traits.sharding == "dynamic"
            else StaticSharding(plan)
        )
        return self.sharding

    @contextmanager
    def swapped_weights(self, vector: Tensor) -> Iterator[nn.Module]:
        """Load other weights into the module, in evaluation mode, for the length of a block."""
        saved = self.flat.phi.clone()
        self.flat.phi.copy_(vector)
        training = self.module.training
        self.module.eval()
        try:
            yield self.module
        finally:
            self.module.train(training)
            self.flat.phi.copy_(saved)
