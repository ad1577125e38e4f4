"""Shared weight vectors of the ranks of one node: their contract, and their form between threads of one process.

`roundelay.comm.shared_memory` holds their form between processes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
from torch import Tensor

SEQUENCE, VERSION, ROUNDS, AVERAGED, GOSSIPS, HOLDER, FENCED = range(7)
"""Counters of a header: accesses; writes; the logical clock of gossip; averages started by other ranks; 1 while its rank
gossips; rank + 1 of the last other rank that took the lock, or 0; 1 if another rank of the node knows that this rank was
declared failed. The last one is written without the lock."""
HEADER_SLOTS = 8


class LockTimeout(Exception):
    """A lock was not released before the deadline."""


class VectorSegment:
    """The memory of one rank's vector: header and vector."""

    def __init__(self, header: np.ndarray, vector: Tensor) -> None:
        self.header, self.vector = header, vector

    def count(self, writes: int = 0) -> tuple[int, int]:
        """Count one access and `writes` writes; return (sequence number, version). Call it under the lock."""
        self.header[SEQUENCE] += 1
        self.header[VERSION] += writes
        return int(self.header[SEQUENCE]), int(self.header[VERSION])


class SharedVectors(Protocol):
    """The shared vectors of one node, as seen by one rank."""

    rank: int

    @property
    def here(self) -> Sequence[int]:
        """Ranks whose vectors are shared."""

    def vector(self, rank: int) -> Tensor: ...

    def header(self, rank: int) -> np.ndarray: ...

    def lock(self, rank: int, timeout_s: float | None = None) -> AbstractContextManager[VectorSegment]:
        """Lock a vector for the calling thread and yield its segment; use no other one inside the block. Not reentrant.

        Raises LockTimeout after `timeout_s`, and PeerLost if the process of the rank has ended. None: wait as long as a
        process that runs may need, then move the own vector to new memory if it is the own one, and raise otherwise. What
        the holder of a lock writes to the old memory of a vector that has moved is added to the new memory later.
        """

    def wake(self, rank: int) -> None:
        """Wake the gossip thread of a rank. Does not block."""

    def wakeups(self) -> socket.socket:
        """Return the socket that becomes readable when this rank's gossip thread is woken."""

    def alive(self, rank: int) -> bool:
        """Return whether the process of a rank lives and has not closed its vectors."""

    def close(self) -> None: ...


class SharedVector:
    """The shared vector of one rank."""

    def __init__(self, vectors: SharedVectors, rank: int) -> None:
        self.vectors, self.rank = vectors, rank

    @property
    def vector(self) -> Tensor:
        """The vector in its present memory; read it again after `locked()` has been entered."""
        return self.vectors.vector(self.rank)

    def locked(self) -> AbstractContextManager[VectorSegment]:
        return self.vectors.lock(self.rank)

    def count(self, writes: int = 0) -> tuple[int, int]:
        return VectorSegment(self.vectors.header(self.rank), self.vector).count(writes)

    @property
    def version(self) -> int:
        return int(self.vectors.header(self.rank)[VERSION])


# -- wake-ups ----------------------------------------------------------------------------------------------------------


class Wakeups:
    """A socket pair that wakes a thread. Several unread wake-ups count as one."""

    def __init__(self) -> None:
        self.receiving, self._sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.receiving.setblocking(False)
        self._sending.setblocking(False)

    def wake(self) -> None:
        wake_socket(self._sending)

    def close(self) -> None:
        self.receiving.close()
        self._sending.close()


def wake_socket(sending: socket.socket) -> None:
    """Send a wake-up. A full queue already holds one, and a closed receiver needs none."""
    try:
        sending.send(b"!")
    except OSError:
        return


def drain_socket(receiving: socket.socket) -> None:
    """Discard unread wake-ups."""
    try:
        while receiving.recv(64):
            pass
    except OSError:
        return


# -- threads -----------------------------------------------------------------------------------------------------------


class LocalVectors:
    """Vectors in the memory of one process: for threads, or for a rank that is alone on its node."""

    def __init__(self, here: Sequence[int]) -> None:
        self.here = list(here)
        self.vectors: dict[int, Tensor] = {}
        self.headers = {rank: np.zeros(HEADER_SLOTS, dtype=np.int64) for rank in here}
        self.locks = {rank: threading.Lock() for rank in here}
        self.wakeups = {rank: Wakeups() for rank in here}
        self._closed: set[int] = set()

    def publish(self, rank: int, vector: Tensor) -> None:
        self.vectors[rank] = vector.detach().clone()

    def view(self, rank: int) -> LocalVectorsView:
        return LocalVectorsView(self, rank)

    def alive(self, rank: int) -> bool:
        return rank not in self._closed

    def close(self, rank: int) -> None:
        """Mark a rank as closed; the last one closes the wake-up sockets."""
        self._closed.add(rank)
        if len(self._closed) == len(self.here):
            for wakeups in self.wakeups.values():
                wakeups.close()


class LocalVectorsView:
    """`LocalVectors` as seen by one rank."""

    def __init__(self, owner: LocalVectors, rank: int) -> None:
        self._owner, self.rank, self.here = owner, rank, owner.here

    def vector(self, rank: int) -> Tensor:
        return self._owner.vectors[rank]

    def header(self, rank: int) -> np.ndarray:
        return self._owner.headers[rank]

    @contextmanager
    def lock(self, rank: int, timeout_s: float | None = None) -> Iterator[VectorSegment]:
        lock = self._owner.locks[rank]
        if not lock.acquire(timeout=-1 if timeout_s is None else timeout_s):  # threads are not stopped one by one
            raise LockTimeout
        try:
            yield VectorSegment(self._owner.headers[rank], self._owner.vectors[rank])
        finally:
            lock.release()

    def wake(self, rank: int) -> None:
        self._owner.wakeups[rank].wake()

    def wakeups(self) -> socket.socket:
        return self._owner.wakeups[self.rank].receiving

    def alive(self, rank: int) -> bool:
        return self._owner.alive(rank)

    def close(self) -> None:
        self._owner.close(self.rank)
