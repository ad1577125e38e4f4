"""Exchanges in virtual time, by the rules of comm/gossip/thread.py.

Agents play their rounds in order, one exchange open at a time. One enters its next round when its learner has done as many
gradients as it has had exchanges, or when somebody already waits for it in that round or a later one. Between machines,
snapshots are taken when a side enters, travel when both have, and each side adds half their difference when both have
arrived; inside a machine both vectors are averaged where they lie.
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
    """A vector that neighbours may read and change. One thing runs at a time, so it needs no lock; leaving it takes the time
    of the copy between host memory and the learner's device."""

    __slots__ = ("_copies", "_job", "_rank", "_size", "update_log", "vector", "version")

    def __init__(self, job: SimulatedJob, rank: int, vector: Tensor) -> None:
        self._job, self._rank = job, rank
        self.vector = vector.detach().clone()
        self.update_log = self.version = 0
        self._size = job.bytes_of(vector)
        self._copies = job.network.copies

    def locked(self) -> SimulatedSharedWeights:
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._copies and kind is None:
            end = self._job.network.device_copy(self._rank, self._size, self._job.world.now)
            self._job.sleep_until(self._rank, "copy", end)

    def count(self, writes: int = 0) -> tuple[int, int]:
        self.update_log += 1
        self.version += writes
        return self.update_log, self.version


class SimulatedPeer:
    """One learner's agent: what it has entered, met and been asked for."""

    __slots__ = (
        "asked",
        "bytes",
        "entered",
        "gradients",
        "met",
        "metrics",
        "open",
        "opened_at",
        "owed_from",
        "per_meeting",
        "rank",
        "rested",
        "round",
        "shared_weights",
        "snapshot",
        "taken",
    )  # fmt: skip

    def __init__(self, rank: int, shared_weights: SimulatedSharedWeights, steps_per_exchange: float) -> None:
        self.rank, self.shared_weights, self.per_meeting = rank, shared_weights, steps_per_exchange
        self.round = 0
        self.entered = self.asked = -1
        self.open: int | None = None
        self.opened_at = 0.0
        self.gradients = self.met = self.owed_from = 0
        self.snapshot: Tensor | None = None
        self.rested = False
        self.bytes = 0.0
        self.metrics = {"exchanges": 0.0, "exchange_s": 0.0, "distance": 0.0, "skipped": 0.0}
        self.taken = dict(self.metrics)


