"""Schedule the learners of a recorded run: one thread, one greenlet per learner, turns in the recorded order.

A learner runs the code of its strategy until it needs a shared vector. There it waits until the next operation of that
vector is its own. Exchanges and snapshots of gossip threads are executed by the scheduler when their turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from greenlet import getcurrent, greenlet
from torch import Tensor

from roundelay.comm.base import weighted_mean, weighted_sum
from roundelay.core import kernels
from roundelay.core.contracts import Matching
from roundelay.core.update_log import Op
from roundelay.errors import DataError
from roundelay.replay.reader import LogEntry

WRITES = frozenset((Op.UPDATE, Op.ASSIGN, Op.REMOTE_ADD))
OWN = frozenset((Op.READ, Op.UPDATE, Op.ASSIGN, Op.FINAL_READ))
ONE_SIDED = frozenset((Op.REMOTE_ADD, Op.REMOTE_GET))


class ReplayScheduler:
    """The shared vectors, their recorded operations, and the learners that wait for their turn."""

    def __init__(self, orders: Sequence[Sequence[LogEntry]], done: Callable[[int], None] = lambda events: None) -> None:
        self.orders = orders
        self.vectors: dict[int, Tensor] = {}
        self.versions = [0] * len(orders)
        self._next = [0] * len(orders)
        self._snapshots: dict[tuple[int, int, int], Tensor] = {}
        self._applied: set[tuple[int, int, int]] = set()
        self._wants: dict[tuple[int, int], tuple[greenlet, frozenset[Op]]] = {}
        self._waits: list[tuple[greenlet, Callable[[], bool]]] = []
        self._hub = getcurrent()
        self._done, self._events = done, 0

    def run(self, learners: Sequence[Callable[[], None]]) -> None:
        """Run all learners to their end. Raises DataError if the log does not fit them."""
        running = [greenlet(learner, parent=self._hub) for learner in learners]
        for learner in running:
            learner.switch()
        while not all(learner.dead for learner in running):
            if not (self._advance_vectors() | self._resume_ready()):
                raise self._stuck()
        while self._advance_vectors():
            pass
        if any(self._next[v] < len(order) for v, order in enumerate(self.orders)):
            raise self._stuck()

    def turn(self, vector: int, actor: int, kinds: frozenset[Op]) -> LogEntry:
        """Wait until the next operation of a vector is one of `kinds` by `actor`, and consume it."""
        self._wants[vector, actor] = (getcurrent(), kinds)
        event: LogEntry = self._hub.switch()
        if event.kind in WRITES:
            self.versions[vector] += 1
        return event

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true."""
        if not ready():
            self._waits.append((getcurrent(), ready))
            self._hub.switch()

    # -- scheduling -------------------------------------------------------------------------------------------------

    def _resume_ready(self) -> bool:
        ready = [entry for entry in self._waits if entry[1]()]
        self._waits = [entry for entry in self._waits if entry not in ready]
        for learner, _ in ready:
            learner.switch()
        return bool(ready)

    def _advance_vectors(self) -> bool:
        moved = False
        for vector in range(len(self.orders)):
            while self._advance(vector):
                moved = True
        return moved

    def _head(self, vector: int) -> LogEntry | None:
        order, at = self.orders[vector], self._next[vector]
        return order[at] if at < len(order) else None

    def _take(self, *vectors: int) -> None:
        for vector in vectors:
            self._next[vector] += 1
        self._events += len(vectors)
        self._done(self._events)

    def _advance(self, vector: int) -> bool:
        """Execute the next operation of a vector if its inputs exist; return whether it did."""
        event = self._head(vector)
        if event is None or vector not in self.vectors:
            return False
        if event.kind in OWN or event.kind in ONE_SIDED:
            waiting = self._wants.get((vector, event.actor))
            if waiting is None or event.kind not in waiting[1]:
                return False
            del self._wants[vector, event.actor]
            self._take(vector)
            waiting[0].switch(event)
            return True
        if event.kind is Op.PAIR_AVERAGE:
            return self._pair_average(vector, event)
        if event.kind is Op.SNAPSHOT:
            self._snapshots[vector, event.actor, event.round] = self.vectors[vector].clone()
        else:
            mine, theirs = (vector, event.actor, event.round), (event.actor, vector, event.round)
            if theirs not in self._snapshots or mine not in self._snapshots:
                return False
            kernels.add_half_difference(self.vectors[vector], self._snapshots[theirs], self._snapshots[mine])
            self.versions[vector] += 1
            self._applied.add(mine)
            if theirs in self._applied:  # both sides have applied their half
                del self._snapshots[mine], self._snapshots[theirs]
                self._applied -= {mine, theirs}
        self._take(vector)
        return True

    def _pair_average(self, vector: int, event: LogEntry) -> bool:
        other = self._head(event.actor)
        if event.actor not in self.vectors or other != LogEntry(Op.PAIR_AVERAGE, vector, event.round):
            return False
        kernels.pair_average(*(self.vectors[v] for v in sorted((vector, event.actor))))
        self.versions[vector] += 1
        self.versions[event.actor] += 1
        self._take(vector, event.actor)
        return True

    def _stuck(self) -> DataError:
        heads = {v: self._head(v) for v in range(len(self.orders))}
        where = "; ".join(
            f"vector {v} at entry {self._next[v] + 1}: {e.kind.name} by {e.actor}" for v, e in heads.items() if e is not None
        )
        return DataError(
            "the recorded order does not fit this run: its next operation cannot be executed",
            where=where[:400] or "learners wait for each other",
            hint="replay with the task, the settings and the roundelay version of the recorded run",
        )


