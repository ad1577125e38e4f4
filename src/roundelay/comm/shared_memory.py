"""Shared weight vectors of the ranks of one node: in shared memory between processes, in ordinary memory between threads.

Each rank has one anonymous memory file (memfd), which the other ranks of the node open through /proc: nothing is left behind,
however a process ends. `flock` on that file is the lock of the vector; the kernel releases it when a process dies. A second
file per rank stays locked for as long as its process lives, which is how other ranks notice its death. A small header of
counters precedes each vector and is written under the vector's lock.

A process can be stopped while it holds the lock of another rank's vector. Locks are therefore taken with a deadline. The owner
of a vector whose lock does not come back moves to a new file: it copies its vector and leaves the address of the new file in
the header of the old one, where the other ranks find it. What the stopped process writes later goes to the old file.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost, UsageError

SEQUENCE, VERSION, ROUNDS, AVERAGED, GOSSIPS, MOVED_TO = range(6)
"""Counters of a header: accesses; writes; the logical clock of gossip; averages started by other ranks; 1 while its rank
gossips; descriptor + 1 of the file that replaced this one, or 0."""
HEADER_SLOTS = 8
PAGE = 4096
OWN_LOCK_S = 1.0
"""Deadline of a rank for the lock of its own vector, plus SECONDS_PER_BYTE; then it moves to a new file."""
SECONDS_PER_BYTE = 4e-9
"""How long a lock may be held for a vector of this size, generously."""
FIRST_POLL_S, LAST_POLL_S = 0.00005, 0.002


class LockTimeout(Exception):
    """A lock was not released before the deadline."""


class SharedVectors(Protocol):
    """The shared vectors of one node, as seen by one rank."""

    rank: int

    @property
    def here(self) -> Sequence[int]:
        """Ranks whose vectors are shared."""

    def vector(self, rank: int) -> Tensor: ...

    def header(self, rank: int) -> np.ndarray: ...

    def lock(self, rank: int, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Lock a vector for the calling thread. Take the locks of two vectors in rank order.

        Raises LockTimeout after `timeout_s`. None: wait as long as a live process may need, then move the own vector to new
        memory if it is the own one, and raise otherwise.
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

    def locked(self) -> AbstractContextManager[None]:
        return self.vectors.lock(self.rank)

    def count(self, writes: int = 0) -> tuple[int, int]:
        header = self.vectors.header(self.rank)
        header[SEQUENCE] += 1
        header[VERSION] += writes
        return int(header[SEQUENCE]), int(header[VERSION])

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
    def lock(self, rank: int, timeout_s: float | None = None) -> Iterator[None]:
        lock = self._owner.locks[rank]
        if not lock.acquire(timeout=-1 if timeout_s is None else timeout_s):  # threads are not stopped one by one
            raise LockTimeout
        try:
            yield
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


# -- processes ---------------------------------------------------------------------------------------------------------


def memory_file(name: str, nbytes: int, where: str) -> int:
    """Return the descriptor of an anonymous file whose memory is reserved, so that a lack of memory raises here."""
    fd = os.memfd_create(name)
    try:
        if nbytes > available_memory():  # the kernel would end a process instead of refusing
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise UsageError(
            f"shared memory is full: {nbytes / 1e6:.0f} MB more are needed ({error.strerror})",
            where=where,
            hint="free memory, or start fewer learners",
        ) from error
    return fd


def available_memory() -> int:
    """Return the bytes of memory that can be used without swapping; without /proc/meminfo, a number larger than any memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 1 << 62


