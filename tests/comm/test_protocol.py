"""The gossip protocol under random interleavings: delays, lost connections, freezes, deaths and the end, in any order.

Connections are lost on one side first, replaced, and opened with an outdated handshake; failures are known to some ranks first.

A run is a list of integers, and each integer is one event. After the list, all faults but deaths are healed, and every rank
finishes. A failing list is shortened before it is shown.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from roundelay.comm.gossip.protocol import (
    LAST_RETRY_S,
    SUSPECT_S,
    Action,
    ApplyHalfDifference,
    Average,
    Discard,
    GossipProtocol,
    Receive,
    SendSnapshot,
)
from roundelay.topology.resolver import SeededMatching

RUNS, EVENTS = 20_000, 30
TICK_S = 1.0


class World:
    """Ranks with one weight each, on machines, with a FIFO channel in each direction of an edge."""

    def __init__(self, size: int, machines: int, topology: str) -> None:
        self.size, self.now, self.trace = size, 0.0, [f"{size} ranks on {machines} machines, {topology}"]
        self.machine = [rank * machines // size for rank in range(size)]
        matching = SeededMatching(topology, size, 1)
        self.protocols = []
        for rank in range(size):
            local = [r for r in range(size) if self.machine[r] == self.machine[rank]]
            self.protocols.append(GossipProtocol(rank, size, matching, 1.0, local))
        self.w = [float(rank) for rank in range(size)]
        self.added = sum(self.w)
        self.snapshots: list[dict[int, list[float | None]]] = [{} for _ in range(size)]
        self.channels: dict[tuple[int, int], deque[tuple[str, int, float]]] = {}
        self.frozen: set[int] = set()
        self.dead: set[int] = set()
        self.locked: set[int] = set()
        self.defers = False
        self.deferred: dict[int, Average] = {}
        self.finished: set[int] = set()
        self.half_lost: set[tuple[int, int]] = set()
        """(rank, peer): the connection is lost, and the rank does not know."""
        self.stale: set[frozenset[int]] = set()
        """Edges whose last handshake was outdated: a snapshot may arrive twice, which closes the connection."""
        self.unaware: list[tuple[int, int]] = []
        """(rank, failed): the rank does not know of the failure yet."""
        self.clock = [0] * size
        """Logical clocks in shared memory. A rank that dies in an average has advanced the partner's and nothing else."""
        for a, b in sorted(matching.edges):
            if self.machine[a] != self.machine[b]:
                self.connect(a, b)

    # -- what happens --------------------------------------------------------------------------------------------------

    def connect(self, a: int, b: int, outdated: int = 0, replace: bool = False) -> None:
        if ((a, b) in self.channels and not replace) or {a, b} & self.dead:
            return
        self.cut(a, b)
        self.notice_losses(a, b)
        self.channels[a, b], self.channels[b, a] = deque(), deque()
        applied = {a: self.protocols[a].edges[b].applied, b: self.protocols[b].edges[a].applied}
        if outdated:
            self.stale.add(frozenset((a, b)))
            applied[a] = max(0, applied[a] - outdated)
        self.perform(a, self.protocols[a].connected(b, applied[b], self.now))
        self.perform(b, self.protocols[b].connected(a, applied[a], self.now))

    def cut(self, a: int, b: int, unnoticed: int | None = None) -> None:
        """Lose a connection; the rank `unnoticed` notices it later."""
        if self.channels.pop((a, b), None) is None:
            return
        del self.channels[b, a]
        self.half_lost |= {(a, b), (b, a)}
        self.notice_losses(*{a, b} - {unnoticed})

    def notice_losses(self, *ranks: int) -> None:
        for rank, peer in sorted(self.half_lost):
            if rank in ranks:
                self.half_lost.discard((rank, peer))
                if rank not in self.dead:
                    self.perform(rank, self.protocols[rank].disconnected(peer, self.now))

    def kill(self, rank: int, known_late: int = 0, in_average: bool = False) -> None:
        partners = [p for p in range(self.size) if self.machine[p] == self.machine[rank] and p not in self.dead | {rank}]
        if in_average and partners:
            self.clock[partners[0]] = max(self.protocols[partners[0]].rounds, self.protocols[rank].rounds) + 1
        self.dead.add(rank)
        for a, b in [pair for pair in self.channels if pair[0] == rank]:
            self.cut(a, b)
        for peer in range(self.size):
            if peer not in self.dead:
                self.unaware.append((peer, rank))
        self.learn_failures(known_late)

    def learn_failures(self, known_late: int = 0) -> None:
        """Declare failures to all ranks except the last `known_late`."""
        later = self.unaware[len(self.unaware) - known_late :]
        for rank, failed in self.unaware[: len(self.unaware) - known_late]:
            if rank not in self.dead:
                self.perform(rank, self.protocols[rank].fail(failed, self.now))
        self.unaware = later

    def step(self, rank: int) -> None:
        self.w[rank] += 1.0
        self.added += 1.0
        self.perform(rank, self.protocols[rank].step(self.now))

    def deliver(self, source: int, target: int) -> None:
        channel, protocol = self.channels[source, target], self.protocols[target]
        kind, number, value = channel.popleft()
        if kind == "header":
            try:
                self.perform(target, protocol.announced(source, number, self.now))
            except ValueError:
                assert frozenset((source, target)) in self.stale, "a snapshot is sent twice"
                self.stale.discard(frozenset((source, target)))
                self.cut(source, target)
                self.connect(min(source, target), max(source, target))
        elif kind == "data":
            self.snapshots[target][source][1] = value
            self.perform(target, protocol.received(source, number, self.now))
        else:
            self.perform(target, protocol.acknowledged(source, number, self.now))

    def deliverable(self) -> list[tuple[int, int]]:
        """Channels whose next message can be read now: data only when its receiver has provided memory."""
        return [
            (a, b)
            for (a, b), channel in self.channels.items()
            if channel and b not in self.frozen and (channel[0][0] != "data" or self.awaits(b, a))
        ]

    def awaits(self, rank: int, peer: int) -> bool:
        edge, protocol = self.protocols[rank].edges[peer], self.protocols[rank]
        return edge.announced > edge.applied and peer not in protocol._deferred

    def tick(self) -> None:
        self.now += TICK_S
        for rank, protocol in enumerate(self.protocols):
            if rank not in self.dead | self.frozen:
                self.perform(rank, protocol.tick(self.now))

    # -- actions of the protocol -----------------------------------------------------------------------------------------

    def perform(self, rank: int, actions: list[Action]) -> None:
        protocol, kept = self.protocols[rank], self.snapshots[rank]
        count = 0
        while actions:
            action, count = actions.pop(0), count + 1
            assert count < 1000, f"rank {rank} performs {action} again and again"
            if isinstance(action, Average):
                peer = action.peer
                assert self.machine[peer] == self.machine[rank]
                if len(actions) == 0 and self.defers and rank not in self.deferred:
                    self.deferred[rank] = action  # the thread gets the locks later: both sides may start at the same time
                    continue
                if max(protocol.rounds, self.clock[rank]) > action.round:
                    if self.clock[rank] > protocol.rounds:
                        protocol.averaged_by_peer(0, self.clock[rank])
                    actions += protocol.overtaken(peer, self.now)
                    continue
                if peer in self.dead:
                    if (rank, peer) in self.unaware:
                        actions += protocol.busy(peer, self.now)
                    continue  # `fail` has been called
                if {peer, rank} & self.locked:
                    actions += protocol.busy(peer, self.now)
                    continue
                self.w[rank] = self.w[peer] = (self.w[rank] + self.w[peer]) / 2
                rounds = max(protocol.rounds, self.protocols[peer].rounds) + 1
                self.protocols[peer].averaged_by_peer(1, rounds)
                actions += protocol.averaged(peer, rounds, self.now)
            elif isinstance(action, SendSnapshot):
                if action.fresh:
                    assert action.peer not in kept, "a snapshot that is still needed is overwritten"
                    kept[action.peer] = [self.w[rank], None]
                if (rank, action.peer) in self.channels:
                    value = kept[action.peer][0]
                    assert value is not None
                    self.channels[rank, action.peer].append(("header", action.number, 0.0))
                    self.channels[rank, action.peer].append(("data", action.number, value))
            elif isinstance(action, ApplyHalfDifference):
                own, received = kept[action.peer]
                assert own is not None
                assert received is not None
                self.w[rank] += (received - own) / 2
                kept[action.peer][1] = None
                if (rank, action.peer) in self.channels:
                    self.channels[rank, action.peer].append(("ack", action.number, 0.0))
            elif isinstance(action, Discard):
                kept.pop(action.peer, None)
            else:
                assert isinstance(action, Receive)

    def perform_deferred(self) -> None:
        """Perform the averages whose start was delayed, on all ranks that run."""
        self.defers = False
        for rank in [r for r in self.deferred if r not in self.frozen]:
            action = self.deferred.pop(rank)
            if rank not in self.dead and self.protocols[rank]._initiated == action.peer:
                self.perform(rank, [action])

    # -- a run -----------------------------------------------------------------------------------------------------------

    def play(self, number: int) -> None:
        """Play the event that an integer encodes."""

        def draw(count: int) -> int:
            nonlocal number
            number, value = divmod(number, count)
            return value

        kind, rank, self.defers = draw(16), draw(self.size), draw(5) < 2
        if not self.defers:
            self.perform_deferred()
        runs = rank not in self.dead | self.frozen
        edges = sorted({(min(pair), max(pair)) for pair in self.channels})
        if kind < 5 and runs:
            self.trace.append(f"step {rank}")
            self.step(rank)
        elif kind < 10 and (ready := self.deliverable()):
            source, target = ready[draw(len(ready))]
            self.trace.append(f"deliver {self.channels[source, target][0]} {source} -> {target}")
            self.deliver(source, target)
        elif kind == 10 and draw(2):
            self.trace.append(f"finish {rank}")
            self.finish(rank)
        elif kind == 11 and edges:
            edge = edges[draw(len(edges))]
            unnoticed = (*edge, None)[draw(3)]
            self.trace.append(f"cut {edge}, not noticed by {unnoticed}")
            self.cut(*edge, unnoticed)
        elif kind == 12:
            ticks = 1 + draw(4)
            self.trace.append(f"{ticks} ticks")
            for _ in range(ticks):
                self.tick()
        elif kind == 13:
            self.trace.append(f"freeze or resume {rank}")
            self.frozen ^= {rank}
            self.locked = {r for r in self.locked if r in self.frozen} | ({rank} & self.frozen if draw(3) == 0 else set())
        elif kind == 14 and runs and draw(4) == 0 and len(self.dead) < self.size - 1:
            in_average, known_late = bool(draw(2)), draw(self.size)
            self.trace.append(f"kill {rank}, {in_average=}, {known_late=}")
            self.kill(rank, known_late, in_average)
        elif kind == 15 and edges and draw(2):
            edge, outdated = edges[draw(len(edges))], draw(2)
            self.trace.append(f"replace the connection {edge}, {outdated=}")
            self.connect(*edge, outdated, replace=True)
        elif kind == 15:
            self.trace.append("connect all")
            self.connect_all()

    def finish(self, rank: int) -> None:
        if rank not in self.dead:
            self.finished.add(rank)
            self.protocols[rank].stop_initiating()
            if rank in self.deferred:  # the thread removes it from its queue
                del self.deferred[rank]
                self.protocols[rank]._initiated = None

    def connect_all(self) -> None:
        for protocol in self.protocols:
            for peer in protocol.edges:
                self.connect(min(protocol.rank, peer), max(protocol.rank, peer))

    def settle(self) -> None:
        """Deliver everything, with ticks, until nothing moves."""
        for _ in range(40):
            while ready := self.deliverable():
                self.deliver(*ready[0])
            self.tick()
            if not any(self.channels.values()):
                return

    def check(self) -> None:
        """Check the laws: no rank stalls because of a frozen rank, all drain, and the mean is conserved."""
        self.trace.append("check")
        self.perform_deferred()
        self.learn_failures()
        live = [r for r in range(self.size) if r not in self.dead]
        self.connect_all()
        if len(self.trace) % 2:  # the end comes now, with exchanges open
            self.frozen.clear()
            self.locked.clear()
            self.perform_deferred()
            self.check_drained(live)
            return
        # with frozen ranks: all other ranks still exchange
        for _ in range(int(2 * SUSPECT_S / TICK_S) if self.frozen else 1):
            self.settle_frozen()
        before = [protocol.exchanges for protocol in self.protocols]
        for _ in range(2 * self.size if self.frozen else 4):
            for rank in live:
                if rank not in self.frozen:
                    self.step(rank)
            self.settle_frozen()
        for rank in live:
            peers = set(self.protocols[rank].edges) | set(self.protocols[rank].local & self.ring(rank))
            if rank not in self.frozen | self.finished and peers - self.dead - self.frozen:
                assert self.protocols[rank].exchanges > before[rank], f"rank {rank} stopped exchanging: {self.frozen=}"
        # once the frozen ranks run again, every live partner is used again
        self.frozen.clear()
        self.locked.clear()
        self.perform_deferred()
        self.settle()
        self.now += LAST_RETRY_S
        for rank in live:
            protocol = self.protocols[rank]
            for peer in set(self.ring(rank)) - self.dead:
                assert protocol._available(peer, self.now), f"rank {rank} never exchanges with rank {peer} again"
            assert not protocol.suspected & set(protocol.edges) - self.dead, f"rank {rank} still suspects {protocol.suspected}"
        self.check_drained(live)

    def check_drained(self, live: list[int]) -> None:
        for rank in live:
            self.finish(rank)
        self.settle()
        for rank in live:
            assert not self.protocols[rank].open_edges, f"rank {rank} does not drain"
            assert not self.snapshots[rank], f"rank {rank} keeps snapshots"
        if not self.dead:
            assert sum(self.w) == pytest.approx(self.added, abs=1e-6), "the mean is not conserved"

    def ring(self, rank: int) -> set[int]:
        edges = self.protocols[rank].matching.edges
        return {peer for pair in edges if rank in pair for peer in pair} - {rank}

    def settle_frozen(self) -> None:
        while ready := self.deliverable():
            self.deliver(*ready[0])
        self.tick()


