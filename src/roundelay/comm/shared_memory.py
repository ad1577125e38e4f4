"""Shared weight vectors of the ranks of one node, in shared memory between processes.

Each rank has one anonymous memory file (memfd), which the other ranks of the node open through /proc: nothing is left behind,
however a process ends. `flock` on that file is the lock of the vector; the kernel releases it when a process dies. A small
header of counters precedes each vector and is written under the vector's lock. A second file per rank holds the address of its
present vector, and stays locked for as long as its process lives, which is how other ranks notice its death.

A process can be stopped while it holds the lock of another rank's vector. Locks are therefore taken with a deadline. The owner
of a vector whose lock does not come back leaves it: it copies the vector to a new file and publishes the address of that file.
`lock` yields the segment it has locked, and its holder uses no other. So the holder completes its operation in the old file
when it continues, wherever it was stopped. Once it has released the old lock, the owner adds the difference between the old
file and the copy: what was written after the copy was taken, element by element. An average or an addition that is interrupted
by a move is thus completed late, and the mean is conserved up to rounding. The holder need not know of the move, and the owner
need not know whether the holder was stopped or only slow. A difference is lost only if the holder dies, is declared failed, or
continues after the owner's last access. Until then the owner keeps the old file and the copy.
Threads of the owner exclude each other by a mutex as well: only another process can make the owner move.

Memory order: accesses that must be ordered are ordered by `flock` calls on the same file, on every architecture. Counters and
elements are aligned words of at most 8 bytes. It is assumed that the processor reads and writes such words atomically, as
x86-64 and 64-bit Arm do; only x86-64 is tested. Readers without a lock use single counters only.
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roundelay.comm.vectors import (
    AVERAGED,
    FENCED,
    HEADER_SLOTS,
    HOLDER,
    ROUNDS,
    VERSION,
    LockTimeout,
    VectorSegment,
    drain_socket,
    wake_socket,
)
from roundelay.core import kernels
from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost, UsageError

PAGE = 4096
OWN_LOCK_S = 1.0
"""Deadline of a rank for the lock of its own vector, plus SECONDS_PER_BYTE; then it moves to a new file."""
SECONDS_PER_BYTE = 4e-9
"""How long a lock may be held for a vector of this size, generously."""
STOPPED_S = 0.02
"""Time after which the owner of a vector looks whether the holder of its lock has been stopped, and then moves at once.

It waits for OWN_LOCK_S if the holder was stopped before it wrote HOLDER, right after it took the lock.
"""
FIRST_POLL_S, LAST_POLL_S = 0.00005, 0.002
DESCRIPTOR_BITS = 32
"""Last bits of an address: a descriptor of the owner's process. The bits before them are the number of moves."""


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


def open_memory_file(pid: int, fd: int, name: str, nbytes: int) -> int:
    """Open a `memory_file` of another process of this machine.

    Raises PeerLost if the process has ended, or if its descriptor `fd` is no memory file of this name and size.
    """
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise PeerLost(
            f"shared memory of process {pid} cannot be opened: {error.strerror}",
            where="shared memory",
            hint="the process has ended, or runs as another user; see its log, or set backend=torch",
        ) from error
    target, size = os.readlink(f"/proc/self/fd/{opened}").removesuffix(" (deleted)"), os.fstat(opened).st_size
    if target == f"/memfd:{name}" and size == nbytes:
        return opened
    os.close(opened)
    raise PeerLost(
        f"descriptor {fd} of process {pid} is not its shared memory (expected {name} of {nbytes} bytes, got {size} bytes)",
        where="shared memory",
        hint="the process has closed its vectors, or ended; see its log",
    )


