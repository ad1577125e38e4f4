"""A learner's host in virtual time: its clock is the world's, its arithmetic is real and takes modelled time."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from roundelay.core.contracts import Prefetcher
from roundelay.metrics.events import EventLog
from roundelay.simulate.cluster import Cluster
from roundelay.simulate.job import SimulatedJob

C = TypeVar("C")
END = object()
BLOCK = 256
PACE = 0x9ACE
"""The purpose of these dice: how long steps take."""


class ComputePace:
    """How long a learner's gradients take: a function of (seed, rank, step) and of the time."""

    def __init__(self, cluster: Cluster, machine: int, speed: float, seed: int, rank: int) -> None:
        self._per_sample, self._per_step = cluster.learner.seconds_per_sample / speed, cluster.learner.seconds_per_step / speed
        self._scatter = cluster.learner.jitter
        self._dice = np.random.default_rng([seed, PACE, rank])
        self._drawn: list[float] = []
        self._slow = [s for s in cluster.straggler if s.learner == rank or s.machine == machine]

    def seconds(self, samples: int, now: float) -> float:
        seconds = self._per_step + samples * self._per_sample
        if self._scatter.kind != "constant":
            if not self._drawn:
                self._drawn = self._draw()
            seconds *= self._drawn.pop()
        for slow in self._slow:
            if slow.from_s <= now < slow.to_s:
                seconds *= slow.factor
        return seconds

    def _draw(self) -> list[float]:
        """Factors around 1, in the mean 1."""
        s = self._scatter
        if s.kind == "gaussian":
            return self._dice.lognormal(-0.5 * s.spread**2, s.spread, BLOCK).tolist()
        # a Pareto variable from 0 has the mean 1 / (tail - 1)
        excess = self._dice.pareto(s.tail, BLOCK) * (s.tail - 1)
        return ((1 + s.spread * excess) / (1 + s.spread)).tolist()


class EventSink:
    """One file for the events of all learners of a virtual job."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = open(path, "a", encoding="utf-8") if path is not None else None  # noqa: SIM115

    def write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class SimulatedEventLog(EventLog):
    """Events in virtual time."""

    def __init__(self, sink: EventSink | None, rank: int, clock: Callable[[], float]) -> None:
        self.rank, self._sink, self._clock = rank, sink, clock

    def now(self) -> float:
        return self._clock()

    def write(self, event: str, **metrics: Any) -> None:
        if self._sink is not None:
            self._sink.write(json.dumps({"event": event, "time": round(self.now(), 6), "rank": self.rank, **metrics}))

    def close(self) -> None:
        """The sink outlives the learner."""


class SimulatedRuntime:
    """One learner's host."""

    def __init__(
        self, job: SimulatedJob, rank: int, speed: float = 1.0, sinks: dict[Path | None, EventSink] | None = None
    ) -> None:
        self._job, self._rank, self._world = job, rank, job.world
        machine = job.network.machine[rank]
        self.pace = ComputePace(job.cluster, machine, speed, job.seed, rank)
        self._loading_s = 1 / job.cluster.loader.samples_per_s
        self._backward = job.cluster.learner.backward_share
        self._sinks = sinks if sinks is not None else {}
        self._dice: Tensor | None = None
        self.feeds: list[Any] = []
        self.done: list[tuple[float, float, int]] = []
        """(from, to, samples) of every gradient."""
        self.computed_s = 0.0
        self.clock = job.now

    def cpu_s(self) -> float:
        return self.computed_s

    def stamp(self) -> str:
        return f"{self._world.now:12.3f} s"

    # -- dice ----------------------------------------------------------------------------------------------------------

    def seed_init(self, number: int) -> None:
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes milliseconds, for devices there are none of here

    def seed_rank(self, number: int) -> None:
        self._dice = torch.Generator().manual_seed(number).get_state()

    def rng_state(self) -> Tensor:
        return torch.get_rng_state() if self._dice is None else self._dice.clone()

    def set_rng_state(self, state: Tensor) -> None:
        self._dice = state.clone()

    def rng_scope(self) -> AbstractContextManager[object]:
        return nullcontext() if self._job.model_bytes or self._dice is None else self._own_dice()

    @contextmanager
    def _own_dice(self) -> Iterator[None]:
        assert self._dice is not None
        torch.set_rng_state(self._dice)
        try:
            yield
        finally:
            self._dice = torch.get_rng_state()

    # -- work ----------------------------------------------------------------------------------------------------------

    def compute(self, gradient: Callable[[], float], samples: int, slow: float) -> float:
        job, now = self._job, self._world.now
        own = slow * self.pace.seconds(samples, now)
        seconds = own + job.stolen[self._rank]
        job.stolen[self._rank] = 0.0
        end = now + seconds
        self.done.append((now, end, samples))
        self.computed_s += own
        job.backward[self._rank] = (end - self._backward * seconds, end)
        if job.model_bytes:
            loss = gradient()
        else:
            with self.rng_scope():
                loss = gradient()
        if not job.model_bytes:  # for timing alone the gradient leaves after this call, as if it had left during it
            job.backward[self._rank] = None
        job.sleep_until(self._rank, "compute", end)
        return loss

    def prefetch(
        self, claims: Iterable[C], prepare: Callable[[C], Any], samples: Callable[[C], int], loaders: int
    ) -> Prefetcher[C]:
        if self._job.model_bytes and not self._loading_s:
            return _SynchronousLoader(claims, prepare)

        def made() -> Iterator[tuple[C, Any]]:
            for claim in claims:
                batch = prepare(claim)
                if self._loading_s:
                    self._world.sleep(samples(claim) * self._loading_s)
                yield claim, batch

        feed = _PrefetchProcess(self._job, self._rank, made())
        self.feeds.append(feed)
        return feed

    def start_periodic(self, look: Callable[[], None], hear: Callable[[], None], every_s: float) -> Callable[[], None]:
        self._job.watchers[self._rank] = hear
        return lambda: self._job.watchers.pop(self._rank, None) and None

    def events(self, path: Path | None, rank: int) -> EventLog:
        sink = self._sinks.get(path)
        if sink is None and path is not None:
            sink = self._sinks[path] = EventSink(path)
        return SimulatedEventLog(sink, rank, self.clock)

    def owns_terminal(self, rank: int) -> bool:
        return rank == 0


