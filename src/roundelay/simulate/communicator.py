"""The Communicator in virtual time.

A collective completes when its last member has called it, plus the time the links take. The arithmetic is that of
`comm.threads`, so the results are equal to the bit.
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
    """One collective of a group: the inputs of its members, its result and when it is done."""

    __slots__ = ("cpu_s", "done_at", "inputs", "kind", "ready", "result", "starts_at", "waiting")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.inputs: dict[int, Any] = {}
        self.ready: list[tuple[float, float]] = []
        """Per member: when the first and the last element of its input can be sent."""
        self.starts_at = 0.0
        self.done_at: float | None = None
        self.cpu_s = 0.0
        """CPU seconds of the transfer per member, lost if the member computes meanwhile."""
        self.result: Any = None
        self.waiting: list[Any] = []


class SimulatedGroup:
    """State that the communicators of one group share."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int], name: str) -> None:
        self.job, self.ranks, self.name = job, list(ranks), name
        self.size = len(self.ranks)
        self.collectives: dict[int, CollectiveCall] = {}
        """Number -> a collective that not all members have called."""
        self.neighbor_calls: dict[int, NeighborCall] = {}
        self.vectors: dict[int, SimulatedSharedWeights] = {}
        self.gossip: SimulatedGossip | None = None
        self.lost: tuple[int, str] | None = None
        """The first failed member and the reason."""
        self._route: Route | None = None
        job.on_failure(self._on_failure)

    @property
    def route(self) -> Route:
        if self._route is None:
            self._route = self.job.network.route(self.ranks)
        return self._route

    def _on_failure(self, rank: int, reason: str) -> None:
        """Wake all members that wait, so that they raise PeerLost."""
        if rank not in self.ranks:
            return
        self.lost = self.lost or (rank, reason)
        loop = self.job.loop
        for call in self.collectives.values():
            for process in call.waiting:
                loop.wake(process, loop.now)
            call.waiting.clear()
        for neighbor_call in self.neighbor_calls.values():
            for process in neighbor_call.waiting.values():
                loop.wake(process, loop.now)

    def peer_lost(self, rank: int) -> PeerLost:
        """Return the error for a member that waits for the failed rank."""
        assert self.lost is not None
        return PeerLost(
            f"rank {self.lost[0]} ({self.lost[1]}) was lost",
            where=f"rank {self.ranks[rank]}, in a collective at {self.job.loop.now:.6g} s",
            hint="choose a strategy that survives a failure (adpsgd), or resume from the last checkpoint",
        )


class _SimulatedWork:
    """The pending result of a collective for one member."""

    __slots__ = ("_call", "_finish", "_group", "_number", "_rank")

    def __init__(
        self, group: SimulatedGroup, call: CollectiveCall, number: int, rank: int, finish: Callable[[Any], Any]
    ) -> None:
        self._group, self._call, self._number, self._rank, self._finish = group, call, number, rank, finish

    @property
    def done(self) -> bool:
        return self._call.done_at is not None and self._call.done_at <= self._group.job.loop.now

    def wait(self) -> Any:
        """Wait for the collective and return its result. Raises PeerLost if a member has failed."""
        call, group = self._call, self._group
        job, me = group.job, group.ranks[self._rank]
        began = job.loop.now
        if call.done_at is None:
            if group.lost is None:
                call.waiting.append(job.loop.current)
                job.wait(me, "comm", self._waits_for)
            if call.done_at is None:
                raise group.peer_lost(self._rank)
        elif call.done_at > began:
            job.sleep_until(me, "comm", call.done_at)
        if call.cpu_s and began > call.starts_at:
            # the part of the transfer that overlapped with computation ran on this member's core
            hidden = (min(began, call.done_at) - call.starts_at) / (call.done_at - call.starts_at)
            job.delay_s[me] += call.cpu_s * hidden
        return self._finish(call.result)

    def _waits_for(self) -> str:
        group = self._group
        missing = [str(group.ranks[m]) for m in range(group.size) if m not in self._call.inputs]
        return f"rank {', '.join(missing)} at {self._call.kind} {self._number} of '{group.name}'"


class NeighborCall:
    """One neighbor average of a group."""

    __slots__ = ("arrivals", "finished", "vectors", "waiting")

    def __init__(self) -> None:
        self.vectors: dict[int, Tensor] = {}
        self.arrivals: dict[tuple[int, int], float] = {}
        """(source, target) -> arrival time."""
        self.waiting: dict[int, Any] = {}
        self.finished = 0


