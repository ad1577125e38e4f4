"""The virtual backend: `Net` in virtual time.

A rendezvous is done when its last member has arrived, plus the time the links take. The arithmetic is that of the backend for
threads, so the bits are too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from roundelay.comm.base import BaseCommunicator, plain_sum, weighted_mean, weighted_sum
from roundelay.comm.node_group import CollectiveNodeGroup
from roundelay.core.contracts import Matching, SharedWeights, Work
from roundelay.core.update_log import UpdateLog
from roundelay.errors import PeerLost, UsageError
from roundelay.simulate.gossip import SimulatedGossip, SimulatedGossipHandle, SimulatedSharedWeights
from roundelay.simulate.job import SimulatedJob
from roundelay.simulate.network import Route


class CollectiveCall:
    """Where the members of a group bring something and take something away."""

    __slots__ = ("brought", "cpu_s", "done_at", "kind", "ready", "result", "starts_at", "waiting")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.brought: dict[int, Any] = {}
        self.ready: list[tuple[float, float]] = []
        """Of every member, when the first and the last of what it brings can leave."""
        self.starts_at = 0.0
        self.done_at: float | None = None
        self.cpu_s = 0.0
        """What the transfer costs a member on its core, if it computes meanwhile."""
        self.result: Any = None
        self.waiting: list[Any] = []


class Group:
    """What the members of one comm share."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int], name: str) -> None:
        self.job, self.ranks, self.name = job, list(ranks), name
        self.size = len(self.ranks)
        self.open: dict[int, CollectiveCall] = {}
        self.mixes: dict[int, NeighborExchange] = {}
        self.board: dict[int, SimulatedSharedWeights] = {}
        self.ring: SimulatedGossip | None = None
        self.lost: tuple[int, str] | None = None
        self._route: Route | None = None
        job.when_dead(self._bury)

    @property
    def route(self) -> Route:
        if self._route is None:
            self._route = self.job.network.route(self.ranks)
        return self._route

    def _bury(self, rank: int, why: str) -> None:
        """Whoever waits here for somebody who is dead is told."""
        if rank not in self.ranks:
            return
        self.lost = self.lost or (rank, why)
        world = self.job.world
        for rendezvous in self.open.values():
            for task in rendezvous.waiting:
                world.wake(task, world.now)
            rendezvous.waiting.clear()
        for mix in self.mixes.values():
            for task in mix.waiting.values():
                world.wake(task, world.now)

    def missed(self, rank: int) -> PeerLost:
        assert self.lost is not None
        return PeerLost(
            f"rank {self.lost[0]} ({self.lost[1]}) was lost",
            where=f"rank {self.ranks[rank]}, waiting for everybody, at {self.job.world.now:.6g} s",
            hint="choose a strategy that survives a death (adpsgd), or resume from the last checkpoint",
        )


class _SimulatedWork:
    """What a member takes away from a rendezvous."""

    __slots__ = ("_finish", "_group", "_number", "_rank", "_rendezvous")

    def __init__(self, group: Group, rendezvous: CollectiveCall, number: int, rank: int, finish: Callable[[Any], Any]) -> None:
        self._group, self._rendezvous, self._number, self._rank, self._finish = group, rendezvous, number, rank, finish

    @property
    def done(self) -> bool:
        return self._rendezvous.done_at is not None and self._rendezvous.done_at <= self._group.job.world.now

    def wait(self) -> Any:
        rendezvous, group = self._rendezvous, self._group
        job, me = group.job, group.ranks[self._rank]
        came = job.world.now
        if rendezvous.done_at is None:
            if group.lost is None:
                rendezvous.waiting.append(job.world.current)
                job.wait(me, "comm", self._why)
            if rendezvous.done_at is None:
                raise group.missed(self._rank)
        elif rendezvous.done_at > came:
            job.sleep_until(me, "comm", rendezvous.done_at)
        if rendezvous.cpu_s and came > rendezvous.starts_at:
            # what travelled while this member computed was carried by its own core
            hidden = (min(came, rendezvous.done_at) - rendezvous.starts_at) / (rendezvous.done_at - rendezvous.starts_at)
            job.stolen[me] += rendezvous.cpu_s * hidden
        return self._finish(rendezvous.result)

    def _why(self) -> str:
        group = self._group
        missing = [str(group.ranks[m]) for m in range(group.size) if m not in self._rendezvous.brought]
        return f"rank {', '.join(missing)} at {self._rendezvous.kind} {self._number} of '{group.name}'"


