"""The Runtime of a learner in virtual time: real arithmetic, modeled durations."""

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
"""Random factors that are sampled at once."""
PACE_STREAM = 0x9ACE
"""The RNG stream of step durations."""


class ComputePace:
    """The duration of a learner's gradients, a function of (seed, rank, step) and of the time."""

    def __init__(self, cluster: Cluster, machine: int, speed: float, seed: int, rank: int) -> None:
        self._per_sample, self._per_step = cluster.learner.seconds_per_sample / speed, cluster.learner.seconds_per_step / speed
        self._jitter = cluster.learner.jitter
        self._rng = np.random.default_rng([seed, PACE_STREAM, rank])
        self._factors: list[float] = []
        self._stragglers = [s for s in cluster.straggler if s.learner == rank or s.machine == machine]

    def seconds(self, samples: int, now: float) -> float:
        """Return the duration of a gradient of `samples` samples that begins at `now`."""
        seconds = self._per_step + samples * self._per_sample
        if self._jitter.kind != "constant":
            if not self._factors:
                self._factors = self._sample_factors()
            seconds *= self._factors.pop()
        for straggler in self._stragglers:
            if straggler.from_s <= now < straggler.to_s:
                seconds *= straggler.factor
        return seconds

    def _sample_factors(self) -> list[float]:
        """Sample factors with mean 1."""
        jitter = self._jitter
        if jitter.kind == "gaussian":
            return self._rng.lognormal(-0.5 * jitter.spread**2, jitter.spread, BLOCK).tolist()
        # a Pareto variable that starts at 0 has the mean 1 / (tail - 1)
        excess = self._rng.pareto(jitter.tail, BLOCK) * (jitter.tail - 1)
        return ((1 + jitter.spread * excess) / (1 + jitter.spread)).tolist()


class EventSink:
    """One file for the events of all learners of a simulated job."""

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
    """The event log of one learner, stamped with virtual time."""

    def __init__(self, sink: EventSink | None, rank: int, clock: Callable[[], float]) -> None:
        self.rank, self._sink, self._clock = rank, sink, clock

    def now(self) -> float:
        return self._clock()

    def write(self, event: str, **metrics: Any) -> None:
        if self._sink is not None:
            self._sink.write(json.dumps({"event": event, "time": round(self.now(), 6), "rank": self.rank, **metrics}))

    def close(self) -> None:
        """Do nothing: the sink is shared and closed by SimulatedCluster."""


