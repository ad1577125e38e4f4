"""Ranks as threads of one process: for tests and laptops. A group of size 1 is plain training.

The last rank to call a collective computes the result, and every rank takes a copy. Sums are in rank order, so this backend is
always deterministic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from roundelay.comm.base import GossipCommunicator, all_reduce_bytes, plain_sum, weighted_mean, weighted_sum
from roundelay.comm.node_group import CollectiveNodeGroup
from roundelay.comm.vectors import LocalVectors
from roundelay.core import kernels
from roundelay.core.contracts import SharedWeights
from roundelay.errors import PeerLost
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore


class ThreadGroup:
    """State shared by the threads of one job."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.store = LocalStore()
        self._tables: dict[str, _CollectiveTable] = {}
        self._lock = threading.Lock()

    def comm(self, rank: int) -> ThreadCommunicator:
        """Return the communicator of one rank."""
        return ThreadCommunicator(self, range(self.size), rank, "all")

    def table(self, name: str, size: int) -> _CollectiveTable:
        """Return the collectives of the group `name`; the first call creates them."""
        with self._lock:
            return self._tables.setdefault(name, _CollectiveTable(size, self.timeout_s))

    def fail(self, rank: int, reason: str) -> None:
        """Report that a rank's thread has failed; ranks that wait for it in a collective raise PeerLost."""
        StoreMembership(self.store).report(rank, reason)
        for table in list(self._tables.values()):
            table.fail(rank, reason)


class _CollectiveTable:
    """The inputs and results of the collectives of one group, by their number."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._size, self._timeout_s = size, timeout_s
        self._changed = threading.Condition()
        self._inputs: dict[int, dict[int, Any]] = {}
        self._results: dict[int, Any] = {}
        self._readers: dict[int, int] = {}
        self._failed: tuple[int, str] | None = None

    def put(self, number: int, rank: int, value: Any, combine: Callable[[dict[int, Any]], Any]) -> None:
        """Add the input of one rank; the last input computes the result."""
        with self._changed:
            inputs = self._inputs.setdefault(number, {})
            inputs[rank] = value
            if len(inputs) == self._size:
                self._results[number] = combine(inputs)
                del self._inputs[number]
                self._changed.notify_all()

    def is_complete(self, number: int) -> bool:
        return number in self._results

    def get(self, number: int, rank: int) -> Any:
        """Block until the result is available and return it. Every rank must call this once."""
        with self._changed:
            while number not in self._results:
                if self._failed is not None:
                    raise PeerLost(
                        f"rank {self._failed[0]} was lost: {self._failed[1]}",
                        where=f"rank {rank}",
                        hint="see its error above",
                    )
                if not self._changed.wait(self._timeout_s):
                    missing = sorted(set(range(self._size)) - set(self._inputs.get(number, {})))
                    raise PeerLost(
                        f"ranks {missing} did not call collective {number} within {self._timeout_s:.0f} s",
                        where=f"rank {rank}",
                    )
            result = self._results[number]
            self._readers[number] = self._readers.get(number, 0) + 1
            if self._readers[number] == self._size:
                del self._results[number], self._readers[number]
            return result

    def fail(self, rank: int, reason: str) -> None:
        with self._changed:
            self._failed = self._failed or (rank, reason)
            self._changed.notify_all()


class _ThreadWork:
    """A collective in progress."""

    def __init__(self, wait: Callable[[], Tensor], is_done: Callable[[], bool]) -> None:
        self.wait, self._is_done = wait, is_done

    @property
    def done(self) -> bool:
        return self._is_done()


class ThreadCommunicator(GossipCommunicator):
    """The communicator of one thread."""

    def __init__(
        self, threads: ThreadGroup, ranks: Sequence[int], rank: int, name: str, membership: StoreMembership | None = None
    ) -> None:
        super().__init__(threads.store, ranks, rank, name, threads.timeout_s, membership)
        self._threads = threads
        self._table = threads.table(name, self.size)
        self._number = 0

    def _start(self, value: Any, combine: Callable[[dict[int, Any]], Any], finish: Callable[[Any], Any]) -> _ThreadWork:
        """Start a collective: `combine` gets the values of all ranks, `finish` makes this rank's result of the common one."""
        self._number += 1
        number, table = self._number, self._table
        table.put(number, self.rank, value, combine)
        return _ThreadWork(lambda: finish(table.get(number, self.rank)), lambda: table.is_complete(number))

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> _ThreadWork:
        self._bytes += all_reduce_bytes(x, self.size)
        return self._start((x, weight), weighted_mean, lambda result: result.clone())

    def all_reduce_(self, x: Tensor) -> _ThreadWork:
        self._bytes += all_reduce_bytes(x, self.size)
        return self._start(x, plain_sum, lambda result: x.copy_(result))

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> _ThreadWork:
        self._bytes += x.numel() * x.element_size() * (len(row) - 1)
        # a copy, since a neighbor may read it after this rank has changed x
        return self._start(x.clone(), lambda inputs: dict(inputs), lambda inputs: weighted_sum(inputs, row))

    def broadcast(self, x: Tensor) -> None:
        result = self._start(x, lambda inputs: inputs[0].clone(), lambda result: result).wait()
        if self.rank != 0:
            x.copy_(result)

    def node_group(self, like: Tensor) -> CollectiveNodeGroup:
        return CollectiveNodeGroup(self)

    def publish(self, vector: Tensor) -> SharedWeights:
        kernels.compile_for(vector.dtype)

        def combine(inputs: dict[int, Any]) -> LocalVectors:
            vectors = LocalVectors(range(self.size))
            for rank, value in inputs.items():
                vectors.publish(rank, value)
            return vectors

        return self._share(self._start(vector, combine, lambda vectors: vectors.view(self.rank)).wait())  # type: ignore[arg-type]

    def remote_add(self, peer: int, d: Tensor) -> int:
        version = super().remote_add(peer, d)
        self._bytes += d.numel() * d.element_size()
        return version

    def new_group(self, ranks: Sequence[int], name: str, timeout_s: float | None = None) -> ThreadCommunicator | None:
        if self.rank not in ranks:
            return None
        return ThreadCommunicator(self._threads, *self._subgroup(ranks, name), self.membership)

    def close(self) -> None:
        self._close_gossip()
