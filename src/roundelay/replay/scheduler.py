"""Where a recorded run is done again: one thread, one greenlet per learner, and the record says whose turn it is.

A learner runs its strategy's plain code until it wants a published vector; there it waits until the next event of that
vector's update_log is its own. What agents did (exchanges, snapshots) happens here when its turn comes. Nobody waits for time.
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
    """The vectors, their histories, and the learners that act on them."""

    def __init__(self, orders: Sequence[Sequence[LogEntry]], done: Callable[[int], None] = lambda events: None) -> None:
        self.orders = orders
        self.vectors: dict[int, Tensor] = {}
        self.versions = [0] * len(orders)
        self._next = [0] * len(orders)
        self._snapshots: dict[tuple[int, int], Tensor] = {}
        self._met: set[tuple[int, int]] = set()
        self._wants: dict[tuple[int, int], tuple[greenlet, frozenset[Op]]] = {}
        self._waits: list[tuple[greenlet, Callable[[], bool]]] = []
        self._hub = getcurrent()
        self._done, self._events = done, 0

    def play(self, learners: Sequence[Callable[[], None]]) -> None:
        """Runs the learners to their ends; a record that leaves somebody waiting for ever is an error."""
        running = [greenlet(learner, parent=self._hub) for learner in learners]
        for learner in running:
            learner.switch()
        while not all(learner.dead for learner in running):
            if not (self._agents_and_turns() | self._rendezvous()):
                raise self._stuck()
        while self._agents_and_turns():
            pass
        if any(self._next[v] < len(order) for v, order in enumerate(self.orders)):
            raise self._stuck()

    def turn(self, vector: int, actor: int, kinds: frozenset[Op]) -> LogEntry:
        """Waits until the next event of this vector's update_log is the actor's; takes it."""
        self._wants[vector, actor] = (getcurrent(), kinds)
        event: LogEntry = self._hub.switch()
        if event.kind in WRITES:
            self.versions[vector] += 1
        return event

    def until(self, ready: Callable[[], bool]) -> None:
        """Waits for what other learners bring."""
        if not ready():
            self._waits.append((getcurrent(), ready))
            self._hub.switch()

    # -- the hub ---------------------------------------------------------------------------------------------------

    def _rendezvous(self) -> bool:
        ready = [entry for entry in self._waits if entry[1]()]
        self._waits = [entry for entry in self._waits if entry not in ready]
        for learner, _ in ready:
            learner.switch()
        return bool(ready)

    def _agents_and_turns(self) -> bool:
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
        """Does the next event of a vector, if all it needs is there."""
        event = self._head(vector)
        if event is None or vector not in self.vectors:
            return False
        if event.kind in OWN or event.kind in ONE_SIDED:
            wanted = self._wants.get((vector, event.actor))
            if wanted is None or event.kind not in wanted[1]:
                return False
            del self._wants[vector, event.actor]
            self._take(vector)
            wanted[0].switch(event)
            return True
        if event.kind is Op.PAIR_AVERAGE:
            return self._meet(vector, event)
        if event.kind is Op.SNAPSHOT:
            self._snapshots[vector, event.round] = self.vectors[vector].clone()
        else:
            mine, theirs = ((v, event.round) for v in (vector, event.actor))
            if theirs not in self._snapshots or mine not in self._snapshots:
                return False
            kernels.add_half_difference(self.vectors[vector], self._snapshots[theirs], self._snapshots[mine])
            self.versions[vector] += 1
            self._met.add(mine)
            if theirs in self._met:  # both sides have taken what they need
                del self._snapshots[mine], self._snapshots[theirs]
                self._met -= {mine, theirs}
        self._take(vector)
        return True

    def _meet(self, vector: int, event: LogEntry) -> bool:
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
        said = "; ".join(
            f"vector {v} at event {self._next[v] + 1}: {e.kind.name} by {e.actor}" for v, e in heads.items() if e is not None
        )
        return DataError(
            "the record does not fit this run: what it says next cannot happen",
            where=said[:400] or "learners wait for each other",
            hint="replay with the task, the settings and the version of roundelay the run was recorded with",
        )


class ReplayedVector:
    """A published vector whose lock is given in the recorded order."""

    def __init__(self, stage: ReplayScheduler, rank: int, vector: Tensor) -> None:
        self._stage, self.rank, self.vector = stage, rank, vector.detach().clone()
        stage.vectors[rank] = self.vector
        self._event: LogEntry | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        self._event = self._stage.turn(self.rank, self.rank, OWN)
        yield

    def count(self, writes: int = 0) -> tuple[int, int]:
        assert self._event is not None
        if (self._event.kind in WRITES) != bool(writes):
            raise DataError(
                f"the record says {self._event.kind.name} where the learner {'writes' if writes else 'reads'}",
                where=f"vector {self.rank}",
                hint="replay with the strategy and the version of roundelay the run was recorded with",
            )
        return self._stage._next[self.rank], self._stage.versions[self.rank]

    @property
    def version(self) -> int:
        return self._stage.versions[self.rank]


class NullGossip:
    """What a learner sees of its agent: nothing to do, the stage holds the exchanges."""

    rounds = 0

    def notify_step(self) -> None:
        """The record knows when exchanges happened."""

    def finish(self) -> None:
        """The stage plays every exchange of the record."""

    def pop_metrics(self) -> dict[str, float]:
        return {}


class PendingResult:
    """A rendezvous under way."""

    def __init__(self, stage: ReplayScheduler, ready: Callable[[], bool], finish: Callable[[], Tensor]) -> None:
        self._stage, self._ready, self._finish = stage, ready, finish

    @property
    def done(self) -> bool:
        return self._ready()

    def wait(self) -> Tensor:
        self._stage.until(self._ready)
        return self._finish()


class ReplayGroup:
    """A group of learners on the stage and what they bring to their rendezvous, by number."""

    def __init__(self, stage: ReplayScheduler, size: int) -> None:
        self.stage, self.size = stage, size
        self.brought: dict[int, dict[int, Any]] = {}


class ReplayCommunicator:
    """One learner's view of a circle. Sums are in rank order, as `exact` and threads have them."""

    def __init__(self, circle: ReplayGroup, rank: int) -> None:
        self._circle, self.rank, self.size, self._stage = circle, rank, circle.size, circle.stage
        self._number = 0
        self.slot = None

    def _bring(self, what: Any, finish: Callable[[dict[int, Any]], Tensor]) -> PendingResult:
        self._number += 1
        table = self._circle.brought.setdefault(self._number, {})
        table[self.rank] = what
        self._circle.brought.pop(self._number - 64, None)  # long taken by everybody
        return PendingResult(self._stage, lambda: len(table) == self.size, lambda: finish(table))

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> PendingResult:
        return self._bring((x.clone(), weight), weighted_mean)

    def all_reduce_(self, x: Tensor) -> PendingResult:
        def finish(brought: dict[int, Any]) -> Tensor:
            x.copy_(brought[0])
            for rank in range(1, self.size):
                x.add_(brought[rank])
            return x

        return self._bring(x.clone(), finish)

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> PendingResult:
        return self._bring(x.clone(), lambda brought: weighted_sum(brought, row))

    def broadcast(self, x: Tensor) -> None:
        self._bring(x.clone() if self.rank == 0 else None, lambda brought: x.copy_(brought[0])).wait()

    def node_group(self, like: Tensor) -> ReplayCommunicator:
        return self

    reduce = all_reduce_

    def publish(self, vector: Tensor) -> ReplayedVector:
        kernels.compile_for(vector.dtype)
        return ReplayedVector(self._stage, self.rank, vector)

    def gossip(self, shared_weights: Any, matching: Matching, steps_per_exchange: float) -> NullGossip:
        return NullGossip()

    def remote_add(self, peer: int, d: Tensor) -> int:
        self._stage.turn(peer, self.rank, ONE_SIDED)
        self._stage.vectors[peer].add_(d)
        return self._stage.versions[peer] - 1

    def remote_get(self, peer: int, out: Tensor) -> int:
        self._stage.turn(peer, self.rank, ONE_SIDED)
        out.copy_(self._stage.vectors[peer])
        return self._stage.versions[peer]
