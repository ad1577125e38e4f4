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
from roundelay.strategies.base import Strategy
from roundelay.strategies.worker import StepInfo, Worker
from roundelay.topology.resolver import SeededTopologies


def build_strategy(options: EngineConfig) -> Strategy:
    """The strategy with its settings; `topology` goes to whichever strategy has such a setting."""
    settings = dict(options.strategy_options)
    innermost = options.strategy.split("(")[-1].rstrip(") ")
    cls = strategies.find("adpsgd" if innermost == "hierarchical" else innermost)
    if "topology" in getattr(cls, "__dataclass_fields__", {}) and options.topology:
        settings.setdefault("topology", options.topology)
    return strategies.build(options.strategy, settings)


class Learner:
    """One learner of the job. A context manager: leaving it averages the living learners' models into the module."""

    def __init__(
        self,
        place: DistributedContext,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: EngineConfig,
        events: EventWriter | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.place, self.options = place, options
        self.strategy = strategy or build_strategy(options)
        self.flat = Flat(module)
        self.optimizer = OptimizerAdapter(self.flat, optimizer, options.clip)
        self.module = module
        traits = self.strategy.traits
        hierarchical = hasattr(self.strategy, "outer")
        machine = place.machine_of(place.rank) if hierarchical else [place.rank]
        self.machine, self.leaders = machine, place.leaders if hierarchical else list(range(place.size))
        self.job = place.net
        node = self.job.part(machine, f"machine-{machine[0]}") if len(machine) > 1 else None
        net = self.job if not hierarchical or place.size == 1 else self.job.part(self.leaders, "leaders") or node
        assert net is not None
        self._nets = [n for n in (node, net) if n is not None and n is not self.job]
        if place.size > 1:
            self.job.cast(self.flat.phi)  # everybody begins as rank 0 does
        self.worker = Worker(
            net,
            self.flat,
            self.optimizer,
            SeededTopologies(options.seed),
            place.host.clock,
            published=traits.published and place.rank in self.leaders,
            exact=options.exact,
            weighs_steps=traits.weighs == "step",
            gradients_per_meeting=options.gradients_per_meeting,
            node=node,
        )
        self.events = events or place.host.events(None, place.rank)
        self.recorder = MetricsRecorder(self.worker, self.job, self.events, options.log_every_s, place.host)
        self.watchdog = HeartbeatMonitor(
            self.worker, self.job, place, self.events, options.timeout_s, lambda: self.recorder.last
        )
        self.claims: StaticSharding | DynamicSharding | None = None
        self.completed: list[tuple[int, int]] = []
        self.steps = 0
        self.position = 0
        self._slow = slowdown(options.slow, place.size, place.rank)
        self._claim: BatchLease | None = None
        self._own_loader = False
        self._has_schedule = options.schedule != "constant" or options.warmup_epochs > 0
        self._left = self._finished = False
        self.history: UpdateLog | None = None
        self._brought: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        """Learners in the whole job."""
        return self.place.size

    # -- life ------------------------------------------------------------------------------------------------------

    def record(self, history: UpdateLog) -> None:
        """From now on, before the start, the order of events is noted down; so that they can be done again in that order."""
        self.history = history
        self.worker.record(history)

    def start(self, **about: Any) -> None:
        """`about`: what else a report should know of this run."""
        if self.rank == 0:
            self.events.write(
                "start",
                **about,
                strategy=self.options.strategy,
                learners=self.size,
                hosts=self.place.hosts,
                parameters=self.flat.phi.numel(),
                mixing=mixing(self.strategy, self.place, self.leaders),
                environment=environment(self.place.device),
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
        if finish is None or self._left or not self.worker.leads:
            return
        self._left = True
        if isinstance(self.claims, DynamicSharding):
            self.worker.share = self.claims.nothing_left()
        finish(self.worker)

    def finish(self) -> Tensor:
        """No more work: leave the meetings together, then take the average of the living as the module's weights."""
        if self._finished:
            return self.flat.phi
        self._finished = True
        self.leave()
        if self.worker.meetings is not None:
            with self.worker.spent("comm"):
                self.worker.meetings.finish()
        self.recorder.record()
        mean = self.closing_mean()
        if self.history is not None:
            self.history.close(self._brought)  # all have come to the closing mean: nobody adds to anybody any more
        self.flat.phi.copy_(mean)
        return self.flat.phi

    def closing_mean(self) -> Tensor:
        """The mean of the living workers' w, on every learner; their buffers become the mean of their buffers."""
        worker = self.worker
        if self.place.size == 1:
            return worker.last()
        mean = worker.last()
        if self.history is not None and worker.leads:
            self._brought = mean.clone()
        buffers = self.flat.buffer_vector()
        if worker.leads and worker.size > 1:
            net = worker.net
            living = json.loads(self.job.store.claim("closing-members", json.dumps(net.living())))
            if len(living) < net.size:
                part = net.part(living, "closing")
                if part is None:
                    raise PeerLost(
                        "the others took this rank for dead: it gave no sign of life for too long, and they ended without it",
                        where=f"rank {self.place.rank}",
                        do="the machine may have been suspended or crowded; go on from the last checkpoint with resume=auto",
                    )
                self._nets.append(part)
                net = part
            if net.size > 1:
                mean = net.start_mean(mean, None, self.options.exact).wait()
                if buffers.numel():
                    buffers = net.start_mean(buffers, None, self.options.exact).wait()
        if worker.node is not None:
            worker.node.cast(mean)
            if buffers.numel():
                worker.node.cast(buffers)
        if buffers.numel():
            self.flat.load_buffers(buffers)
        return mean

    def close(self) -> None:
        self.watchdog.stop()
        self.worker.close()
        for net in reversed(self._nets):
            net.close()
        self.place.close()
        self.events.close()

    # -- one step --------------------------------------------------------------------------------------------------

    def advance(self, share: StepInfo, compute: Callable[[], float] | None, span: tuple[int, int] | None = None) -> None:
        """One step of the strategy on this share of the data."""
        worker = self.worker
        self.optimizer.set_position(share.position)
        worker.begin(share, self._checked(compute, share.own) if compute is not None else (lambda: float("nan")))
        if share.own:
            self.recorder.samples += share.own
        self.strategy.step(worker)
        worker.end()
        self.steps += 1
        self.position = max(self.position, span[1] if span is not None else share.position + share.round_samples)
        if span is not None and self.worker.leads:
            self.completed.append(span)
            if isinstance(self.claims, DynamicSharding):
                self.claims.complete(span)
        self.recorder.stepped()

    def everybody(self) -> list[dict[str, Any]]:
        """The last figures of all learners that have some, so far as they are known here; costs the others nothing."""
        mine = [{"rank": self.place.rank, **self.recorder.last}] if self.recorder.last else []
        return mine + self.watchdog.figures()

    def _checked(self, compute: Callable[[], float], samples: int) -> Callable[[], float]:
        def run() -> float:
            loss = self.place.host.compute(compute, samples, self._slow)
            if not math.isfinite(loss):
                raise DataError(
                    f"the loss is {loss}",
                    where=f"rank {self.place.rank}, step {self.steps}, sample {self.position}",
                    do="lower the rate (lr=…), add a warm-up or clip=…; resume=auto goes on from the last good checkpoint",
                )
            return loss

        return run

    def deal(
        self, samples: int, total: int, batches: Sequence[int], first: int = 0, holes: Sequence[tuple[int, int]] = ()
    ) -> StaticSharding | DynamicSharding:
        """How the data is dealt in this run; also what the schedule and the learners' weights go by."""
        o = self.options
        if self._has_schedule:
            self.optimizer.factor = lr_schedule(o.schedule, samples, total, o.warmup_epochs, o.anneal_after_epochs)
        dealt = ShardPlan(samples, total, batches, self.place.rank, self.machine, self.leaders, first)
        self.position = first
        race = self.strategy.traits.claims == "race"
        survives = self.strategy.traits.survives_death
        self.claims = (
            DynamicSharding(dealt, self.job.store, holes, survives, lambda: self.watchdog.dead)
            if race
            else StaticSharding(dealt)
        )
        return self.claims

    # -- for people with a loop of their own -----------------------------------------------------------------------

    def claim(self, dataset: Any, batch: int = 64, epochs: float = 1.0) -> Iterator[TensorBatch]:
        """Batches of a dataset (anything with len and []), dealt or raced for as the strategy says; ends on all learners
        by protocol. Every sample is seen once per epoch by somebody. Call step() once for every batch."""
        if self.claims is not None:
            raise UsageError(
                "claim() was called a second time", where="learner.claim", do="call it once, with epochs=… for several passes"
            )
        samples = len(dataset)
        if samples == 0:
            raise DataError("the dataset is empty", where="learner.claim", do="check what it was made from")
        claims = self.deal(samples, round(samples * epochs), [batch] * self.place.size)
        orders: dict[int, Any] = {}
        for claim in claims:
            if claim.epoch not in orders:
                orders = {claim.epoch: epoch_order(self.options.seed, claim.epoch, samples)}
            self._claim = claim
            yield collate(dataset, orders[claim.epoch][claim.start : claim.stop])
            if self._claim is not None:
                raise UsageError(
                    "a batch went by without learner.step()", where="learner.claim", do="call step() once per batch"
                )

    def until_all_done(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Items of one's own loader, of any length; ends when everybody's loader has ended. Strategies with a rendezvous let
        a learner whose loader has ended join the others' steps with weight 0."""
        traits = self.strategy.traits
        if traits.claims == "race" and (not traits.published or len(self.machine) > 1):
            raise UsageError(
                f"{self.options.strategy} cannot tell when the others' loaders end: it races for work and yet waits for all",
                where="learner.until_all_done",
                do="use learner.claim(dataset), or claims='turn', or a strategy without a rendezvous such as adpsgd",
            )
        if self._has_schedule:
            raise UsageError(
                "a schedule needs to know how many samples there are in all",
                where="learner.until_all_done",
                do="use learner.claim(dataset), or schedule='constant' and a torch.optim.lr_scheduler of your own",
            )
        self._own_loader = True
        yield from loader
        if self.strategy.traits.claims == "turn":
            while self._join_in():
                pass

    def _join_in(self) -> bool:
        share = self._own_share(0)
        if share.round_samples == 0:
            return False
        self.advance(share, None)
        return True

    def _own_share(self, samples: int) -> StepInfo:
        size = self.place.size
        if self.strategy.traits.claims == "race":
            position = self.job.store.add("claimed", samples) - samples
            return StepInfo(samples, samples, samples * size, position)
        total = machine = samples
        if size > 1:
            counts = torch.zeros(size, dtype=torch.float64)
            counts[self.place.rank] = samples
            counts = size * self.job.start_mean(counts).wait()
            total, machine = round(float(counts.sum())), round(float(counts[self.machine].sum()))
        return StepInfo(samples, machine, total, self.position)

    def step(self, closure: Callable[[], Tensor], samples: int) -> float:
        """One step: `closure` returns the loss of this learner's batch of `samples` samples; backward is done here."""

        def compute() -> float:
            loss = closure()
            loss.backward()
            return float(loss.detach())

        if self._own_loader:
            self.advance(self._own_share(samples), compute)
        else:
            if self._claim is None:
                raise UsageError(
                    "step() without a batch",
                    where="learner.step",
                    do="iterate over learner.claim(...) or until_all_done(...)",
                )
            claim, self._claim = self._claim, None
            if samples not in (claim.share.own,):
                raise UsageError(
                    f"step() was told of {samples} samples, the batch has {claim.share.own}",
                    where="learner.step",
                    do="pass len(batch)",
                )
            self.advance(claim.share, compute, claim.span)
        return self.worker.loss

    @contextmanager
    def borrowed(self, vector: Tensor) -> Iterator[nn.Module]:
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


def innermost(strategy: Any) -> Any:
    """The strategy that talks between machines."""
    while hasattr(strategy, "outer"):
        strategy = strategy.outer
    return strategy
