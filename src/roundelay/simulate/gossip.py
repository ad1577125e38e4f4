"""Background exchanges in virtual time, by the rules of comm/gossip/thread.py.

A peer takes part in the rounds in order, with at most one open exchange. It enters its next round when its learner has taken
as many steps as it has completed exchanges, or when its partner of that round or of a later one already waits. Between
machines, each side takes a snapshot when it enters; the snapshots are sent when both sides have entered, and each side adds
half their difference on arrival. Inside a machine both vectors are averaged in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from roundelay.comm.gossip.thread import DISTANCE_SAMPLE, MAX_OWED
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

    __slots__ = (
        "bytes",
        "current_round",
        "drained",
        "exchanges",
        "forgiven",
        "metrics",
        "next_round",
        "opened_at",
        "partner",
        "rank",
        "reported",
        "requested_round",
        "shared_weights",
        "snapshot",
        "steps",
        "steps_per_exchange",
    )

    def __init__(self, rank: int, shared_weights: SimulatedSharedWeights, steps_per_exchange: float) -> None:
        self.rank, self.shared_weights, self.steps_per_exchange = rank, shared_weights, steps_per_exchange
        self.next_round = 0
        """The open round, or the one to enter next."""
        self.current_round = self.requested_round = -1
        """The last round this peer entered, and the last round a partner asked for."""
        self.partner: int | None = None
        """The partner of the open exchange."""
        self.opened_at = 0.0
        self.steps = self.exchanges = self.forgiven = 0
        self.snapshot: Tensor | None = None
        self.drained = False
        self.bytes = 0.0
        self.metrics = {"exchanges": 0.0, "exchange_s": 0.0, "distance": 0.0, "skipped": 0.0}
        self.reported = dict(self.metrics)


class SimulatedGossip:
    """The gossip of one group of learners, over any topology."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int], matching: Matching) -> None:
        self.job, self.ranks, self.size = job, list(ranks), len(ranks)
        self.peers: dict[int, SimulatedPeer] = {}
        self.failed: set[int] = set()
        self.initiating = True
        self.last_round: int | None = None
        """The round to which all peers drain before they leave."""
        self.finished: set[int] = set()
        self._waiting: list[Any] = []
        self._matching = matching
        self._partners: dict[int, Sequence[int]] = {}
        job.on_failure(self._on_failure)

    def join(self, rank: int, shared_weights: SimulatedSharedWeights, steps_per_exchange: float) -> SimulatedGossipHandle:
        """Add a learner and return its handle."""
        peer = self.peers[rank] = SimulatedPeer(rank, shared_weights, steps_per_exchange)
        self.advance(peer)
        return SimulatedGossipHandle(self, peer)

    def partners(self, round: int) -> Sequence[int]:
        """Return the partner of every member in a round. Matchings are computed once and shared by all peers."""
        partners = self._partners.get(round)
        if partners is None:
            partners = self._partners[round] = self._matching(round)
            if len(self._partners) > 4 * self.size + 64:
                oldest = min(peer.next_round for peer in self.peers.values())
                self._partners = {r: p for r, p in self._partners.items() if r >= oldest}
        return partners

    # -- rounds --------------------------------------------------------------------------------------------------------

    def advance(self, peer: SimulatedPeer) -> None:
        """Make all moves that are possible now, beginning with those of `peer`."""
        pending = [peer]
        while pending:
            requested = self._advance(pending.pop())
            if requested is not None:
                pending.append(requested)

    def _advance(self, peer: SimulatedPeer) -> SimulatedPeer | None:
        """Make the moves of one peer; return the partner of which it requests an exchange, if any."""
        while peer.partner is None and not peer.drained:
            if self.last_round is not None and peer.next_round > self.last_round:
                peer.drained = True
                self._check_drained()
                return None
            if self.last_round is None and len(self.failed) + 1 >= self.size:
                return None
            partner = self.partners(peer.next_round)[peer.rank]
            if partner == peer.rank or partner in self.failed:
                peer.metrics["skipped"] += partner != peer.rank
                peer.next_round += 1
                continue
            if self.last_round is None and not self._may_enter(peer):
                return None
            return self._enter(peer, partner)
        return None

    def _may_enter(self, peer: SimulatedPeer) -> bool:
        if self.initiating:
            owed = peer.steps / peer.steps_per_exchange - peer.exchanges - peer.forgiven
            if owed > MAX_OWED:
                peer.forgiven += int(owed - MAX_OWED)
            if owed >= 0:
                return True
        return peer.requested_round >= peer.next_round

    def _enter(self, peer: SimulatedPeer, partner: int) -> SimulatedPeer | None:
        job = self.job
        now, round = job.loop.now, peer.next_round
        peer.current_round, peer.partner, peer.opened_at = round, partner, now
        source, target = self.ranks[peer.rank], self.ranks[partner]
        network = job.network
        in_place = network.machine[source] == network.machine[target]
        if not in_place:
            peer.shared_weights.count()
            peer.snapshot = peer.shared_weights.vector.clone()
        other = self.peers.get(partner)
        if other is None or other.partner != peer.rank or other.next_round != round:
            if other is not None:
                other.requested_round = max(other.requested_round, round)
            return other
        size = job.bytes_of(peer.shared_weights.vector)
        if in_place:
            end = network.exchange_in_place(source, size, now)
            contention = job.cluster.memory.contention
            if contention:
                for rank in (source, target):
                    job.delay_s[rank] += contention * (end - now)
        else:
            end = max(network.transfer(source, target, size, now), network.transfer(target, source, size, now))
            peer.bytes += size
            other.bytes += size
            cost = network.cpu_seconds(source, target, size)
            job.delay_s[source] += cost
            job.delay_s[target] += cost
        job.loop.at(end, lambda: self._complete(peer, other, round, in_place))
        return None

    def _complete(self, a: SimulatedPeer, b: SimulatedPeer, round: int, in_place: bool) -> None:
        if a.partner != b.rank or b.partner != a.rank or a.next_round != round or b.next_round != round:
            return  # one of them failed meanwhile
        if in_place:
            self._add_distance(a, a.shared_weights.vector, b.shared_weights.vector)
            kernels.pair_average(a.shared_weights.vector, b.shared_weights.vector)
        else:
            assert a.snapshot is not None
            assert b.snapshot is not None
            self._add_distance(a, a.snapshot, b.snapshot)
            self._add_distance(b, b.snapshot, a.snapshot)
            kernels.add_half_difference(a.shared_weights.vector, b.snapshot, a.snapshot)
            kernels.add_half_difference(b.shared_weights.vector, a.snapshot, b.snapshot)
        for peer in (a, b):
            peer.shared_weights.count(writes=1)
            peer.metrics["exchanges"] += 1
            peer.metrics["exchange_s"] += self.job.loop.now - peer.opened_at
            peer.exchanges += 1
            peer.partner = None
            peer.next_round += 1
        self.advance(a)
        self.advance(b)

    def _add_distance(self, peer: SimulatedPeer, a: Tensor, b: Tensor) -> None:
        """Add |a - b| / |a|, estimated from a sample, to the metrics. Does nothing in timing-only mode."""
        if a.numel() > 1:
            stride = max(1, a.numel() // DISTANCE_SAMPLE)
            x, y = a[::stride], b[::stride]
            peer.metrics["distance"] += float((x - y).norm() / (x.norm() + 1e-12))

    # -- draining ------------------------------------------------------------------------------------------------------

    def finish(self, peer: SimulatedPeer) -> None:
        """Wait until all live learners have finished and all peers have drained to the highest entered round."""
        self.finished.add(peer.rank)
        self._waiting.append(self.job.loop.current)
        self._check_drained()
        if not self._all_drained:
            self.job.wait(self.ranks[peer.rank], "comm", self._waits_for)

    @property
    def _all_drained(self) -> bool:
        return self.last_round is not None and all(p.drained for r, p in self.peers.items() if r not in self.failed)

    def _check_drained(self) -> None:
        live = [r for r in range(self.size) if r not in self.failed]
        if self.last_round is None:
            if not live or any(r not in self.finished for r in live):
                return
            self.initiating = False
            self.last_round = max(self.peers[r].current_round for r in live)
            for r in live:
                self.advance(self.peers[r])
            return
        if self._all_drained:
            loop = self.job.loop
            for process in self._waiting:
                if process is not loop.current:
                    loop.wake(process, loop.now)
            self._waiting.clear()

    def _waits_for(self) -> str:
        if self.last_round is None:
            busy = [str(self.ranks[r]) for r in range(self.size) if r not in self.failed and r not in self.finished]
            return f"rank {', '.join(busy)} to finish"
        late = [
            f"rank {self.ranks[r]} in round {peer.next_round}"
            for r, peer in self.peers.items()
            if not peer.drained and r not in self.failed
        ]
        return f"{', '.join(late)} to drain to round {self.last_round}"

    def _on_failure(self, rank: int, reason: str) -> None:
        if rank not in self.ranks:
            return
        member = self.ranks.index(rank)
        self.failed.add(member)
        for peer in list(self.peers.values()):
            if peer.partner == member:
                peer.metrics["skipped"] += 1
                peer.partner = None
                peer.next_round += 1
        self._check_drained()
        for r, peer in list(self.peers.items()):
            if r not in self.failed:
                self.advance(peer)

    def bytes_sent(self, rank: int) -> float:
        return self.peers[rank].bytes if rank in self.peers else 0.0


class SimulatedGossipHandle:
    """The background exchanges of one learner."""

    def __init__(self, gossip: SimulatedGossip, peer: SimulatedPeer) -> None:
        self._gossip, self._peer = gossip, peer
        self.rounds = 0

    def notify_step(self) -> None:
        """Count one step of the learner; this may make an exchange due."""
        self._peer.steps += 1
        if self._peer.partner is None:
            self._gossip.advance(self._peer)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        peer = self._peer
        total = dict(peer.metrics)
        before, peer.reported = peer.reported, total
        return {name: total[name] - before[name] for name in total}

    def finish(self) -> None:
        """Drain and leave. Collective among the live learners."""
        self._gossip.finish(self._peer)
        assert self._gossip.last_round is not None
        self.rounds = self._gossip.last_round + 1