class SimulatedGossip:
    """The agents of one group."""

    def __init__(self, job: SimulatedJob, ranks: Sequence[int], matching: Matching) -> None:
        self.job, self.ranks, self.size = job, list(ranks), len(ranks)
        self.agents: dict[int, SimulatedPeer] = {}
        self.dead: set[int] = set()
        self.asking = True
        self.last: int | None = None
        """The round all play to before they leave."""
        self.done: set[int] = set()
        self._leaving: list[Any] = []
        self._matching = matching
        self._partners: dict[int, Sequence[int]] = {}
        job.when_dead(self._bury)

    def join(self, rank: int, shared_weights: SimulatedSharedWeights, steps_per_exchange: float) -> SimulatedGossipHandle:
        agent = self.agents[rank] = SimulatedPeer(rank, shared_weights, steps_per_exchange)
        self.advance(agent)
        return SimulatedGossipHandle(self, agent)

    def partners(self, round: int) -> Sequence[int]:
        """Everybody's partner in a round: drawn once for all, as each of them would draw it."""
        found = self._partners.get(round)
        if found is None:
            found = self._partners[round] = self._matching(round)
            if len(self._partners) > 4 * self.size + 64:
                oldest = min(a.round for a in self.agents.values())
                self._partners = {r: p for r, p in self._partners.items() if r >= oldest}
        return found

    # -- rounds --------------------------------------------------------------------------------------------------------

    def advance(self, agent: SimulatedPeer) -> None:
        """All moves that have become possible, this agent's first."""
        todo = [agent]
        while todo:
            one = todo.pop()
            other = self._advance(one)
            if other is not None:
                todo.append(other)

    def _advance(self, agent: SimulatedPeer) -> SimulatedPeer | None:
        """This agent's moves; returns the one it asks, if it does."""
        rank = agent.rank
        while agent.open is None and not agent.rested:
            if self.last is not None and agent.round > self.last:
                agent.rested = True
                self._look()
                return None
            if self.last is None and len(self.dead) + 1 >= self.size:
                return None
            partner = self.partners(agent.round)[rank]
            if partner == rank or partner in self.dead:
                agent.metrics["skipped"] += partner != rank
                agent.round += 1
                continue
            if self.last is None and not self._may_enter(agent):
                return None
            return self._enter(agent, partner)
        return None

    def _may_enter(self, agent: SimulatedPeer) -> bool:
        if self.asking:
            owed = agent.gradients / agent.per_meeting - agent.met - agent.owed_from
            if owed > MAX_OWED:
                agent.owed_from += int(owed - MAX_OWED)
            if owed >= 0:
                return True
        return agent.asked >= agent.round

    def _enter(self, agent: SimulatedPeer, partner: int) -> SimulatedPeer | None:
        job = self.job
        now, round = job.world.now, agent.round
        agent.entered, agent.open, agent.opened_at = round, partner, now
        here, there = self.ranks[agent.rank], self.ranks[partner]
        network = job.network
        in_place = network.machine[here] == network.machine[there]
        if not in_place:
            agent.shared_weights.count()
            agent.snapshot = agent.shared_weights.vector.clone()
        other = self.agents.get(partner)
        if other is None or other.open != agent.rank or other.round != round:
            if other is not None:
                other.asked = max(other.asked, round)
            return other
        size = job.bytes_of(agent.shared_weights.vector)
        if in_place:
            end = network.meeting_in_place(here, size, now)
            contention = job.cluster.memory.contention
            if contention:
                for rank in (here, there):
                    job.stolen[rank] += contention * (end - now)
        else:
            end = max(network.transfer(here, there, size, now), network.transfer(there, here, size, now))
            agent.bytes += size
            other.bytes += size
            cost = network.cpu_seconds(here, there, size)
            job.stolen[here] += cost
            job.stolen[there] += cost
        job.world.at(end, lambda: self._complete(agent, other, round, in_place))
        return None

    def _complete(self, a: SimulatedPeer, b: SimulatedPeer, round: int, in_place: bool) -> None:
        if a.open != b.rank or b.open != a.rank or a.round != round or b.round != round:
            return  # one of them has died meanwhile
        mine, theirs = a.shared_weights, b.shared_weights
        if in_place:
            self._note_distance(a, mine.vector, theirs.vector)
            kernels.pair_average(mine.vector, theirs.vector)
        else:
            assert a.snapshot is not None
            assert b.snapshot is not None
            self._note_distance(a, a.snapshot, b.snapshot)
            self._note_distance(b, b.snapshot, a.snapshot)
            kernels.add_half_difference(mine.vector, b.snapshot, a.snapshot)
            kernels.add_half_difference(theirs.vector, a.snapshot, b.snapshot)
        for agent in (a, b):
            agent.shared_weights.count(writes=1)
            agent.metrics["exchanges"] += 1
            agent.metrics["exchange_s"] += self.job.world.now - agent.opened_at
            agent.met += 1
            agent.open = None
            agent.round += 1
        self.advance(a)
        self.advance(b)

    def _note_distance(self, agent: SimulatedPeer, a: Tensor, b: Tensor) -> None:
        """|a - b| / |a|, from a sample: what the exchange finds apart. Not for timing alone."""
        if a.numel() > 1:
            stride = max(1, a.numel() // DISTANCE_SAMPLE)
            x, y = a[::stride], b[::stride]
            agent.metrics["distance"] += float((x - y).norm() / (x.norm() + 1e-12))

    # -- leaving -------------------------------------------------------------------------------------------------------

    def leave(self, agent: SimulatedPeer) -> None:
        """The learner has no more work. When all living ones have said so, nobody asks any more and all play to the highest
        round that somebody has entered."""
        self.done.add(agent.rank)
        self._leaving.append(self.job.world.current)
        self._look()
        if not self._over:
            self.job.wait(self.ranks[agent.rank], "comm", lambda: self._why())

    @property
    def _over(self) -> bool:
        return self.last is not None and all(a.rested for r, a in self.agents.items() if r not in self.dead)

    def _look(self) -> None:
        living = [r for r in range(self.size) if r not in self.dead]
        if self.last is None:
            if any(r not in self.done for r in living):
                return
            self.asking = False
            self.last = max(self.agents[r].entered for r in living)
            for r in living:
                self.advance(self.agents[r])
            return
        if self._over:
            for task in self._leaving:
                if task is not self.job.world.current:
                    self.job.world.wake(task, self.job.world.now)
            self._leaving.clear()

    def _why(self) -> str:
        if self.last is None:
            busy = [str(self.ranks[r]) for r in range(self.size) if r not in self.dead and r not in self.done]
            return f"rank {', '.join(busy)} to run out of work"
        late = [
            f"rank {self.ranks[r]} in round {a.round}" for r, a in self.agents.items() if not a.rested and r not in self.dead
        ]
        return f"{', '.join(late)} to play to round {self.last}"

    def _bury(self, rank: int, why: str) -> None:
        if rank not in self.ranks:
            return
        member = self.ranks.index(rank)
        self.dead.add(member)
        for agent in list(self.agents.values()):
            if agent.open == member:
                agent.metrics["skipped"] += 1
                agent.open = None
                agent.round += 1
        self._look()
        for r, agent in list(self.agents.items()):
            if r not in self.dead:
                self.advance(agent)

    def bytes_sent(self, rank: int) -> float:
        return self.agents[rank].bytes if rank in self.agents else 0.0


class SimulatedGossipHandle:
    """The background exchanges of one learner."""

    def __init__(self, ring: SimulatedGossip, agent: SimulatedPeer) -> None:
        self._ring, self._agent = ring, agent
        self.rounds = 0

    def notify_step(self) -> None:
        self._agent.gradients += 1
        if self._agent.open is None:
            self._ring.advance(self._agent)

    def pop_metrics(self) -> dict[str, float]:
        agent = self._agent
        now = dict(agent.metrics)
        taken, agent.taken = agent.taken, now
        return {name: now[name] - taken[name] for name in now}

    def finish(self) -> None:
        self._ring.leave(self._agent)
        assert self._ring.last is not None
        self.rounds = self._ring.last + 1
