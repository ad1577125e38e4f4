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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from roundelay.core.contracts import Store
from roundelay.errors import UsageError
from roundelay.fleet.store import wait_for_key

SEQUENCE, VERSION, CURRENT_ROUND, COMPLETED_ROUND = range(4)
"""Counters of a header: accesses, writes, the round its gossip thread has entered, the last round it has completed."""
HEADER_SLOTS = 8
PAGE = 4096


class SharedVectors(Protocol):
    """The shared vectors of one node, as seen by one rank."""

    rank: int

    @property
    def here(self) -> Sequence[int]:
        """Ranks whose vectors are shared."""

    def vector(self, rank: int) -> Tensor: ...

    def header(self, rank: int) -> np.ndarray: ...

    def lock(self, rank: int) -> AbstractContextManager[None]:
        """Lock a vector for the calling thread. Take the locks of two vectors in rank order."""

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
        self.vector = vectors.vector(rank)
        self._header = vectors.header(rank)

    def locked(self) -> AbstractContextManager[None]:
        return self.vectors.lock(self.rank)

    def count(self, writes: int = 0) -> tuple[int, int]:
        self._header[SEQUENCE] += 1
        self._header[VERSION] += writes
        return int(self._header[SEQUENCE]), int(self._header[VERSION])

    @property
    def version(self) -> int:
        return int(self._header[VERSION])


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
        for header in self.headers.values():
            header[CURRENT_ROUND] = header[COMPLETED_ROUND] = -1
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

    def lock(self, rank: int) -> AbstractContextManager[None]:
        return _locked(self._owner.locks[rank])

    def wake(self, rank: int) -> None:
        self._owner.wakeups[rank].wake()

    def wakeups(self) -> socket.socket:
        return self._owner.wakeups[self.rank].receiving

    def alive(self, rank: int) -> bool:
        return self._owner.alive(rank)

    def close(self) -> None:
        self._owner.close(self.rank)


@contextmanager
def _locked(lock: threading.Lock) -> Iterator[None]:
    with lock:
        yield


# -- processes ---------------------------------------------------------------------------------------------------------


def shared_folder(store: Store, name: str, rank: int, is_creator: bool, timeout_s: float) -> Path:
    """Return a folder on the memory file system; one rank creates it, all other ranks wait for its path in the store."""
    if is_creator:
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        store.set(f"{name}/folder", tempfile.mkdtemp(prefix="roundelay-", dir=root))
    return Path(wait_for_key(store, f"{name}/folder", timeout_s, rank))


def allocate(path: Path, nbytes: int, rank: int) -> None:
    """Create a file whose memory is reserved, so that a full file system raises here and not as SIGBUS on first use."""
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
    """Vectors in shared memory between the processes of one node. Collective: all ranks `here` must construct it.

    `vector` is the initial value of this rank's vector. Raises PeerLost if the other ranks do not join within `timeout_s`.
    """

    def __init__(self, here: Sequence[int], rank: int, vector: Tensor, store: Store, name: str, timeout_s: float) -> None:
        self.here, self.rank = list(here), rank
        self._timeout_s = timeout_s
        self._vectors: dict[int, Tensor] = {}
        self._headers: dict[int, np.ndarray] = {}
        self._per_thread = threading.local()
        self._files: dict[int, int] = {}
        self._liveness: dict[int, int] = {}
        self._wake: dict[int, socket.socket] = {}
        folder = shared_folder(store, name, rank, rank == min(self.here), timeout_s)
        nbytes = PAGE + vector.numel() * vector.element_size()
        own_file = folder / f"w-{rank}"
        allocate(own_file, nbytes, rank)
        self._alive = os.open(folder / f"alive-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self._receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._receiving.bind(str(folder / f"wake-{rank}"))
        self._receiving.setblocking(False)
        self._map(rank, own_file, vector)
        self._vectors[rank].copy_(vector)
        self._headers[rank][[CURRENT_ROUND, COMPLETED_ROUND]] = -1
        self._barrier(store, f"{name}/ready")
        for peer in self.here:
            if peer != rank:
                self._map(peer, folder / f"w-{peer}", vector)
            self._liveness[peer] = os.open(folder / f"alive-{peer}", os.O_RDWR)
            sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sending.connect(str(folder / f"wake-{peer}"))
            sending.setblocking(False)
            self._wake[peer] = sending
        self._barrier(store, f"{name}/mapped")
        if rank == min(self.here):
            shutil.rmtree(folder, ignore_errors=True)

    def _barrier(self, store: Store, key: str) -> None:
        store.add(key, 1)
        wait_for_key(store, key, self._timeout_s, self.rank, lambda count: int(count) >= len(self.here))

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
        descriptors: dict[int, int] = self._per_thread.__dict__.setdefault("descriptors", {})
        if rank not in descriptors:
            descriptors[rank] = os.open(f"/proc/self/fd/{self._files[rank]}", os.O_RDWR)
        fcntl.flock(descriptors[rank], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(descriptors[rank], fcntl.LOCK_UN)

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
        for fd in [*self._files.values(), *self._liveness.values(), self._alive]:
            os.close(fd)
        self._files, self._liveness = {}, {}