class NeighborExchange:
    """One round of neighbours' vectors."""

    __slots__ = ("arrivals", "taken", "vectors", "waiting")

    def __init__(self) -> None:
        self.vectors: dict[int, Tensor] = {}
        self.arrivals: dict[tuple[int, int], float] = {}
        """(from, to) -> when it is there."""
        self.waiting: dict[int, Any] = {}
        self.taken = 0


class _SimulatedNeighborWork:
    """The neighbours' vectors under way to one member."""

    __slots__ = ("_group", "_mix", "_number", "_rank", "_row")

    def __init__(self, group: Group, mix: NeighborExchange, number: int, rank: int, row: dict[int, float]) -> None:
        self._group, self._mix, self._number, self._rank, self._row = group, mix, number, rank, row

    def _arrival(self) -> float | None:
        """When the last of them is there; None while one has not left."""
        last = 0.0
        for member in self._row:
            if member != self._rank:
                arrival = self._mix.arrivals.get((member, self._rank))
                if arrival is None:
                    return None
                last = max(last, arrival)
        return last

    @property
    def done(self) -> bool:
        arrival = self._arrival()
        return arrival is not None and arrival <= self._group.job.world.now

    def wait(self) -> Tensor:
        group, mix, job = self._group, self._mix, self._group.job
        me = group.ranks[self._rank]
        while (arrival := self._arrival()) is None:
            if group.lost is not None:
                raise group.missed(self._rank)
            mix.waiting[self._rank] = job.world.current
            job.wait(me, "comm", self._why)
        job.sleep_until(me, "comm", arrival)
        result = weighted_sum(mix.vectors, self._row)
        mix.taken += 1
        if mix.taken == group.size:
            del group.mixes[self._number]
        return result

    def _why(self) -> str:
        missing = [str(self._group.ranks[m]) for m in self._row if m not in self._mix.vectors]
        return f"rank {', '.join(missing)} at mix {self._number} of '{self._group.name}'"


