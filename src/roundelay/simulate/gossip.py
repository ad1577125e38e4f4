"""Background exchanges in virtual time: drives `comm/gossip/protocol.py`, the protocol of real runs.

Between machines, the header of a snapshot arrives after the latency of the link and its data after the transfer, so the answer
of the partner crosses the snapshot on a full-duplex link. Inside a machine both vectors are averaged in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from roundelay.comm.gossip.pair_average import relative_distance
from roundelay.comm.gossip.protocol import Action, ApplyHalfDifference, Average, GossipProtocol, Receive, SendSnapshot
from roundelay.core import kernels
from roundelay.core.contracts import Matching
from roundelay.simulate.job import SimulatedJob


class SimulatedSharedWeights:
    """A vector that other ranks read and change. Only one process runs at a time, so the lock is empty.

    Leaving the lock takes the time of the copy between host memory and the learner's device.
    """

    __slots__ = ("_copies", "_job", "_rank", "_size", "operations", "vector", "version")

    def __init__(self, job: SimulatedJob, rank: int, vector: Tensor) -> None:
        self._job, self._rank = job, rank
        self.vector = vector.detach().clone()
        self.operations = self.version = 0
        self._size = job.bytes_of(vector)
        self._copies = job.network.copies

    def locked(self) -> SimulatedSharedWeights:
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._copies and kind is None:
            end = self._job.network.device_copy(self._rank, self._size, self._job.loop.now)
            self._job.sleep_until(self._rank, "copy", end)

    def count(self, writes: int = 0) -> tuple[int, int]:
        """Count one operation and `writes` writes; return (operations, version)."""
        self.operations += 1
        self.version += writes
        return self.operations, self.version


class SimulatedPeer:
    """The gossip state of one learner."""

    __slots__ = ("arrived", "awaited", "bytes", "metrics", "opened_at", "protocol", "reported", "shared_weights", "snapshots")

    def __init__(self, protocol: GossipProtocol, shared_weights: SimulatedSharedWeights) -> None:
        self.protocol, self.shared_weights = protocol, shared_weights
        self.snapshots: dict[int, Tensor] = {}
        """Partner -> own snapshot of the open exchange."""
        self.arrived: dict[int, Tensor] = {}
        """Partner -> its snapshot, which has arrived."""
        self.awaited: set[int] = set()
        self.opened_at: dict[int, float] = {}
        self.bytes = 0.0
        self.metrics = {"exchanges": 0.0, "exchange_s": 0.0, "distance": 0.0, "skipped": 0.0}
        self.reported = dict(self.metrics)

    @property
    def rank(self) -> int:
        return self.protocol.rank


class SimulatedGossip:
    """The gossip of one group of learners, over any topology."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int], matching: Matching) -> None:
        self.job, self.ranks, self.size = job, list(ranks), len(ranks)
        self.peers: dict[int, SimulatedPeer] = {}
        self.failed: set[int] = set()
        self.finished: set[int] = set()
        self.draining = False
        self._waiting: list[Any] = []
        self._matching = CachedMatching(matching, self.size)
        job.on_failure(self._on_failure)

    def join(self, rank: int, shared_weights: SimulatedSharedWeights, steps_per_exchange: float) -> SimulatedGossipHandle:
        """Add a learner and return its handle."""
        machine = self.job.network.machine
        local = [r for r in range(self.size) if machine[self.ranks[r]] == machine[self.ranks[rank]]]
        protocol = GossipProtocol(rank, self.size, self._matching, steps_per_exchange, local)
        peer = self.peers[rank] = SimulatedPeer(protocol, shared_weights)
        now = self.job.loop.now
        for other in sorted(protocol.edges):
            if other in self.peers:
                self._perform(peer, protocol.connected(other, 0, now))
                self._perform(self.peers[other], self.peers[other].protocol.connected(rank, 0, now))
        for failed in self.failed:
            protocol.fail(failed, now)
        return SimulatedGossipHandle(self, peer)

    # -- actions -------------------------------------------------------------------------------------------------------

    def step(self, peer: SimulatedPeer) -> None:
        """Count one step of a learner; this may make an exchange due."""
        self._perform(peer, peer.protocol.step(self.job.loop.now))

    def _perform(self, peer: SimulatedPeer, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Average):
                self._start_average(peer, action)
            elif isinstance(action, SendSnapshot):
                self._send(peer, action)
            elif isinstance(action, Receive):
                peer.awaited.add(action.peer)
                self._deliver(peer, action.peer, action.number)
            elif isinstance(action, ApplyHalfDifference):
                self._apply(peer, action)
            else:
                peer.snapshots.pop(action.peer, None)
        if self.draining:
            self._check_drained()

    def _start_average(self, peer: SimulatedPeer, action: Average) -> None:
        job, partner = self.job, action.peer
        source, now = self.ranks[peer.rank], job.loop.now
        end = job.network.exchange_in_place(source, job.bytes_of(peer.shared_weights.vector), now)
        contention = job.cluster.memory.contention
        if contention:
            for rank in (source, self.ranks[partner]):
                job.delay_s[rank] += contention * (end - now)
        job.loop.at(end, lambda: self._average(peer, action, now))

    def _average(self, peer: SimulatedPeer, action: Average, began: float) -> None:
        if peer.rank in self.failed:
            return
        partner = action.peer
        now, other = self.job.loop.now, self.peers.get(partner)
        if peer.protocol.rounds > action.round:
            self._perform(peer, peer.protocol.overtaken(partner, now))
            return
        if other is None or partner in self.failed:
            self._perform(peer, peer.protocol.busy(partner, now))
            return
        self._add_distance(peer, peer.shared_weights.vector, other.shared_weights.vector)
        kernels.pair_average(peer.shared_weights.vector, other.shared_weights.vector)
        rounds = max(peer.protocol.rounds, other.protocol.rounds) + 1
        for side in (peer, other):
            side.shared_weights.count(writes=1)
        peer.metrics["exchange_s"] += now - began
        other.protocol.averaged_by_peer(1, rounds)
        self._perform(peer, peer.protocol.averaged(partner, rounds, now))

    def _send(self, peer: SimulatedPeer, action: SendSnapshot) -> None:
        job, network, now = self.job, self.job.network, self.job.loop.now
        source, target, size = self.ranks[peer.rank], self.ranks[action.peer], job.bytes_of(peer.shared_weights.vector)
        peer.shared_weights.count()
        snapshot = peer.snapshots[action.peer] = peer.shared_weights.vector.clone()
        peer.opened_at[action.peer] = now
        peer.bytes += size
        for rank in (source, target):
            job.delay_s[rank] += network.cpu_seconds(source, target, size) / 2
        other = self.peers[action.peer]

        def header() -> None:
            if not self.failed & {peer.rank, other.rank}:
                self._perform(other, other.protocol.announced(peer.rank, action.number, job.loop.now))

        def data() -> None:
            if not self.failed & {peer.rank, other.rank}:
                other.arrived[peer.rank] = snapshot
                self._deliver(other, peer.rank, action.number)

        job.loop.at(network.transfer(source, target, 0.0, now), header)
        job.loop.at(network.transfer(source, target, size, now), data)

    def _deliver(self, peer: SimulatedPeer, partner: int, number: int) -> None:
        if partner in peer.awaited and partner in peer.arrived:
            peer.awaited.discard(partner)
            self._perform(peer, peer.protocol.received(partner, number, self.job.loop.now))

    def _apply(self, peer: SimulatedPeer, action: ApplyHalfDifference) -> None:
        own, received, other = peer.snapshots[action.peer], peer.arrived.pop(action.peer), self.peers[action.peer]
        self._add_distance(peer, own, received)
        kernels.add_half_difference(peer.shared_weights.vector, received, own)
        peer.shared_weights.count(writes=1)
        now = self.job.loop.now
        peer.metrics["exchange_s"] += now - peer.opened_at.pop(action.peer)

        def acknowledge() -> None:
            if not self.failed & {peer.rank, other.rank}:
                self._perform(other, other.protocol.acknowledged(peer.rank, action.number, self.job.loop.now))

        arrival = self.job.network.transfer(self.ranks[peer.rank], self.ranks[other.rank], 0.0, now)
        self.job.loop.at(arrival, acknowledge)

    def _add_distance(self, peer: SimulatedPeer, a: Tensor, b: Tensor) -> None:
        """Add |a - b| / |a|, estimated from a sample, to the metrics. Does nothing in timing-only mode."""
        if a.numel() > 1:
            peer.metrics["distance"] += relative_distance(a, b)

    # -- draining ------------------------------------------------------------------------------------------------------

    def finish(self, peer: SimulatedPeer) -> int:
        """Wait until all live learners have finished and all exchanges are complete; return the highest round."""
        self.finished.add(peer.rank)
        self._waiting.append(self.job.loop.current)
        self._check_drained()
        if not self._drained:
            self.job.wait(self.ranks[peer.rank], "comm", self._waits_for)
        return max(p.protocol.rounds for p in self.peers.values())

    def _live(self) -> list[int]:
        return [r for r in range(self.size) if r not in self.failed]

    @property
    def _drained(self) -> bool:
        return self.draining and not any(self.peers[r].protocol.open_edges for r in self._live())

    def _check_drained(self) -> None:
        live = self._live()
        if not self.draining and live and all(r in self.finished for r in live):
            self.draining = True
            for r in live:
                self.peers[r].protocol.stop_initiating()
        if self._drained:
            loop = self.job.loop
            for process in self._waiting:
                if process is not loop.current:
                    loop.wake(process, loop.now)
            self._waiting.clear()

    def _waits_for(self) -> str:
        if not self.draining:
            busy = [str(self.ranks[r]) for r in self._live() if r not in self.finished]
            return f"rank {', '.join(busy)} to finish"
        late = [f"rank {self.ranks[r]}" for r in self._live() if self.peers[r].protocol.open_edges]
        return f"the exchanges of {', '.join(late)}"

    def _on_failure(self, rank: int, reason: str) -> None:
        if rank not in self.ranks:
            return
        member = self.ranks.index(rank)
        self.failed.add(member)
        for r, peer in list(self.peers.items()):
            if r not in self.failed:
                peer.awaited.discard(member)
                peer.arrived.pop(member, None)
                self._perform(peer, peer.protocol.fail(member, self.job.loop.now))
        self._check_drained()

    def bytes_sent(self, rank: int) -> float:
        return self.peers[rank].bytes if rank in self.peers else 0.0