def run(shape: tuple[int, int, str], events: list[int]) -> tuple[World, str | None]:
    """Play the events and check the laws; return the world, with its trace, and what failed."""
    world = World(*shape)
    try:
        for number in events:
            world.play(number)
        world.check()
    except (AssertionError, ValueError, KeyError) as error:
        return world, f"{type(error).__name__}: {error}"
    return world, None


def shortened(shape: tuple[int, int, str], events: list[int]) -> list[int]:
    """Drop events as long as the run still fails."""
    position = 0
    while position < len(events):
        fewer = events[:position] + events[position + 1 :]
        if run(shape, fewer)[1] is not None:
            events = fewer
        else:
            position += 1
    return events


@pytest.mark.timeout(300)
def test_laws_hold_in_random_interleavings() -> None:
    rng = random.Random(14)
    exchanges = deaths = 0
    for _ in range(RUNS):
        size = rng.randint(2, 9)
        shape = (size, rng.randint(1, size), rng.choice(["ring", "random_ring", "exponential"]))
        events = [rng.randrange(1 << 40) for _ in range(rng.randint(0, EVENTS))]
        world, failure = run(shape, events)
        if failure is not None:
            world, failure = run(shape, shortened(shape, events))
            pytest.fail(f"{failure}\n" + "\n".join(world.trace))
        exchanges += sum(protocol.exchanges for protocol in world.protocols)
        deaths += len(world.dead)
    assert exchanges > 10 * RUNS, "the explorer must reach exchanges"
    assert deaths > RUNS // 20, "the explorer must reach deaths"