class _FileSegment(VectorSegment):
    """A mapped memory file. `address`: where its owner has published it.

    The memory is unmapped when no tensor uses it, the descriptors are closed by `close` or with the last reference to this.
    """

    def __init__(self, fd: int, address: int, like: Tensor) -> None:
        memory = mmap.mmap(fd, PAGE + like.numel() * like.element_size())
        header = np.frombuffer(memory, dtype=np.int64, count=HEADER_SLOTS)
        super().__init__(header, torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=PAGE))
        self.fd, self.address = fd, address
        self._lock_fds: dict[int, int] = {}
        self.close = weakref.finalize(self, _close_descriptors, fd, self._lock_fds)

    def lock_fd(self) -> int:
        """Return the descriptor by which the calling thread locks this segment."""
        # flock belongs to an open file, so every thread opens its own: then it excludes threads as well as processes
        thread = threading.get_ident()
        if thread not in self._lock_fds:
            self._lock_fds[thread] = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)
        return self._lock_fds[thread]


def _close_descriptors(fd: int, lock_fds: dict[int, int]) -> None:
    for descriptor in (fd, *lock_fds.values()):
        os.close(descriptor)


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
        self._own_mutex = threading.Lock()
        """Excludes the threads of this process from the own vector."""
        self.moves = 0
        """How often this rank has moved its vector, because a process did not release its lock."""
        self._left: list[tuple[_FileSegment, VectorSegment]] = []
        """The segments that this rank has left while another process held their locks, and their contents at that time."""
        self._nbytes = PAGE + vector.numel() * vector.element_size()
        self._own_lock_s = OWN_LOCK_S + SECONDS_PER_BYTE * self._nbytes
        token = secrets.token_hex(8)
        self._tokens = {rank: token}
        own = self._create_segment(vector)
        self._segments = {rank: own}
        self._alive = memory_file(f"roundelay-alive-{rank}-{token}", PAGE, f"rank {rank}")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self._addresses = {rank: _map_address(self._alive)}
        self._addresses[rank][0] = own.address
        self._receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._receiving.bind(f"\0roundelay-{token}")  # abstract: no file
        self._receiving.setblocking(False)
        self._pids: dict[int, int] = {}
        self._liveness: dict[int, int] = {}
        self._wake: dict[int, socket.socket] = {}
        store.set(f"{name}/memory/{rank}", f"{os.getpid()} {self._alive} {token}")
        cards = self._gather(store, f"{name}/memory", timeout_s, check)
        for peer, (pid, alive, token) in cards.items():
            self._pids[peer], self._tokens[peer] = int(pid), token
            self._liveness[peer] = open_memory_file(int(pid), int(alive), f"roundelay-alive-{peer}-{token}", PAGE)
            if peer != rank:
                self._addresses[peer] = _map_address(self._liveness[peer])
                self._segment(peer)
            sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sending.connect(f"\0roundelay-{token}")
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

    def _create_segment(self, vector: Tensor) -> _FileSegment:
        """Return a segment of this rank in a new file, with a copy of `vector`."""
        fd = memory_file(f"roundelay-w-{self.rank}-{self._tokens[self.rank]}", self._nbytes, f"rank {self.rank}")
        segment = _FileSegment(fd, self.moves << DESCRIPTOR_BITS | fd, vector)
        segment.vector.copy_(vector)
        return segment

    def _open_segment(self, rank: int, address: int) -> _FileSegment:
        """Map the segment of another rank. Raises PeerLost if it is not there any more."""
        fd = address % (1 << DESCRIPTOR_BITS)
        opened = open_memory_file(self._pids[rank], fd, f"roundelay-w-{rank}-{self._tokens[rank]}", self._nbytes)
        try:
            return _FileSegment(opened, address, self._segments[self.rank].vector)
        except (OSError, ValueError, RuntimeError) as error:
            os.close(opened)
            raise PeerLost(f"shared memory of rank {rank} cannot be mapped: {error}", where=f"rank {self.rank}") from error

    def _segment(self, rank: int) -> _FileSegment:
        """Return the present segment of a rank."""
        while rank != self.rank:
            address, segment = self._addresses[rank][0], self._segments.get(rank)
            if segment is not None and segment.address == address:
                return segment
            try:
                self._segments[rank] = self._open_segment(rank, address)
            except PeerLost:
                if address == self._addresses[rank][0]:  # otherwise it has moved again
                    raise
        return self._segments[rank]

    def vector(self, rank: int) -> Tensor:
        return self._segment(rank).vector

    def header(self, rank: int) -> np.ndarray:
        return self._segment(rank).header

    @contextmanager
    def lock(self, rank: int, timeout_s: float | None = None) -> Iterator[VectorSegment]:
        if rank != self.rank:
            with self._file_lock(rank, self._own_lock_s if timeout_s is None else timeout_s) as segment:
                segment.header[HOLDER] = self.rank + 1
                yield segment
            return
        if not self._own_mutex.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise LockTimeout
        try:
            with self._file_lock(rank, timeout_s) as segment:
                if timeout_s is None and self._left:  # with a deadline, another rank's lock may be held
                    self._add_late_writes(segment)
                yield segment
        finally:
            self._own_mutex.release()

    @contextmanager
    def _file_lock(self, rank: int, timeout_s: float | None) -> Iterator[VectorSegment]:
        """Take the flock of a rank's present segment. With None, the own vector moves if the lock does not come back."""
        while True:
            segment = self._segment(rank)
            descriptor = segment.lock_fd()
            if timeout_s is not None:
                if not _try_lock(descriptor, timeout_s):
                    raise LockTimeout
            elif not _try_lock(descriptor, self._own_lock_s, partial(self._holder_is_stopped, segment)):
                segment = self._move()
                descriptor = segment.lock_fd()
            if segment.address == self._addresses[rank][0]:  # not moved while this thread waited
                break
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        try:
            yield segment
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _holder_is_stopped(self, segment: VectorSegment) -> bool:
        holder = int(segment.header[HOLDER]) - 1
        return holder in self._pids and is_stopped(self._pids[holder])

    def _move(self) -> _FileSegment:
        """Move the own vector to a new file without the lock of the old one. Return the new segment, locked.

        Call it under the mutex. The holder of the old lock may run and write at any time; see the top of this file.
        """
        old = self._segments[self.rank]
        content = VectorSegment(old.header.copy(), old.vector.clone())
        self.moves += 1
        new = self._create_segment(content.vector)
        new.header[:] = content.header
        new.header[VERSION] += 1
        fcntl.flock(new.lock_fd(), fcntl.LOCK_EX)  # before its address is known: other ranks see what was written until now
        self._left.append((old, content))
        self._segments[self.rank] = new
        self._addresses[self.rank][0] = new.address
        return new

    def _add_late_writes(self, segment: VectorSegment) -> None:
        """Add what was written to the segments that this rank has left, if they are released by now, and free them.

        Call it under the lock. The access has a number but is not logged, so that a recorded run is not replayed without it. A
        segment is freed as well if the rank that holds it was declared failed: that rank exchanges no more.
        """
        for old, content in list(self._left):
            holder = self._segments.get(int(old.header[HOLDER]) - 1)
            if _try_lock(old.lock_fd(), 0.0):  # who takes it later sees the new address
                kernels.add_difference(segment.vector, old.vector, old.vector, content.vector)
                segment.count(writes=1)
                segment.header[AVERAGED] += old.header[AVERAGED] - content.header[AVERAGED]
                for slot in (ROUNDS, FENCED):
                    segment.header[slot] = max(segment.header[slot], old.header[slot])
            elif holder is None or not holder.header[FENCED]:
                continue
            self._left = [entry for entry in self._left if entry[0] is not old]
            old.close()

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
        for segment in (*self._segments.values(), *(old for old, _ in self._left)):
            segment.close()
        for fd in (*self._liveness.values(), self._alive):
            os.close(fd)
        self._segments, self._liveness, self._left = {}, {}, []


def _map_address(fd: int) -> memoryview[int]:
    """Map the address in a file of one page."""
    opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # a mapping of `fd` itself would keep its flock after it is closed
    try:
        return memoryview(mmap.mmap(opened, PAGE)).cast("q")
    finally:
        os.close(opened)


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