class ReplayedVector:
    """A shared vector whose lock is acquired in the recorded order."""

    def __init__(self, scheduler: ReplayScheduler, rank: int, vector: Tensor) -> None:
        self._scheduler, self.rank, self.vector = scheduler, rank, vector.detach().clone()
        scheduler.vectors[rank] = self.vector
        self._event: LogEntry | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        self._event = self._scheduler.turn(self.rank, self.rank, OWN)
        yield

    def count(self, writes: int = 0) -> tuple[int, int]:
        assert self._event is not None
        if (self._event.kind in WRITES) != bool(writes):
            raise DataError(
                f"the recorded operation is {self._event.kind.name}, but the learner {'writes' if writes else 'reads'}",
                where=f"vector {self.rank}",
                hint="replay with the strategy and the roundelay version of the recorded run",
            )
        return self._scheduler._next[self.rank], self._scheduler.versions[self.rank]

    @property
    def version(self) -> int:
        return self._scheduler.versions[self.rank]


class NullGossip:
    """The gossip handle of a replay: the scheduler executes the recorded exchanges."""

    rounds = exchanges = 0

    def notify_step(self) -> None:
        """Do nothing: the log says when exchanges happened."""

    def finish(self) -> None:
        """Do nothing: the scheduler executes every recorded exchange."""

    def pop_metrics(self) -> dict[str, float]:
        return {}


class PendingResult:
    """The pending result of a collective."""

    def __init__(self, scheduler: ReplayScheduler, ready: Callable[[], bool], finish: Callable[[], Tensor]) -> None:
        self._scheduler, self._ready, self._finish = scheduler, ready, finish

    @property
    def done(self) -> bool:
        return self._ready()

    def wait(self) -> Tensor:
        self._scheduler.until(self._ready)
        return self._finish()


class ReplayGroup:
    """A group of learners and the inputs of their collectives, by number and rank."""

    def __init__(self, scheduler: ReplayScheduler, size: int) -> None:
        self.scheduler, self.size = scheduler, size
        self.inputs: dict[int, dict[int, Any]] = {}


class ReplayCommunicator:
    """The communicator of one learner. Sums are in rank order, as with deterministic_reduce and threads."""

    def __init__(self, group: ReplayGroup, rank: int) -> None:
        self._group, self.rank, self.size, self._scheduler = group, rank, group.size, group.scheduler
        self._number = 0
        self.slot = None

    def _call(self, value: Any, finish: Callable[[dict[int, Any]], Tensor]) -> PendingResult:
        self._number += 1
        table = self._group.inputs.setdefault(self._number, {})
        table[self.rank] = value
        self._group.inputs.pop(self._number - 64, None)  # all ranks have read it
        return PendingResult(self._scheduler, lambda: len(table) == self.size, lambda: finish(table))

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> PendingResult:
        return self._call((x.clone(), weight), weighted_mean)

    def all_reduce_(self, x: Tensor) -> PendingResult:
        def finish(inputs: dict[int, Any]) -> Tensor:
            x.copy_(inputs[0])
            for rank in range(1, self.size):
                x.add_(inputs[rank])
            return x

        return self._call(x.clone(), finish)

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> PendingResult:
        return self._call(x.clone(), lambda inputs: weighted_sum(inputs, row))

    def broadcast(self, x: Tensor) -> None:
        self._call(x.clone() if self.rank == 0 else None, lambda inputs: x.copy_(inputs[0])).wait()

    def node_group(self, like: Tensor) -> ReplayCommunicator:
        return self

    reduce = all_reduce_

    def publish(self, vector: Tensor) -> ReplayedVector:
        kernels.compile_for(vector.dtype)
        return ReplayedVector(self._scheduler, self.rank, vector)

    def gossip(self, shared_weights: Any, matching: Matching, steps_per_exchange: float) -> NullGossip:
        return NullGossip()

    def remote_add(self, peer: int, d: Tensor) -> int:
        self._scheduler.turn(peer, self.rank, ONE_SIDED)
        self._scheduler.vectors[peer].add_(d)
        return self._scheduler.versions[peer] - 1

    def remote_get(self, peer: int, out: Tensor) -> int:
        self._scheduler.turn(peer, self.rank, ONE_SIDED)
        out.copy_(self._scheduler.vectors[peer])
        return self._scheduler.versions[peer]