class SimulatedCommunicator(BaseCommunicator):
    """One learner's view of a group."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(job.store, ranks, rank, name)
        self.job = job
        group: Group = job.group(name, lambda: Group(job, ranks, name))
        self.group = group
        self._number = 0
        self._mixes = 0
        self._bytes = 0.0
        self._me = self.ranks[rank]

    def _bring(
        self,
        kind: str,
        what: Any,
        combine: Callable[[dict[int, Any]], Any],
        done_at: Callable[[CollectiveCall], float],
        finish: Callable[[Any], Any],
        ready: tuple[float, float] | None = None,
    ) -> _SimulatedWork:
        group, now = self.group, self.job.world.now
        self._number = number = self._number + 1
        rendezvous = group.open.get(number)
        if rendezvous is None:
            rendezvous = group.open[number] = CollectiveCall(kind)
        elif rendezvous.kind != kind:
            raise RuntimeError(f"rank {self._me} comes to rendezvous {number} with {kind}, the others with {rendezvous.kind}")
        brought = rendezvous.brought
        brought[self.rank] = what
        if ready is not None:
            rendezvous.ready.append(ready)
        if len(brought) == self.size:
            del group.open[number]
            rendezvous.result = combine(brought)
            rendezvous.starts_at = now
            rendezvous.done_at = end = max(done_at(rendezvous), now)
            wake = self.job.world.wake
            for task in rendezvous.waiting:
                wake(task, end)
            rendezvous.waiting.clear()
        return _SimulatedWork(group, rendezvous, number, self.rank, finish)

    # -- rendezvous ------------------------------------------------------------------------------------------------

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> Work:
        size = self.job.bytes_of(x)
        self._bytes += 2 * size * (self.size - 1) / self.size
        return self._bring(
            "mean",
            (x, weight),
            weighted_mean,
            lambda r: self._reduced_at(r, size, 2.0),
            lambda result: result.clone(),
        )

    def all_reduce_(self, x: Tensor) -> Work:
        return self._reduce(x, 2.0)

    def _reduce(self, x: Tensor, rounds: float) -> Work:
        size = self.job.bytes_of(x)
        self._bytes += rounds * size * (self.size - 1) / self.size
        return self._bring(
            "sum",
            x,
            plain_sum,
            lambda r: self._reduced_at(r, size, rounds),
            lambda result: x.copy_(result),
            self.job.ready(self._me, x),
        )

    def _reduced_at(self, rendezvous: CollectiveCall, size: float, rounds: float) -> float:
        """Buckets leave while backward goes on: each when everybody has it and the one before it has gone."""
        network, route = self.job.network, self.group.route
        rendezvous.cpu_s = route.cpu_s_per_byte * rounds * size * (self.size - 1) / self.size
        if not rendezvous.ready:
            return network.all_reduce(route, size, self.job.world.now, rounds)
        buckets = self.job.buckets(size)
        first, last = (max(r[i] for r in rendezvous.ready) for i in (0, 1))
        if buckets == 1:
            return network.all_reduce(route, size, last, rounds)
        rendezvous.starts_at = first
        end = 0.0
        for b in range(1, buckets + 1):
            share = b / buckets
            # the envelope of everybody's readiness, taken as a line between its ends
            end = network.all_reduce(route, size / buckets, first + share * (last - first), rounds)
        return end

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> Work:
        self._mixes += 1
        number, group, job = self._mixes, self.group, self.job
        size = job.bytes_of(x)
        self._bytes += size * (len(row) - 1)
        mix = group.mixes.get(number)
        if mix is None:
            mix = group.mixes[number] = NeighborExchange()
        mix.vectors[self.rank] = x.clone()
        for member in row:
            if member != self.rank:
                mix.arrivals[self.rank, member] = job.network.transfer(self._me, self.ranks[member], size, job.world.now)
                task = mix.waiting.pop(member, None)
                if task is not None:
                    job.world.wake(task, job.world.now)
        return _SimulatedNeighborWork(group, mix, number, self.rank, row)

    def broadcast(self, x: Tensor) -> None:
        network, world = self.job.network, self.job.world
        size = self.job.bytes_of(x)
        if self.rank == 0:
            self._bytes += size
        result = self._bring(
            "cast",
            x,
            lambda brought: brought[0].clone(),
            lambda r: network.all_reduce(self.group.route, size, world.now, 1.0),
            lambda result: result,
        ).wait()
        if self.rank != 0:
            x.copy_(result)

    def node_group(self, like: Tensor) -> SimulatedNodeGroup:
        return SimulatedNodeGroup(self)

    # -- published vectors ---------------------------------------------------------------------------------------------

    def publish(self, vector: Tensor) -> SharedWeights:
        mine = SimulatedSharedWeights(self.job, self._me, vector)
        self.group.board[self.rank] = mine
        self._bring("publish", None, lambda brought: None, lambda r: 0.0, lambda result: None).wait()
        return mine

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> SimulatedGossipHandle:
        group = self.group
        if group.ring is None:
            group.ring = SimulatedGossip(self.job, group.ranks, matching)
        return group.ring.join(self.rank, group.board[self.rank], steps_per_exchange)

    def _check_peer(self, peer: int) -> None:
        if self.ranks[peer] in self.job.dead:
            self.group.lost = self.group.lost or (self.ranks[peer], self.job.dead[self.ranks[peer]])
            raise self.group.missed(self.rank)

    def remote_add(self, peer: int, d: Tensor) -> int:
        job, size = self.job, self.job.bytes_of(d)
        self._bytes += size
        theirs, d = self.group.board[peer], d.clone()
        job.sleep_until(self._me, "comm", job.network.transfer(self._me, self.ranks[peer], size, job.world.now))
        self._check_peer(peer)
        _, version = theirs.count(writes=1)
        theirs.vector.add_(d)
        job.sleep_until(self._me, "comm", job.network.transfer(self.ranks[peer], self._me, 0, job.world.now))
        return version - 1

    def remote_get(self, peer: int, out: Tensor) -> int:
        job = self.job
        theirs = self.group.board[peer]
        job.sleep_until(self._me, "comm", job.network.transfer(self._me, self.ranks[peer], 0, job.world.now))
        self._check_peer(peer)
        _, version = theirs.count()
        out.copy_(theirs.vector)
        arrival = job.network.transfer(self.ranks[peer], self._me, job.bytes_of(out), job.world.now)
        job.sleep_until(self._me, "comm", arrival)
        return version

    # -- the rest ------------------------------------------------------------------------------------------------------

    def record(self, update_log: UpdateLog) -> None:
        raise UsageError(
            "a run in virtual time is not recorded: it repeats itself to the bit",
            where="record",
            hint="leave record out, and run it again with the same seed",
        )

    def new_group(self, ranks: Sequence[int], name: str) -> SimulatedCommunicator | None:
        if self.rank not in ranks:
            return None
        return SimulatedCommunicator(self.job, *self._subgroup(ranks, name))

    def bytes_sent(self) -> int:
        ring = self.group.ring
        return round(self._bytes + (ring.bytes_sent(self.rank) if ring is not None else 0.0))

    def close(self) -> None:
        """Nothing is held."""


class SimulatedNodeGroup(CollectiveNodeGroup):
    """A machine's learners around their first: its weights are handed out, their gradients go to it alone."""

    def __init__(self, comm: SimulatedCommunicator) -> None:
        super().__init__(comm)
        self.reduce = lambda x: comm._reduce(x, 1.0)
