"""Shared weight vectors of the ranks of one node, in shared memory between processes.

Each rank has one anonymous memory file (memfd), which the other ranks of the node open through /proc: nothing is left behind,
however a process ends. `flock` on that file is the lock of the vector; the kernel releases it when a process dies. A second
file per rank stays locked for as long as its process lives, which is how other ranks notice its death. A small header of
counters precedes each vector and is written under the vector's lock.

A process can be stopped while it holds the lock of another rank's vector. Locks are therefore taken with a deadline. The owner
of a vector whose lock does not come back moves to a new file: it copies its vector and leaves the address of the new file in
the header of the old one, where the other ranks find it. `lock` yields the segment it has locked, and its holder uses no other,
so what the stopped process writes later goes to the old file. Threads of the owner exclude each other by a mutex as well: only
another process can make the owner move.
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
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roundelay.comm.vectors import (
    HEADER_SLOTS,
    HOLDER,
    MOVED_TO,
    VERSION,
    LockTimeout,
    VectorSegment,
    drain_socket,
    wake_socket,
)
from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost, UsageError

PAGE = 4096
OWN_LOCK_S = 1.0
"""Deadline of a rank for the lock of its own vector, plus SECONDS_PER_BYTE; then it moves to a new file."""
SECONDS_PER_BYTE = 4e-9
"""How long a lock may be held for a vector of this size, generously."""
STOPPED_S = 0.02
"""Time after which the owner of a vector looks whether the holder of its lock has been stopped, and then moves at once."""
FIRST_POLL_S, LAST_POLL_S = 0.00005, 0.002


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


class _FileSegment(VectorSegment):
    """A mapped memory file."""

    def __init__(self, fd: int, like: Tensor) -> None:
        self.fd = fd
        memory = mmap.mmap(fd, 0)
        header = np.frombuffer(memory, dtype=np.int64, count=HEADER_SLOTS)
        super().__init__(header, torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=PAGE))


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by a signal or a debugger, or has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t", b"Z", b"X")
    except OSError:
        return True


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
        self._descriptors: list[int] = []
        """Descriptors that threads have opened for locks."""
        self._own_mutex = threading.Lock()
        """Excludes the threads of this process from the own vector."""
        self.moves = 0
        """How often this rank has moved its vector, because a process was stopped while it held the lock."""
        self._retired: list[_FileSegment] = []
        self._nbytes = PAGE + vector.numel() * vector.element_size()
        self._own_lock_s = OWN_LOCK_S + SECONDS_PER_BYTE * self._nbytes
        own = _FileSegment(memory_file(f"roundelay-w-{rank}", self._nbytes, f"rank {rank}"), vector)
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
                self._segments[peer] = _FileSegment(open_memory_file(int(pid), int(fd)), vector)
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

    def _segment(self, rank: int) -> _FileSegment:
        """Return the present segment of a rank: the last one of a chain of moves."""
        segment = self._segments[rank]
        while rank != self.rank and (moved := int(segment.header[MOVED_TO])):
            self._retired.append(segment)  # mapped tensors may still be in use
            segment = self._segments[rank] = _FileSegment(open_memory_file(self._pids[rank], moved - 1), segment.vector)
        return segment

    def vector(self, rank: int) -> Tensor:
        return self._segment(rank).vector

    def header(self, rank: int) -> np.ndarray:
        return self._segment(rank).header

    @contextmanager
    def lock(self, rank: int, timeout_s: float | None = None) -> Iterator[VectorSegment]:
        if rank == self.rank:
            if not self._own_mutex.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise LockTimeout
            try:
                with self._file_lock(rank, timeout_s) as segment:
                    yield segment
            finally:
                self._own_mutex.release()
            return
        with self._file_lock(rank, self._own_lock_s if timeout_s is None else timeout_s) as segment:
            segment.header[HOLDER] = self.rank + 1
            try:
                yield segment
            finally:
                segment.header[HOLDER] = 0

    @contextmanager
    def _file_lock(self, rank: int, timeout_s: float | None) -> Iterator[VectorSegment]:
        """Take the flock of a rank's present segment. With None, the own vector moves if the lock does not come back."""
        while True:
            segment = self._segment(rank)
            descriptor = self._descriptor(segment)
            if timeout_s is not None:
                if not _try_lock(descriptor, timeout_s):
                    raise LockTimeout
            elif not _try_lock(descriptor, self._own_lock_s, partial(self._holder_is_stopped, segment)):
                self._move()
                continue
            if not segment.header[MOVED_TO]:  # not moved while this thread waited
                break
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        try:
            yield segment
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _holder_is_stopped(self, segment: VectorSegment) -> bool:
        holder = int(segment.header[HOLDER]) - 1
        return holder in self._pids and is_stopped(self._pids[holder])

    def _descriptor(self, segment: _FileSegment) -> int:
        # flock belongs to an open file, so every thread opens its own: then it excludes threads as well as processes
        descriptors: dict[int, int] = self._per_thread.__dict__.setdefault("descriptors", {})
        if segment.fd not in descriptors:
            descriptors[segment.fd] = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
            self._descriptors.append(descriptors[segment.fd])
        return descriptors[segment.fd]

    def _move(self) -> None:
        """Move the own vector to a new file, without the lock of the old one, whose holder does not run.

        Call it under the mutex. If the holder was stopped in the middle of an average, the copy holds a part of it.
        """
        old = self._segments[self.rank]
        new = _FileSegment(memory_file(f"roundelay-w-{self.rank}", self._nbytes, f"rank {self.rank}"), old.vector)
        new.vector.copy_(old.vector)
        new.header[:] = old.header
        new.header[HOLDER] = 0
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
        for fd in {*(segment.fd for segment in segments), *self._liveness.values(), self._alive, *self._descriptors}:
            os.close(fd)
        self._segments, self._liveness, self._retired, self._descriptors = {}, {}, [], []
        self._per_thread = threading.local()


def _try_lock(descriptor: int, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> bool:
    """Take an exclusive flock; return False if it was not released within `timeout_s`, or after STOPPED_S if `give_up()`.

    Time during which this process itself was suspended does not count.
    """
    waited_s, pause, last = 0.0, FIRST_POLL_S, -1.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            if last >= 0.0:
                waited_s += min(now - last, 50 * pause)
            last = now
            if waited_s >= timeout_s or (waited_s >= STOPPED_S and give_up()):
                return False
            time.sleep(min(pause, max(timeout_s - waited_s, FIRST_POLL_S)))
            pause = min(2 * pause, LAST_POLL_S)
        else:
            return True