class CachedMatching:
    """A matching whose recent rounds are computed once and shared by all peers."""

    def __init__(self, matching: Matching, size: int) -> None:
        self._matching, self._limit = matching, 4 * size + 64
        self._partners: dict[int, Sequence[int]] = {}
        self.edges = matching.edges

    def __call__(self, round: int) -> Sequence[int]:
        partners = self._partners.get(round)
        if partners is None:
            if len(self._partners) > self._limit:
                self._partners.clear()
            partners = self._partners[round] = self._matching(round)
        return partners


class SimulatedGossipHandle:
    """The background exchanges of one learner."""

    def __init__(self, gossip: SimulatedGossip, peer: SimulatedPeer) -> None:
        self._gossip, self._peer = gossip, peer
        self.rounds = 0

    @property
    def exchanges(self) -> int:
        """Exchanges completed so far."""
        return self._peer.protocol.exchanges

    def notify_step(self) -> None:
        """Count one step of the learner; this may make an exchange due."""
        self._gossip.step(self._peer)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        peer = self._peer
        total = peer.metrics | {"exchanges": float(peer.protocol.exchanges), "skipped": float(peer.protocol.skipped)}
        before, peer.reported = peer.reported, total
        return {name: total[name] - before[name] for name in total}

    def finish(self) -> None:
        """Drain and leave. Collective among the live learners."""
        self.rounds = self._gossip.finish(self._peer)
