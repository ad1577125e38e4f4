"""The learners of one machine around their first: it hands its weights out and adds their gradients up.

In shared memory, one slot per learner: the first one's weights live in its slot, the gradients of the others in theirs, so
nothing is copied that need not be. A byte on a socket between the first and each other says that a slot, or a part of it, is
ready. No byte says that it is free again: who brings a gradient has read the weights it is taken at, and who hands out new
weights has taken the gradients. The sockets close with their process, so a death is noticed at once.
"""

from __future__ import annotations

import mmap
import shutil
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roundelay.comm.shared_memory import PAGE, allocate, shared_folder, wait_for
from roundelay.core.contracts import Communicator, Store, Work

READY = b"."


class CollectiveNodeGroup:
    """The same by a group's own collectives: threads, and learners that share no memory."""

    slot = None

    def __init__(self, comm: Communicator) -> None:
        self.broadcast, self.reduce = comm.broadcast, comm.all_reduce_


class _PendingReduce:
    """A sum under way; `add` finishes it."""

    def __init__(self, x: Tensor, add: Callable[[], None] | None) -> None:
        self._x, self._add = x, add

    @property
    def done(self) -> bool:
        return self._add is None

    def wait(self) -> Tensor:
        add, self._add = self._add, None
        if add is not None:
            add()
        return self._x


class ShmNodeGroup:
    """One member's place."""

    def __init__(
        self,
        rank: int,
        size: int,
        like: Tensor,
        store: Store,
        name: str,
        timeout_s: float,
        patiently: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.rank, self.size, self._timeout_s, self._patiently = rank, size, timeout_s, patiently
        self._unheard: dict[int, int] = dict.fromkeys(range(size), 0)
        folder = shared_folder(store, name, rank, rank == 0, timeout_s)
        slot_bytes = -(-like.numel() * like.element_size() // PAGE) * PAGE
        if rank == 0:
            allocate(folder / "slots", slot_bytes * size, rank)
        self._peers: dict[int, socket.socket] = patiently(lambda: self._join(str(folder / "first"), store, f"{name}/open"))
        with open(folder / "slots", "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._slots = [
            torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=slot_bytes * member) for member in range(size)
        ]
        self.slot = self._slots[rank]
        if rank == 0:
            patiently(self._hear_all)  # everybody has mapped the slots
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self._say(0)

    def _join(self, place: str, store: Store, key: str) -> dict[int, socket.socket]:
        if self.rank:
            wait_for(store, key, self._timeout_s, self.rank)
            first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            first.settimeout(self._timeout_s)
            first.connect(place)
            first.sendall(self.rank.to_bytes(4, "little"))
            return {0: first}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.settimeout(self._timeout_s)
            listener.bind(place)
            listener.listen(self.size)
            store.set(key, "1")
            peers: dict[int, socket.socket] = {}
            while len(peers) < self.size - 1:
                peer, _ = listener.accept()
                peer.settimeout(self._timeout_s)
                peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")] = peer
            return dict(sorted(peers.items()))

    def _say(self, peer: int) -> None:
        self._peers[peer].sendall(READY)

    def _hear(self, peer: int) -> None:
        """Waits until the peer has said once more that something is ready."""
        if not self._unheard[peer]:
            self._unheard[peer] = len(self._peers[peer].recv(64))
            if not self._unheard[peer]:
                raise ConnectionResetError(f"member {peer} of this machine hung up")
        self._unheard[peer] -= 1

    def _hear_all(self) -> None:
        for peer in self._peers:
            self._hear(peer)

    def broadcast(self, x: Tensor) -> None:
        self._patiently(lambda: self._broadcast(x))

    def _broadcast(self, x: Tensor) -> None:
        if self.rank:
            self._hear(0)
            x.copy_(self._slots[0])
            return
        if x.data_ptr() != self.slot.data_ptr():
            self.slot.copy_(x)
        for peer in self._peers:
            self._say(peer)

    def reduce(self, x: Tensor) -> Work:
        where = slice(x.storage_offset(), x.storage_offset() + x.numel())
        if self.rank == 0:
            return _PendingReduce(x, lambda: self._patiently(lambda: self._take(x, where)))
        mine = self.slot[where]
        if x.data_ptr() != mine.data_ptr():
            mine.copy_(x)
        self._patiently(lambda: self._say(0))
        return _PendingReduce(x, None)

    def _take(self, x: Tensor, where: slice) -> None:
        for peer in self._peers:  # in rank order: the same bits however they arrive
            self._hear(peer)
            x.add_(self._slots[peer][where])

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