class _SynchronousLoader(Generic[C]):
    """Timing alone, from a loader without a limit: what takes no time needs no task of its own.

    A raced batch is claimed when it is needed and not two ahead, so the last learner ends up to two batches earlier."""

    last_s = 0.0

    def __init__(self, claims: Iterable[C], prepare: Callable[[C], Any]) -> None:
        self._claims, self._prepare = claims, prepare

    def __iter__(self) -> Generator[tuple[C, Any], None, None]:
        for claim in self._claims:
            yield claim, self._prepare(claim)


class _PrefetchProcess:
    """The next piece of work, made by a task of its own: one waits, one is in the making, as with a thread and a queue."""

    def __init__(self, job: SimulatedJob, rank: int, items: Iterable[Any]) -> None:
        self._world, self._job, self._rank, self._items = job.world, job, rank, items
        self._queue: deque[Any] = deque()
        self._putter: Any = None
        self._getter: Any = None
        self.task: Any = None
        self.last_s = 0.0

    def _run(self) -> None:
        try:
            for item in self._items:
                self._put(item)
            self._put(END)
        except Exception as error:  # handed to the learner, which raises it
            self._put(error)

    def _put(self, item: Any) -> None:
        while self._queue:
            self._putter = self._world.current
            self._world.wait(lambda: f"rank {self._rank} to take its next batch")
        self._queue.append(item)
        if self._getter is not None:
            self._world.wake(self._getter, self._world.now)
            self._getter = None

    def __iter__(self) -> Generator[Any, None, None]:
        self.task = self._world.spawn(f"the loader of rank {self._rank}", self._run)
        while True:
            asked = self._world.now
            while not self._queue:
                self._getter = self._world.current
                self._job.wait(self._rank, "data", lambda: "its next batch")
            item = self._queue.popleft()
            self.last_s = self._world.now - asked
            if self._putter is not None:
                self._world.wake(self._putter, self._world.now)
                self._putter = None
            if item is END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        if self.task is not None:
            self._world.kill(self.task)
