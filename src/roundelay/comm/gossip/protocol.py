"""The gossip protocol of one rank: a pure state machine. Events are method calls, and each returns actions to perform.

    in shared memory   w_i, w_j <- (w_i + w_j) / 2          performed by the side that is due, under both locks
    otherwise          w_i <- w_i + (s_j - s_i) / 2         s_i, s_j: the snapshots with number n of this edge

A rank owes one exchange per `steps_per_exchange` local steps. An exchange that a partner starts counts too, but credit for such
exchanges is limited to MAX_CREDIT, so that a rank that was averaged often while it did not run still starts its own. The
partner is that of the rank's current round. Rounds are a logical clock: they choose partners, and nothing waits for them. A
round whose partner has failed, is suspected, or already has an exchange with this rank under way is skipped.

An exchange that takes far longer than usual is slow. A rank exchanges with other partners during that time, but takes part in
one slow exchange at a time, or the weights would diverge: see MAX_OPEN. Further slow partners are skipped or answered later.

Between machines, snapshots on one edge are numbered from 1 in each direction, and those with the same number belong together. A
rank that receives snapshot n sends its own snapshot n if it has not yet. At most one number is open per edge. Both sides keep
their snapshot until both have applied it; after a reconnection each side sends it again if the other has not applied it. So an
exchange that a lost connection interrupts is completed later, and the mean over ranks is conserved.

There is no clock: `now` is passed in, in seconds. `thread.py` drives this class in real time, `simulate/gossip.py` in virtual
time, and the tests with random interleavings and faults.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from roundelay.core.contracts import Matching

MAX_OWED = 2.0
"""Exchanges that are made up for after a delay; averaging more often would change little."""
MAX_CREDIT = 1.0
"""Exchanges started by partners that count in advance."""
MAX_OPEN, MAX_SLOW, MAX_UNAPPLIED = 2, 1, 4
"""Snapshots of this rank that are under way at the same time: of an exchange it has started and of one that it answers; of slow
exchanges; of all, because exchanges with new partners turn out to be slow later. Each adds half a difference to w when it is
complete. With k slow ones at every rank, a difference between two sites is multiplied by about 1 - k, so with more of them
w would diverge. Only partners that have vanished in the middle of an exchange do not count."""
SLOW_S, SLOW_FACTOR = 1.0, 4.0
"""An exchange that takes longer than SLOW_S, and SLOW_FACTOR times as long as usual, is slow: its rank does not wait."""
MAX_SEARCH = 64
"""Rounds that are looked at for an available partner at once: a step of the training thread must not take long."""
SUSPECT_S = 3.0
"""An open exchange without progress for this time makes its partner suspected."""
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 8.0
"""A suspected partner in shared memory is tried again after this time, which doubles up to the second value."""


@dataclass(frozen=True)
class Average:
    """Average both vectors in shared memory, then call `averaged`, or `busy` if a lock cannot be taken in time.

    If under the locks the clock of this rank is past `round`, a partner has averaged with it meanwhile: do nothing and call
    `overtaken`. Two ranks that start the same exchange at the same time would otherwise perform it twice, and the second one
    would take the place of the next round.
    """

    peer: int
    round: int


@dataclass(frozen=True)
class SendSnapshot:
    """Send snapshot `number`; take it now if `fresh`, otherwise send the kept one again."""

    peer: int
    number: int
    fresh: bool


@dataclass(frozen=True)
class Receive:
    """Receive the announced snapshot into memory, then call `received`."""

    peer: int
    number: int


@dataclass(frozen=True)
class ApplyHalfDifference:
    """Add half the difference of the two snapshots to w, and tell the peer (`acknowledged` on its side)."""

    peer: int
    number: int


@dataclass(frozen=True)
class Discard:
    """Release both snapshots of this number: neither side needs them any more."""

    peer: int
    number: int


Action = Average | SendSnapshot | Receive | ApplyHalfDifference | Discard


@dataclass
class Edge:
    """The exchanges with one peer that shares no memory with this rank."""

    connected: bool = False
    sent: int = 0
    """Number of the last snapshot taken for this peer. At most `applied` + 1."""
    announced: int = 0
    applied: int = 0
    acknowledged: int = 0
    """Last number that the peer has applied."""
    opened_at: float = 0.0
    """When the last snapshot was taken."""
    seconds: float = 0.0
    """Duration of the last exchange."""
    progress_at: float = 0.0

    @property
    def open(self) -> bool:
        """Whether an exchange has begun that one of the two sides has not applied."""
        return self.sent > min(self.applied, self.acknowledged) or self.announced > self.applied

    @property
    def unapplied(self) -> bool:
        """Whether this rank has taken a snapshot and has not applied the exchange."""
        return self.sent > self.applied

    @property
    def answered(self) -> bool:
        """Whether both snapshots of an exchange are under way: it depends on no other exchange."""
        return self.announced > self.applied


class GossipProtocol:
    """The protocol of one rank. Not thread-safe.

    rounds      the logical clock: rounds used or skipped so far
    exchanges   completed exchanges of this rank, including those that partners started
    skipped     rounds skipped because their partner was not available
    """

    def __init__(
        self, rank: int, size: int, matching: Matching, steps_per_exchange: float = 1.0, local: Collection[int] = ()
    ) -> None:
        self.rank, self.size, self.matching = rank, size, matching
        self.local = frozenset(local) - {rank}
        self.neighbors = frozenset(peer for pair in matching.edges if rank in pair for peer in pair if peer != rank)
        self.edges = {peer: Edge() for peer in sorted(self.neighbors - self.local)}
        self.rounds = self.exchanges = self.skipped = 0
        self.failed: set[int] = set()
        self.suspected: set[int] = set()
        self._per_step = 1.0 / steps_per_exchange
        self._owed = 0.0
        self._initiating = True
        self._initiated: int | None = None
        self._deferred: list[int] = []
        self._usual_s: float | None = None
        """Usual duration of an exchange; it follows short ones faster than long ones."""
        self._retry: dict[int, tuple[float, float]] = {}

    # -- events ------------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[Action]:
        """Count one local step."""
        self._owed = min(self._owed + self._per_step, MAX_OWED)
        return self._initiate(now)

    def tick(self, now: float) -> list[Action]:
        """Note that time has passed: a partner without progress becomes suspected. Call it every few tenths of a second."""
        self.suspected -= {peer for peer, (until, _) in self._retry.items() if now >= until}
        for peer, edge in self.edges.items():
            if edge.open and now - edge.progress_at > SUSPECT_S:
                self.suspected.add(peer)
                if self._initiated == peer:
                    self._initiated = None
        return self._answer_deferred(now) + self._initiate(now)

    def averaged(self, peer: int, rounds: int, now: float) -> list[Action]:
        """The average that this rank started in shared memory is done; `rounds` is the clock of both sides after it."""
        self._retry.pop(peer, None)
        self.suspected.discard(peer)
        self.rounds = max(self.rounds, rounds)
        self._complete(peer)
        return self._initiate(now)

    def averaged_by_peer(self, count: int, rounds: int) -> None:
        """Peers in shared memory have averaged `count` times with this rank; `rounds` is the clock after the last of them."""
        self.rounds = max(self.rounds, rounds)
        for _ in range(count):
            self._complete(None)

    def overtaken(self, peer: int, now: float) -> list[Action]:
        """A partner has averaged with this rank before its own average began. Call `averaged_by_peer` first."""
        if self._initiated == peer:
            self._initiated = None
        return self._initiate(now)

    def busy(self, peer: int, now: float) -> list[Action]:
        """A lock could not be taken: skip this round, and suspect the peer for a while if it happens again."""
        if self._initiated == peer:
            self._initiated = None
        self._skip()
        _, delay = self._retry.get(peer, (0.0, 0.0))
        self._retry[peer] = (now + delay, min(max(2 * delay, FIRST_RETRY_S), LAST_RETRY_S))
        if delay:
            self.suspected.add(peer)
        return self._initiate(now)

    def connected(self, peer: int, peer_applied: int, now: float) -> list[Action]:
        """A connection is open; the peer has applied exchanges up to `peer_applied`."""
        edge = self.edges[peer]
        edge.connected, edge.announced, edge.progress_at = True, edge.applied, now
        self.suspected.discard(peer)
        actions = self._acknowledge(peer, peer_applied, now)
        if edge.sent > edge.acknowledged:  # not `peer_applied`, which is older than what the peer has acknowledged since
            actions.append(SendSnapshot(peer, edge.sent, fresh=False))
        return actions + self._initiate(now)

    def disconnected(self, peer: int, now: float) -> list[Action]:
        """The connection is lost. Open exchanges wait for the next one; rounds with this peer are skipped until then."""
        edge = self.edges[peer]
        edge.connected, edge.announced = False, edge.applied
        if peer in self._deferred:
            self._deferred.remove(peer)
        if self._initiated == peer:
            self._initiated = None
        return self._answer_deferred(now) + self._initiate(now)

    def announced(self, peer: int, number: int, now: float) -> list[Action]:
        """The header of snapshot `number` has arrived. Raises ValueError if the peer violates the protocol."""
        edge = self.edges[peer]
        if number != edge.applied + 1 or edge.announced > edge.applied:
            raise ValueError(f"snapshot {edge.applied + 1} is next (got {number})")
        edge.announced, edge.progress_at = number, now
        actions = self._acknowledge(peer, number - 1, now)  # its acknowledgment may have been lost with a connection
        if edge.sent < number:
            self._deferred.append(peer)
            return actions + self._answer_deferred(now)
        return [*actions, Receive(peer, number)]

    def received(self, peer: int, number: int, now: float) -> list[Action]:
        """Snapshot `number` is in memory."""
        edge = self.edges[peer]
        edge.applied, edge.progress_at = number, now
        edge.seconds = seconds = now - edge.opened_at
        rate = 1.0 if self._usual_s is None else 0.3 if seconds < self._usual_s else 0.05
        self._usual_s = (1 - rate) * (self._usual_s or 0.0) + rate * seconds
        actions: list[Action] = [ApplyHalfDifference(peer, number)]
        if edge.acknowledged >= number:
            actions.append(Discard(peer, number))
        self.suspected.discard(peer)
        self._complete(peer)
        return actions + self._answer_deferred(now) + self._initiate(now)

    def acknowledged(self, peer: int, number: int, now: float) -> list[Action]:
        """The peer has applied snapshots up to `number`. The next exchange with it may start, if no slow one is under way."""
        actions = self._acknowledge(peer, number, now)
        return actions if any(self._slow(edge, now) for edge in self._under_way()) else actions + self._initiate(now)

    def _acknowledge(self, peer: int, number: int, now: float) -> list[Action]:
        edge = self.edges[peer]
        edge.progress_at = now
        self.suspected.discard(peer)
        if number <= edge.acknowledged:
            return []
        edge.acknowledged = number
        return [Discard(peer, number)] if edge.applied >= number else []

    def progress(self, peer: int, now: float) -> None:
        """Bytes have moved between this rank and the peer."""
        if peer in self.edges:
            self.edges[peer].progress_at = now
            self.suspected.discard(peer)

    def fail(self, peer: int, now: float) -> list[Action]:
        """The peer was declared failed: forget its exchanges."""
        if peer in self.failed:
            return []
        self.failed.add(peer)
        if self._initiated == peer:
            self._initiated = None
        edge = self.edges.get(peer)
        if edge is None:
            return self._initiate(now)
        discard: list[Action] = [Discard(peer, edge.sent)] if edge.open else []
        edge.applied = edge.acknowledged = edge.sent = max(edge.sent, edge.applied)
        return discard + self.disconnected(peer, now)

    def stop_initiating(self) -> None:
        """Only answer partners from now on."""
        self._initiating = False

    def silent_peers(self) -> list[int]:
        """Return the live peers whose rounds are skipped now: suspected, or without a connection."""
        peers = self.suspected | {peer for peer, edge in self.edges.items() if not edge.connected}
        return sorted(peers - self.failed)

    @property
    def open_edges(self) -> list[int]:
        """Peers with which an exchange has begun and is not known to be applied on both sides."""
        peers = [peer for peer, edge in self.edges.items() if edge.open]
        return peers + [self._initiated] if self._initiated is not None and self._initiated in self.local else peers

    # -- inside ------------------------------------------------------------------------------------------------------

    def _slow(self, edge: Edge, now: float) -> bool:
        """Return whether the exchange of an edge, open or the last one, takes far longer than usual for this rank."""
        seconds = max(edge.seconds, now - edge.opened_at if edge.unapplied else 0.0)
        return seconds > max(SLOW_S, SLOW_FACTOR * (self._usual_s or 0.0))

    def _under_way(self) -> list[Edge]:
        """Return the edges with an unapplied snapshot of this rank, without those of partners that have vanished."""
        return [e for peer, e in self.edges.items() if e.unapplied and e.connected and peer not in self.suspected]

    def _may_open(self, edge: Edge, under_way: list[Edge], now: float) -> bool:
        """Return whether one more snapshot may be taken. Slow partners, and new ones that may be slow, wait for each other."""
        slow = sum(self._slow(e, now) for e in under_way)
        if len(under_way) >= MAX_UNAPPLIED or len(under_way) - slow >= MAX_OPEN:
            return False
        return slow < MAX_SLOW if self._slow(edge, now) else edge.applied > 0 or slow <= MAX_SLOW

    def _may_start(self, peer: int, under_way: list[Edge], now: float) -> bool:
        """Return whether this rank may start an exchange. One place is left for an answer."""
        return sum(not e.answered for e in under_way) <= MAX_SLOW and self._may_open(self.edges[peer], under_way, now)

    def _start(self, peer: int, now: float) -> SendSnapshot:
        edge = self.edges[peer]
        edge.sent, edge.opened_at, edge.progress_at = edge.applied + 1, now, now
        return SendSnapshot(peer, edge.sent, fresh=True)

    def _may_answer(self, peer: int, under_way: list[Edge], now: float) -> bool:
        """Return whether this rank may answer an exchange now.

        Ranks must not wait for each other in a circle. An exchange whose two snapshots are under way depends on no other one,
        and one that this rank waits for makes only higher ranks wait.
        """
        if peer < self.rank and (self._slow(self.edges[peer], now) or not self.edges[peer].applied):
            under_way = [e for e in under_way if e.answered]
        return self._may_open(self.edges[peer], under_way, now)

    def _answer_deferred(self, now: float) -> list[Action]:
        """Answer what may be answered now: first come, first served, except that slow partners make no other ones wait."""
        actions: list[Action] = []
        under_way = self._under_way() if self._deferred else []
        for peer in list(self._deferred):
            if self._may_answer(peer, under_way, now):
                self._deferred.remove(peer)
                edge = self.edges[peer]
                edge.sent, edge.opened_at = edge.announced, now
                under_way.append(edge)
                actions += [SendSnapshot(peer, edge.sent, fresh=True), Receive(peer, edge.sent)]
        return actions

    def _complete(self, peer: int | None) -> None:
        """Count an exchange; `peer` is the partner if it may be the one of the current round."""
        self.exchanges += 1
        self._owed = max(self._owed - 1.0, -MAX_CREDIT)
        if peer is None:
            return
        if self._initiated == peer:
            self._initiated = None
        if peer in self.edges and self.matching(self.rounds)[self.rank] == peer:
            self.rounds += 1

    def _skip(self) -> None:
        self.skipped += 1
        self.rounds += 1

    def _available(self, peer: int, now: float) -> bool:
        if peer in self.failed:
            return False
        if peer in self.local:
            return now >= self._retry.get(peer, (0.0, 0.0))[0]
        edge = self.edges[peer]
        return edge.connected and not edge.open and peer not in self.suspected

    def _initiate(self, now: float) -> list[Action]:
        """Start an exchange with the partner of the next usable round, if one is due and none started by this rank is open."""
        if self._initiated in self.edges and self._slow(self.edges[self._initiated], now):
            self._initiated = None
        if not self._initiating or self._initiated is not None or self._owed < 1.0 or len(self.failed) + 1 >= self.size:
            return []
        actions: list[Action] = []
        skipped, under_way, last_resort = self.skipped, self._under_way(), None
        for _ in range(min(2 * self.size + 2, MAX_SEARCH) if any(self._available(p, now) for p in self.neighbors) else 0):
            peer = self.matching(self.rounds)[self.rank]
            if peer == self.rank:
                self.rounds += 1
            elif not self._available(peer, now):
                self._skip()
            elif peer in self.local:
                self._initiated = peer
                return [*actions, Average(peer, self.rounds)]
            elif not self._may_start(peer, under_way, now):
                if sum(not self._slow(e, now) for e in under_way) >= MAX_OPEN:
                    return actions  # the round waits until one of them is complete
                self._skip()
            elif not self._slow(self.edges[peer], now):
                self._initiated = peer
                return [*actions, self._start(peer, now)]
            elif peer < self.rank:  # slow ones are started by the higher rank, so that few wait for an answer
                actions.append(self._start(peer, now))
                under_way.append(self.edges[peer])
                self.rounds += 1
            else:
                last_resort = peer
                self._skip()
        self.skipped = skipped  # no partner is available now; the clock advances, so that later rounds are tried next
        return [self._start(last_resort, now)] if last_resort is not None and not actions else actions