class _SimulatedNeighborWork:
    """The pending neighbor average of one member."""

    __slots__ = ("_call", "_group", "_number", "_rank", "_row")

    def __init__(self, group: SimulatedGroup, call: NeighborCall, number: int, rank: int, row: dict[int, float]) -> None:
        self._group, self._call, self._number, self._rank, self._row = group, call, number, rank, row

    def _arrival(self) -> float | None:
        """Return when the last vector arrives; None while one has not been sent."""
        last = 0.0
        for member in self._row:
            if member != self._rank:
                arrival = self._call.arrivals.get((member, self._rank))
                if arrival is None:
                    return None
                last = max(last, arrival)
        return last

    @property
    def done(self) -> bool:
        arrival = self._arrival()
        return arrival is not None and arrival <= self._group.job.loop.now

    def wait(self) -> Tensor:
        """Wait for the neighbors' vectors and return the average. Raises PeerLost if a member has failed."""
        group, call, job = self._group, self._call, self._group.job
        me = group.ranks[self._rank]
        while (arrival := self._arrival()) is None:
            if group.lost is not None:
                raise group.peer_lost(self._rank)
            call.waiting[self._rank] = job.loop.current
            job.wait(me, "comm", self._waits_for)
        job.sleep_until(me, "comm", arrival)
        result = weighted_sum(call.vectors, self._row)
        call.finished += 1
        if call.finished == group.size:
            del group.neighbor_calls[self._number]
        return result

    def _waits_for(self) -> str:
        missing = [str(self._group.ranks[m]) for m in self._row if m not in self._call.vectors]
        return f"rank {', '.join(missing)} at neighbor_average {self._number} of '{self._group.name}'"