def open_memory_file(pid: int, fd: int) -> int:
    """Open the memory file of another process of this machine. Raises PeerLost if that process has ended."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        raise PeerLost(
            f"shared memory of process {pid} cannot be opened: {error.strerror}",
            where="shared memory",
            hint="the process has ended, or runs as another user; see its log, or set backend=torch",
        ) from error


class _Segment:
    """One mapped memory file: header and vector."""

    def __init__(self, fd: int, like: Tensor) -> None:
        self.fd = fd
        memory = mmap.mmap(fd, 0)
        self.header = np.frombuffer(memory, dtype=np.int64, count=HEADER_SLOTS)
        self.vector = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=PAGE)


class ShmVectors:
    """Vectors in shared memory between the processes of one node. Collective: all ranks `here` must construct it.

    `vector` is the initial value of this rank's vector. `check` is called while waiting for the other ranks and may raise.
    Raises PeerLost if they do not join within `timeout_s`.
    """

    def __init__(
        self,
        here: Sequence[int],
        rank: int,
        vector: Tensor,
        store: Store,
        name: str,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.here, self.rank = list(here), rank
        self._per_thread = threading.local()
        self.moves = 0
        """How often this rank has moved its vector, because a process was stopped while it held the lock."""
        self._retired: list[_Segment] = []
        self._nbytes = PAGE + vector.numel() * vector.element_size()
        self._own_lock_s = OWN_LOCK_S + SECONDS_PER_BYTE * self._nbytes
        own = _Segment(memory_file(f"roundelay-w-{rank}", self._nbytes, f"rank {rank}"), vector)
        own.vector.copy_(vector)
        self._alive = memory_file(f"roundelay-alive-{rank}", 0, f"rank {rank}")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self._receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = f"\0roundelay-{os.getpid()}-{secrets.token_hex(8)}"  # abstract: no file
        self._receiving.bind(address)
        self._receiving.setblocking(False)
        self._segments = {rank: own}
        self._pids: dict[int, int] = {}
        self._liveness: dict[int, int] = {}
        self._wake: dict[int, socket.socket] = {}
        store.set(f"{name}/memory/{rank}", f"{os.getpid()} {own.fd} {self._alive} {address[1:]}")
        cards = self._gather(store, f"{name}/memory", timeout_s, check)
        for peer, (pid, fd, alive, wake) in cards.items():
            self._pids[peer] = int(pid)
            if peer != rank:
                self._segments[peer] = _Segment(open_memory_file(int(pid), int(fd)), vector)
            self._liveness[peer] = open_memory_file(int(pid), int(alive))
            sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sending.connect("\0" + wake)
            sending.setblocking(False)
            self._wake[peer] = sending

    def _gather(self, store: Store, prefix: str, timeout_s: float, check: Callable[[], None]) -> dict[int, list[str]]:
        keys = [f"{prefix}/{peer}" for peer in self.here]

        def cards() -> dict[int, list[str]] | None:
            check()
            values = store.get_many(keys)
            texts = [values[key] for key in keys]
            return dict(zip(self.here, [text.split() for text in texts if text], strict=True)) if all(texts) else None

        def error() -> PeerLost:
            values = store.get_many(keys)
            missing = [peer for peer, key in zip(self.here, keys, strict=True) if values[key] is None]
            return PeerLost(
                f"ranks {missing} did not share their memory within {timeout_s:.0f} s",
                where=f"rank {self.rank}",
                hint="look at the logs of these ranks; raise timeout_s if they start slowly",
            )

        result = wait_until(cards, timeout_s, error)
        assert result is not None
        return result

    def _segment(self, rank: int) -> _Segment:
        """Return the present segment of a rank: the last one of a chain of moves."""
        segment = self._segments[rank]
        while rank != self.rank and (moved := int(segment.header[MOVED_TO])):
            self._retired.append(segment)  # mapped tensors may still be in use
            segment = self._segments[rank] = _Segment(open_memory_file(self._pids[rank], moved - 1), segment.vector)
        return segment

    def vector(self, rank: int) -> Tensor:
        return self._segment(rank).vector

    def header(self, rank: int) -> np.ndarray:
        return self._segment(rank).header

    @contextmanager
    def lock(self, rank: int, timeout_s: float | None = None) -> Iterator[None]:
        while True:
            segment = self._segment(rank)
            descriptor = self._descriptor(segment)
            if not _try_lock(descriptor, self._own_lock_s if timeout_s is None else timeout_s):
                if timeout_s is not None or rank != self.rank:
                    raise LockTimeout
                self._move()
                continue
            if segment is self._segment(rank):  # not moved while this thread waited
                break
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _descriptor(self, segment: _Segment) -> int:
        # flock belongs to an open file, so every thread opens its own: then it excludes threads as well as processes
        descriptors: dict[int, int] = self._per_thread.__dict__.setdefault("descriptors", {})
        if segment.fd not in descriptors:
            descriptors[segment.fd] = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
        return descriptors[segment.fd]

    def _move(self) -> None:
        """Move the own vector to a new file, without the lock of the old one, whose holder does not run."""
        old = self._segments[self.rank]
        new = _Segment(memory_file(f"roundelay-w-{self.rank}", self._nbytes, f"rank {self.rank}"), old.vector)
        new.vector.copy_(old.vector)
        new.header[:] = old.header
        new.header[SEQUENCE] += 1
        new.header[VERSION] += 1
        self._segments[self.rank] = new
        self._retired.append(old)
        old.header[MOVED_TO] = new.fd + 1
        self.moves += 1

    def wake(self, rank: int) -> None:
        wake_socket(self._wake[rank])

    def wakeups(self) -> socket.socket:
        return self._receiving

    def alive(self, rank: int) -> bool:
        try:
            fcntl.flock(self._liveness[rank], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._liveness[rank], fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        drain_socket(self._receiving)
        self._receiving.close()
        for sending in self._wake.values():
            sending.close()
        segments = [*self._segments.values(), *self._retired]
        for fd in {*(segment.fd for segment in segments), *self._liveness.values(), self._alive}:
            os.close(fd)
        self._segments, self._liveness, self._retired = {}, {}, []


def _try_lock(descriptor: int, timeout_s: float) -> bool:
    """Take an exclusive flock; return False if it was not released within `timeout_s`."""
    deadline, pause = 0.0, FIRST_POLL_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            if now >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LAST_POLL_S)
        else:
            return True