class SimulatedRuntime:
    """The runtime of one learner."""

    def __init__(
        self, job: SimulatedJob, rank: int, speed: float = 1.0, sinks: dict[Path | None, EventSink] | None = None
    ) -> None:
        self._job, self._rank, self._loop = job, rank, job.loop
        machine = job.network.machine[rank]
        self.pace = ComputePace(job.cluster, machine, speed, job.seed, rank)
        self._loading_s = 1 / job.cluster.loader.samples_per_s
        self._backward = job.cluster.learner.backward_share
        self._sinks = sinks if sinks is not None else {}
        self._rng_state: Tensor | None = None
        self.prefetchers: list[Any] = []
        self.gradients: list[tuple[float, float, int]] = []
        """(begin, end, samples) of every gradient."""
        self.computed_s = 0.0
        self.clock = job.now

    def cpu_s(self) -> float:
        return self.computed_s

    def stamp(self) -> str:
        return f"{self._loop.now:12.3f} s"

    # -- RNG -----------------------------------------------------------------------------------------------------------

    def seed_init(self, number: int) -> None:
        torch.default_generator.manual_seed(number)  # torch.manual_seed also seeds devices, which takes milliseconds

    def seed_rank(self, number: int) -> None:
        self._rng_state = torch.Generator().manual_seed(number).get_state()

    def rng_state(self) -> Tensor:
        return torch.get_rng_state() if self._rng_state is None else self._rng_state.clone()

    def set_rng_state(self, state: Tensor) -> None:
        self._rng_state = state.clone()

    def rng_scope(self) -> AbstractContextManager[object]:
        return nullcontext() if self._job.model_bytes or self._rng_state is None else self._swapped_rng()

    @contextmanager
    def _swapped_rng(self) -> Iterator[None]:
        assert self._rng_state is not None
        torch.set_rng_state(self._rng_state)
        try:
            yield
        finally:
            self._rng_state = torch.get_rng_state()

    # -- compute and data ----------------------------------------------------------------------------------------------

    def compute(self, gradient: Callable[[], float], samples: int, slow: float) -> float:
        """Compute a gradient, let its modeled duration pass, and return the loss."""
        job, now = self._job, self._loop.now
        own = slow * self.pace.seconds(samples, now)
        seconds = own + job.delay_s[self._rank]
        job.delay_s[self._rank] = 0.0
        end = now + seconds
        self.gradients.append((now, end, samples))
        self.computed_s += own
        job.backward[self._rank] = (end - self._backward * seconds, end)
        if job.model_bytes:
            loss = gradient()
        else:
            with self.rng_scope():
                loss = gradient()
        if not job.model_bytes:  # in timing-only mode the gradient is sent after this call as if it were sent during it
            job.backward[self._rank] = None
        job.sleep_until(self._rank, "compute", end)
        return loss

    def prefetch(
        self, claims: Iterable[C], prepare: Callable[[C], Any], samples: Callable[[C], int], loaders: int
    ) -> Prefetcher[C]:
        """Prepare batches one ahead, in a process of their own. `loaders` is ignored."""
        if self._job.model_bytes and not self._loading_s:
            return _SynchronousLoader(claims, prepare)

        def batches() -> Iterator[tuple[C, Any]]:
            for claim in claims:
                batch = prepare(claim)
                if self._loading_s:
                    self._loop.sleep(samples(claim) * self._loading_s)
                yield claim, batch

        prefetcher = _PrefetchProcess(self._job, self._rank, batches())
        self.prefetchers.append(prefetcher)
        return prefetcher

    def start_periodic(self, poll: Callable[[], None], on_failure: Callable[[], None], every_s: float) -> Callable[[], None]:
        """Call `on_failure` when a rank fails; `poll` is never needed. Returns a function that ends the subscription."""
        self._job.watchers[self._rank] = on_failure
        return lambda: self._job.watchers.pop(self._rank, None) and None

    def events(self, path: Path | None, rank: int) -> EventLog:
        sink = self._sinks.get(path)
        if sink is None and path is not None:
            sink = self._sinks[path] = EventSink(path)
        return SimulatedEventLog(sink, rank, self.clock)

    def owns_terminal(self, rank: int) -> bool:
        return rank == 0


class _SynchronousLoader(Generic[C]):
    """The prefetcher of timing-only mode with an unlimited loader: loading takes no time and needs no process.

    A lease is claimed when it is needed and not two ahead, so with dynamic sharding the last learner can end up to two
    batches earlier.
    """

    last_s = 0.0

    def __init__(self, claims: Iterable[C], prepare: Callable[[C], Any]) -> None:
        self._claims, self._prepare = claims, prepare

    def __iter__(self) -> Generator[tuple[C, Any], None, None]:
        for claim in self._claims:
            yield claim, self._prepare(claim)


class _PrefetchProcess:
    """A prefetcher with a process of its own and a queue of one batch, as a loader thread has."""

    def __init__(self, job: SimulatedJob, rank: int, items: Iterable[Any]) -> None:
        self._loop, self._job, self._rank, self._items = job.loop, job, rank, items
        self._queue: deque[Any] = deque()
        self._producer: Any = None
        self._consumer: Any = None
        self.process: Any = None
        self.last_s = 0.0

    def _run(self) -> None:
        try:
            for item in self._items:
                self._put(item)
            self._put(END)
        except Exception as error:  # raised by the learner
            self._put(error)

    def _put(self, item: Any) -> None:
        while self._queue:
            self._producer = self._loop.current
            self._loop.wait(lambda: f"rank {self._rank} to take its next batch")
        self._queue.append(item)
        if self._consumer is not None:
            self._loop.wake(self._consumer, self._loop.now)
            self._consumer = None

    def __iter__(self) -> Generator[Any, None, None]:
        self.process = self._loop.spawn(f"the loader of rank {self._rank}", self._run)
        while True:
            began = self._loop.now
            while not self._queue:
                self._consumer = self._loop.current
                self._job.wait(self._rank, "data", lambda: "its next batch")
            item = self._queue.popleft()
            self.last_s = self._loop.now - began
            if self._producer is not None:
                self._loop.wake(self._producer, self._loop.now)
                self._producer = None
            if item is END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        if self.process is not None:
            self._loop.kill(self.process)
