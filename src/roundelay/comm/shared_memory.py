"""Shared weight vectors of the ranks of one node: in shared memory between processes, in ordinary memory between threads.

Each rank has one file on the memory file system, mapped by all ranks of the node and unlinked as soon as all have mapped it.
`flock` on that file is the lock of the vector; the kernel releases it when a process dies. A second file per rank stays locked
for as long as its process lives, which is how other ranks notice its death. A small header of counters precedes each vector.
Each counter has one writer, or is written under the locks of both vectors of an exchange.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from roundelay.core.contracts import Store
from roundelay.errors import PeerLost, UsageError

HISTORY, VERSION, ENTERED, DONE = range(4)
"""Counters of a header: reads and writes so far; writes so far; the round its agent has entered; the round last met."""
HEADER_SLOTS = 8


class SharedVectors(Protocol):
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


class SharedVector:
    """A published vector on a board."""

    def __init__(self, board: SharedVectors, rank: int) -> None:
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
        wake_socket(self._sending)

    def close(self) -> None:
        self.receiving.close()
        self._sending.close()


def wake_socket(sending: socket.socket) -> None:
    """Sends a wake-up; where the queue is full the sleeper has enough of them, and a sleeper that is gone needs none."""
    try:
        sending.send(b"!")
    except OSError:
        return


def drain_socket(receiving: socket.socket) -> None:
    """Throws unread wake-ups away."""
    try:
        while receiving.recv(64):
            pass
    except OSError:
        return


class LocalVectors:
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

    def seen_by(self, rank: int) -> LocalVectorsView:
        return LocalVectorsView(self, rank)

    def close(self) -> None:
        for wakeups in self._wakeups.values():
            wakeups.close()


class LocalVectorsView:
    """A MemoryBoard as one of its members sees it."""

    def __init__(self, board: LocalVectors, rank: int) -> None:
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


PAGE = 4096


def wait_for(store: Store, key: str, timeout_s: float, rank: int, enough: Callable[[str], bool] = bool) -> str:
    """What the store holds under this key, once there is something and it is enough."""
    deadline = time.monotonic() + timeout_s
    while (found := store.get(key)) is None or not enough(found):
        if time.monotonic() > deadline:
            raise PeerLost(
                f"the learners of this machine did not all come to share memory in {timeout_s:.0f} s",
                where=f"rank {rank}, waiting for {key}",
                hint="look at the logs of the other ranks of this machine; raise timeout_s if they start slowly",
            )
        time.sleep(0.005)
    return found


def shared_folder(store: Store, name: str, rank: int, makes_it: bool, timeout_s: float) -> Path:
    """A folder on the memory file system that all of `name` know; one of them makes it."""
    if makes_it:
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        store.set(f"{name}/folder", tempfile.mkdtemp(prefix="roundelay-", dir=root))
    return Path(wait_for(store, f"{name}/folder", timeout_s, rank))


def allocate(path: Path, nbytes: int, rank: int) -> None:
    """A file of that size whose memory is really there: a full memory file system is an error now, not a SIGBUS later."""
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise UsageError(
                f"shared memory is full: {nbytes / 1e6:.0f} MB more are needed ({error.strerror})",
                where=f"rank {rank}, {path.parent.parent}",
                hint="enlarge the memory file system (in a container: --shm-size), or set backend=torch",
            ) from error


class ShmVectors:
    """The board of one machine; `here` are its members, `vector` what this one publishes."""

    def __init__(self, here: Sequence[int], rank: int, vector: Tensor, store: Store, name: str, timeout_s: float) -> None:
        self.here, self.rank = list(here), rank
        self._timeout_s = timeout_s
        self._vectors: dict[int, Tensor] = {}
        self._headers: dict[int, np.ndarray] = {}
        self._descriptors = threading.local()
        self._files: dict[int, int] = {}
        self._living: dict[int, int] = {}
        self._wake: dict[int, socket.socket] = {}
        folder = shared_folder(store, name, rank, rank == min(self.here), timeout_s)
        nbytes = PAGE + vector.numel() * vector.element_size()
        mine = folder / f"w-{rank}"
        allocate(mine, nbytes, rank)
        self._alive = os.open(folder / f"alive-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self._receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._receiving.bind(str(folder / f"wake-{rank}"))
        self._receiving.setblocking(False)
        self._map(rank, mine, vector)
        self._vectors[rank].copy_(vector)
        self._headers[rank][[ENTERED, DONE]] = -1
        self._meet(store, f"{name}/ready")
        for peer in self.here:
            if peer != rank:
                self._map(peer, folder / f"w-{peer}", vector)
            self._living[peer] = os.open(folder / f"alive-{peer}", os.O_RDWR)
            sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sending.connect(str(folder / f"wake-{peer}"))
            sending.setblocking(False)
            self._wake[peer] = sending
        self._meet(store, f"{name}/mapped")
        if rank == min(self.here):
            shutil.rmtree(folder, ignore_errors=True)

    def _meet(self, store: Store, key: str) -> None:
        store.add(key, 1)
        wait_for(store, key, self._timeout_s, self.rank, lambda come: int(come) >= len(self.here))

    def _map(self, rank: int, path: Path, like: Tensor) -> None:
        self._files[rank] = os.open(path, os.O_RDWR)
        memory = mmap.mmap(self._files[rank], 0)
        self._headers[rank] = np.frombuffer(memory, dtype=np.int64, count=HEADER_SLOTS)
        self._vectors[rank] = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=PAGE)

    def vector(self, rank: int) -> Tensor:
        return self._vectors[rank]

    def header(self, rank: int) -> np.ndarray:
        return self._headers[rank]

    @contextmanager
    def lock(self, rank: int) -> Iterator[None]:
        # flock belongs to an open file, so every thread opens its own: then it excludes threads as well as processes
        opened: dict[int, int] = self._descriptors.__dict__.setdefault("opened", {})
        if rank not in opened:
            opened[rank] = os.open(f"/proc/self/fd/{self._files[rank]}", os.O_RDWR)
        fcntl.flock(opened[rank], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(opened[rank], fcntl.LOCK_UN)

    def wake(self, rank: int) -> None:
        wake_socket(self._wake[rank])

    def wakeups(self) -> socket.socket:
        return self._receiving

    def alive(self, rank: int) -> bool:
        try:
            fcntl.flock(self._living[rank], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._living[rank], fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        drain_socket(self._receiving)
        self._receiving.close()
        for sending in self._wake.values():
            sending.close()
        for fd in [*self._files.values(), *self._living.values(), self._alive]:
            os.close(fd)
        self._files, self._living = {}, {}