@pytest.mark.parametrize("machines", [1, 8])
def test_ranks_in_step_play_the_rounds_of_the_topology(machines: int) -> None:
    """All ranks start their exchange before any is performed: no round is played twice, none is left out."""
    size, rounds = 8, 24
    world = World(size, machines, "ring")
    start = np.array(world.w)
    for _ in range(rounds):
        world.defers = True
        for rank in range(size):
            world.perform(rank, world.protocols[rank].step(world.now))
        world.perform_deferred()
        while ready := world.deliverable():
            world.deliver(*ready[0])
    expected = start
    for number in range(rounds):
        expected = matrix(SeededMatching("ring", size, 1)(number)) @ expected
    assert np.allclose(world.w, expected), (world.w, expected)


def matrix(partners: Sequence[int]) -> np.ndarray:
    """Return the mixing matrix of one round."""
    identity = np.eye(len(partners))
    return (identity + identity[list(partners)]) / 2


def test_a_slow_partner_delays_only_its_own_exchanges() -> None:
    """Bytes of rank 1 trickle for minutes: it is not suspected, and ranks 0 and 2 exchange all the time."""
    world = World(3, 3, "ring")
    for _ in range(100):
        for rank in (0, 2):
            world.step(rank)
            world.protocols[rank].progress(1, world.now)
        for _ in range(4):
            for source, target in ((0, 2), (2, 0)):
                while world.channels[source, target] and (source, target) in world.deliverable():
                    world.deliver(source, target)
        world.tick()
    for rank in (0, 2):
        assert not world.protocols[rank].suspected
        assert world.protocols[rank].exchanges > 40, world.protocols[rank].exchanges
