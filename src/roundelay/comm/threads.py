"""Threads of one process: for tests and laptops; size 1 is plain training.

The rendezvous is one table: whoever arrives last works out the result, everybody takes a copy. Sums are in rank order, so
this backend is always exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roundelay.comm.gossip.handle import BackgroundGossip
from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.node_group import CollectiveNodeGroup
from roundelay.comm.shared_memory import LocalVectors, SharedVector
from roundelay.core import kernels
from roundelay.core.contracts import Matching, SharedWeights
from roundelay.core.update_log import Op, UpdateLog
from roundelay.errors import PeerLost
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore


def weighted_mean(brought: dict[int, tuple[Tensor, float | None]]) -> Tensor:
    """The mean of what members brought with their weights, added in rank order: the same bits wherever it is done."""
    x, size = brought[0][0], len(brought)
    xs = torch.stack([brought[r][0].reshape(-1) for r in range(size)])
    given = [brought[r][1] for r in range(size)]
    weights = torch.tensor([1.0 if weight is None else weight for weight in given], dtype=x.dtype)
    out = torch.empty_like(xs[0])
    kernels.ordered_sum(out, xs, weights)
    return out.div_(weights.sum()).view_as(x)


def plain_sum(brought: dict[int, Tensor]) -> Tensor:
    """The sum of what members brought, added in rank order."""
    xs = torch.stack([brought[r] for r in range(len(brought))])
    out = torch.empty_like(xs[0])
    kernels.ordered_sum(out, xs, torch.ones(len(brought), dtype=xs.dtype))
    return out


def weighted_sum(brought: dict[int, Tensor], row: dict[int, float]) -> Tensor:
    """One member's weighted sum over itself and its neighbours, added in rank order."""
    members = sorted(row)
    out = torch.empty_like(brought[members[0]])
    kernels.mix(out, [brought[m] for m in members], [row[m] for m in members])
    return out


class ThreadGroup:
    """What the threads of one job share."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.store = LocalStore()
        self.tables: dict[str, _MeetingPoint] = {}
        self.lock = threading.Lock()

    def comm(self, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(self, range(self.size), rank, "all")

    def table(self, name: str, size: int) -> _MeetingPoint:
        with self.lock:
            return self.tables.setdefault(name, _MeetingPoint(size, self.timeout_s))

    def fail(self, rank: int, why: str) -> None:
        """A thread has ended in an error: nobody may wait for it."""
        StoreMembership(self.store).report(rank, why)
        for table in list(self.tables.values()):
            table.fail(rank, why)


class _MeetingPoint:
    """Where the members of one group put what they bring to a rendezvous."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.changed = threading.Condition()
        self.brought: dict[int, dict[int, Any]] = {}
        self.results: dict[int, Any] = {}
        self.taken: dict[int, int] = {}
        self.failed: tuple[int, str] | None = None
        self.board: LocalVectors | None = None

    def bring(self, number: int, rank: int, what: Any, combine: Callable[[dict[int, Any]], Any]) -> None:
        with self.changed:
            brought = self.brought.setdefault(number, {})
            brought[rank] = what
            if len(brought) == self.size:
                self.results[number] = combine(brought)
                del self.brought[number]
                self.changed.notify_all()

    def take(self, number: int, rank: int) -> Any:
        with self.changed:
            while number not in self.results:
                if self.failed is not None:
                    raise PeerLost(
                        f"rank {self.failed[0]} was lost: {self.failed[1]}",
                        where=f"rank {rank}",
                        hint="see its error above",
                    )
                if not self.changed.wait(self.timeout_s):
                    missing = sorted(set(range(self.size)) - set(self.brought.get(number, {})))
                    raise PeerLost(
                        f"ranks {missing} did not come to rendezvous {number} in {self.timeout_s:.0f} s",
                        where=f"rank {rank}",
                    )
            result = self.results[number]
            self.taken[number] = self.taken.get(number, 0) + 1
            if self.taken[number] == self.size:
                del self.results[number], self.taken[number]
            return result

    def fail(self, rank: int, why: str) -> None:
        with self.changed:
            self.failed = self.failed or (rank, why)
            self.changed.notify_all()


class _ThreadWork:
    def __init__(self, take: Callable[[], Tensor], ready: Callable[[], bool]) -> None:
        self._take, self._ready = take, ready

    @property
    def done(self) -> bool:
        return self._ready()

    def wait(self) -> Tensor:
        return self._take()