class SimulatedCommunicator(BaseCommunicator):
    """One learner's communicator in a group."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(job.store, ranks, rank, name)
        self.job = job
        group: SimulatedGroup = job.group(name, lambda: SimulatedGroup(job, ranks, name))
        self.group = group
        self._collectives = 0
        self._neighbor_calls = 0
        self._bytes = 0.0
        self._me = self.ranks[rank]

    def _call(
        self,
        kind: str,
        value: Any,
        combine: Callable[[dict[int, Any]], Any],
        done_at: Callable[[CollectiveCall], float],
        finish: Callable[[Any], Any],
        ready: tuple[float, float] | None = None,
    ) -> _SimulatedWork:
        """Join this member's next collective; the last member to call combines the inputs and sets the end time."""
        group, now = self.group, self.job.loop.now
        self._collectives = number = self._collectives + 1
        call = group.collectives.get(number)
        if call is None:
            call = group.collectives[number] = CollectiveCall(kind)
        elif call.kind != kind:
            raise RuntimeError(f"collective {number} of '{self.name}': rank {self._me} calls {kind}, other ranks {call.kind}")
        call.inputs[self.rank] = value
        if ready is not None:
            call.ready.append(ready)
        if len(call.inputs) == self.size:
            del group.collectives[number]
            call.result = combine(call.inputs)
            call.starts_at = now
            call.done_at = end = max(done_at(call), now)
            wake = self.job.loop.wake
            for process in call.waiting:
                wake(process, end)
            call.waiting.clear()
        return _SimulatedWork(group, call, number, self.rank, finish)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> Work:
        size = self.job.bytes_of(x)
        self._bytes += 2 * size * (self.size - 1) / self.size
        return self._call(
            "mean",
            (x, weight),
            weighted_mean,
            lambda call: self._reduced_at(call, size, 2.0),
            lambda result: result.clone(),
        )

    def all_reduce_(self, x: Tensor) -> Work:
        return self._reduce(x, 2.0)

    def _reduce(self, x: Tensor, rounds: float) -> Work:
        size = self.job.bytes_of(x)
        self._bytes += rounds * size * (self.size - 1) / self.size
        return self._call(
            "sum",
            x,
            plain_sum,
            lambda call: self._reduced_at(call, size, rounds),
            lambda result: x.copy_(result),
            self.job.ready(self._me, x),
        )

    def _reduced_at(self, call: CollectiveCall, size: float, rounds: float) -> float:
        """Return when a reduction is done. A bucket is sent when all members have computed it and the link is free."""
        network, route = self.job.network, self.group.route
        call.cpu_s = route.cpu_s_per_byte * rounds * size * (self.size - 1) / self.size
        if not call.ready:
            return network.all_reduce(route, size, self.job.loop.now, rounds)
        buckets = self.job.buckets(size)
        first, last = (max(r[i] for r in call.ready) for i in (0, 1))
        if buckets == 1:
            return network.all_reduce(route, size, last, rounds)
        call.starts_at = first
        end = 0.0
        for b in range(1, buckets + 1):
            share = b / buckets
            # readiness of all members, taken as linear between its ends
            end = network.all_reduce(route, size / buckets, first + share * (last - first), rounds)
        return end

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> Work:
        self._neighbor_calls += 1
        number, group, job = self._neighbor_calls, self.group, self.job
        size = job.bytes_of(x)
        self._bytes += size * (len(row) - 1)
        call = group.neighbor_calls.get(number)
        if call is None:
            call = group.neighbor_calls[number] = NeighborCall()
        call.vectors[self.rank] = x.clone()
        for member in row:
            if member != self.rank:
                call.arrivals[self.rank, member] = job.network.transfer(self._me, self.ranks[member], size, job.loop.now)
                process = call.waiting.pop(member, None)
                if process is not None:
                    job.loop.wake(process, job.loop.now)
        return _SimulatedNeighborWork(group, call, number, self.rank, row)

    def broadcast(self, x: Tensor) -> None:
        network, loop = self.job.network, self.job.loop
        size = self.job.bytes_of(x)
        if self.rank == 0:
            self._bytes += size
        result = self._call(
            "broadcast",
            x,
            lambda inputs: inputs[0].clone(),
            lambda call: network.all_reduce(self.group.route, size, loop.now, 1.0),
            lambda result: result,
        ).wait()
        if self.rank != 0:
            x.copy_(result)

    def node_group(self, like: Tensor) -> SimulatedNodeGroup:
        return SimulatedNodeGroup(self)

    # -- shared weights ------------------------------------------------------------------------------------------------

    def publish(self, vector: Tensor) -> SharedWeights:
        shared_weights = SimulatedSharedWeights(self.job, self._me, vector)
        self.group.vectors[self.rank] = shared_weights
        self._call("publish", None, lambda inputs: None, lambda call: 0.0, lambda result: None).wait()
        return shared_weights

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> SimulatedGossipHandle:
        group = self.group
        if group.gossip is None:
            group.gossip = SimulatedGossip(self.job, group.ranks, matching)
        return group.gossip.join(self.rank, group.vectors[self.rank], steps_per_exchange)

    def _check_peer(self, peer: int) -> None:
        if self.ranks[peer] in self.job.failed:
            self.group.lost = self.group.lost or (self.ranks[peer], self.job.failed[self.ranks[peer]])
            raise self.group.peer_lost(self.rank)

    def remote_add(self, peer: int, d: Tensor) -> int:
        job, size = self.job, self.job.bytes_of(d)
        self._bytes += size
        target, d = self.group.vectors[peer], d.clone()
        job.sleep_until(self._me, "comm", job.network.transfer(self._me, self.ranks[peer], size, job.loop.now))
        self._check_peer(peer)
        _, version = target.count(writes=1)
        target.vector.add_(d)
        job.sleep_until(self._me, "comm", job.network.transfer(self.ranks[peer], self._me, 0, job.loop.now))
        return version - 1

    def remote_get(self, peer: int, out: Tensor) -> int:
        job = self.job
        source = self.group.vectors[peer]
        job.sleep_until(self._me, "comm", job.network.transfer(self._me, self.ranks[peer], 0, job.loop.now))
        self._check_peer(peer)
        _, version = source.count()
        out.copy_(source.vector)
        arrival = job.network.transfer(self.ranks[peer], self._me, job.bytes_of(out), job.loop.now)
        job.sleep_until(self._me, "comm", arrival)
        return version

    # -- other operations ----------------------------------------------------------------------------------------------

    def record(self, update_log: UpdateLog) -> None:
        raise UsageError(
            "record_order is not supported in virtual time: a simulated run is deterministic",
            where="record_order",
            hint="remove record_order, and repeat the run with the same seed",
        )

    def new_group(self, ranks: Sequence[int], name: str, timeout_s: float | None = None) -> SimulatedCommunicator | None:
        if self.rank not in ranks:
            return None
        return SimulatedCommunicator(self.job, *self._subgroup(ranks, name))

    def bytes_sent(self) -> int:
        gossip = self.group.gossip
        return round(self._bytes + (gossip.bytes_sent(self.rank) if gossip is not None else 0.0))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class SimulatedNodeGroup(CollectiveNodeGroup):
    """Broadcast and reduce among the learners of one machine; gradients are reduced to the leader only."""

    def __init__(self, comm: SimulatedCommunicator) -> None:
        super().__init__(comm)
        self.reduce = lambda x: comm._reduce(x, 1.0)
