"""Published vectors within everybody's reach: the memory that learners of one machine share.

Beside each vector stands a small header of counters. Each counter has one writer, or is written under the locks of both
vectors of a meeting, so nothing here needs an atomic instruction.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
from torch import Tensor

HISTORY, VERSION, ENTERED, DONE = range(4)
"""Counters of a header: reads and writes so far; writes so far; the round its agent has entered; the round last met."""
HEADER_SLOTS = 8


class Board(Protocol):
    """What an agent needs of shared memory."""

    rank: int

    @property
    def here(self) -> Sequence[int]:
        """Members whose vectors are on this board."""

    def vector(self, rank: int) -> Tensor: ...

    def header(self, rank: int) -> np.ndarray: ...

    def lock(self, rank: int) -> AbstractContextManager[None]:
        """The lock of a vector, for the calling thread."""

    def wake(self, rank: int) -> None:
        """Wakes the agent of that member."""

    def wakeups(self) -> socket.socket:
        """Becomes readable when somebody woke this member's agent."""

    def alive(self, rank: int) -> bool: ...

    def close(self) -> None: ...


class OnBoard:
    """A published vector on a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.vector = board.vector(rank)
        self._header = board.header(rank)

    def locked(self) -> AbstractContextManager[None]:
        return self.board.lock(self.rank)

    def count(self, writes: int = 0) -> tuple[int, int]:
        self._header[HISTORY] += 1
        self._header[VERSION] += writes
        return int(self._header[HISTORY]), int(self._header[VERSION])

    @property
    def version(self) -> int:
        return int(self._header[VERSION])


class Wakeups:
    """One byte sent is one wake-up; many unread ones are as good as one."""

    def __init__(self) -> None:
        self.receiving, self._sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.receiving.setblocking(False)
        self._sending.setblocking(False)

    def wake(self) -> None:
        nudge(self._sending)

    def close(self) -> None:
        self.receiving.close()
        self._sending.close()


def nudge(sending: socket.socket) -> None:
    """Sends a wake-up; where the queue is full the sleeper has enough of them, and a sleeper that is gone needs none."""
    try:
        sending.send(b"!")
    except OSError:
        return


def drain(receiving: socket.socket) -> None:
    """Throws unread wake-ups away."""
    try:
        while receiving.recv(64):
            pass
    except OSError:
        return


class MemoryBoard:
    """A board in the memory of one process: for threads, or for a learner with nobody else on its machine."""

    def __init__(self, here: Sequence[int]) -> None:
        self.here = list(here)
        self._vectors: dict[int, Tensor] = {}
        self._headers = {rank: np.zeros(HEADER_SLOTS, dtype=np.int64) for rank in here}
        for header in self._headers.values():
            header[ENTERED] = header[DONE] = -1
        self._locks = {rank: threading.Lock() for rank in here}
        self._wakeups = {rank: Wakeups() for rank in here}
        self._gone: set[int] = set()

    def publish(self, rank: int, vector: Tensor) -> None:
        self._vectors[rank] = vector.detach().clone()

    def seen_by(self, rank: int) -> MemoryBoardView:
        return MemoryBoardView(self, rank)

    def close(self) -> None:
        for wakeups in self._wakeups.values():
            wakeups.close()


class MemoryBoardView:
    """A MemoryBoard as one of its members sees it."""

    def __init__(self, board: MemoryBoard, rank: int) -> None:
        self._board, self.rank, self.here = board, rank, board.here

    def vector(self, rank: int) -> Tensor:
        return self._board._vectors[rank]

    def header(self, rank: int) -> np.ndarray:
        return self._board._headers[rank]

    @contextmanager
    def lock(self, rank: int) -> Iterator[None]:
        with self._board._locks[rank]:
            yield

    def wake(self, rank: int) -> None:
        self._board._wakeups[rank].wake()

    def wakeups(self) -> socket.socket:
        return self._board._wakeups[self.rank].receiving

    def alive(self, rank: int) -> bool:
        return rank not in self._board._gone

    def close(self) -> None:
        self._board._gone.add(self.rank)