class ThreadCommunicator:
    """One thread's view."""

    def __init__(self, threads: ThreadGroup, ranks: Sequence[int], rank: int, name: str) -> None:
        self._threads, self.ranks, self.rank, self.size, self.name = threads, list(ranks), rank, len(ranks), name
        self.store = threads.store
        self.membership = StoreMembership(threads.store)
        self._table = threads.table(name, self.size)
        self._number = 0
        self._agent: GossipThread | None = None
        self._update_log: UpdateLog | None = None
        self._bytes = 0

    def live_ranks(self) -> list[int]:
        dead = self.membership.failed_ranks()
        return [m for m in range(self.size) if self.ranks[m] not in dead]

    def _rendezvous(self, what: Any, combine: Callable[[dict[int, Any]], Any]) -> Callable[[], Any]:
        self._number += 1
        number = self._number
        self._table.bring(number, self.rank, what, combine)
        return lambda: self._table.take(number, self.rank)

    def _pending(self, what: Any, combine: Callable[[dict[int, Any]], Any], finish: Callable[[Any], Tensor]) -> _ThreadWork:
        number = self._number + 1
        take = self._rendezvous(what, combine)
        return _ThreadWork(lambda: finish(take()), lambda: number in self._table.results)

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> _ThreadWork:
        self._bytes += 2 * x.numel() * x.element_size() * (self.size - 1) // self.size
        return self._pending((x, weight), weighted_mean, lambda result: result.clone())

    def all_reduce_(self, x: Tensor) -> _ThreadWork:
        self._bytes += 2 * x.numel() * x.element_size() * (self.size - 1) // self.size
        return self._pending(x, plain_sum, lambda result: x.copy_(result))

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> _ThreadWork:
        # The copy is taken here, since a neighbour may read it after this member has moved on.
        self._bytes += x.numel() * x.element_size() * (len(row) - 1)

        return self._pending(x.clone(), lambda brought: dict(brought), lambda brought: weighted_sum(brought, row))

    def broadcast(self, x: Tensor) -> None:
        result = self._rendezvous(x, lambda brought: brought[0].clone())()
        if self.rank != 0:
            x.copy_(result)

    def node_group(self, like: Tensor) -> CollectiveNodeGroup:
        return CollectiveNodeGroup(self)

    def publish(self, vector: Tensor) -> SharedWeights:
        kernels.compile_for(vector.dtype)

        def combine(brought: dict[int, Any]) -> LocalVectors:
            board = LocalVectors(range(self.size))
            for rank, v in brought.items():
                board.publish(rank, v)
            return board

        self._board = self._rendezvous(vector, combine)().seen_by(self.rank)
        return SharedVector(self._board, self.rank)

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> BackgroundGossip:
        assert isinstance(shared_weights, SharedVector)
        self._agent = GossipThread(
            shared_weights, self._board, self.size, b"", None, lambda r, why: self.membership.report(self.ranks[r], why)
        )
        self._agent.update_log = self._update_log
        self._agent.start()
        self._agent.gossip(matching, steps_per_exchange)
        return BackgroundGossip(
            self._agent, self.membership, self.ranks, self.rank, self.name, self._threads.timeout_s, self.store
        )

    def remote_add(self, peer: int, d: Tensor) -> int:
        theirs = SharedVector(self._board, peer)
        with theirs.locked():
            number, version = theirs.count(writes=1)
            if self._update_log is not None:
                self._update_log.append(Op.REMOTE_ADD, peer, number, self.rank)
            theirs.vector.add_(d)
        self._bytes += d.numel() * d.element_size()
        return version - 1

    def remote_get(self, peer: int, out: Tensor) -> int:
        theirs = SharedVector(self._board, peer)
        with theirs.locked():
            number, version = theirs.count()
            if self._update_log is not None:
                self._update_log.append(Op.REMOTE_GET, peer, number, self.rank)
            out.copy_(theirs.vector)
        return version

    def record(self, update_log: UpdateLog) -> None:
        self._update_log = update_log

    def new_group(self, ranks: Sequence[int], name: str) -> ThreadCommunicator | None:
        if self.rank not in ranks:
            return None
        return ThreadCommunicator(
            self._threads, [self.ranks[r] for r in ranks], list(ranks).index(self.rank), f"{self.name}/{name}"
        )

    def bytes_sent(self) -> int:
        return self._bytes

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
            self._board.close()
