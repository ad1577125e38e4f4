"""Broadcast and reduce among the ranks of one node, rooted at its leader.

In shared memory every rank has one slot. The leader's weights live in its slot and the gradients of the other ranks in theirs,
which avoids copies. A byte on a socket between the leader and each other rank signals that a slot, or a slice of it, is ready.
No byte signals that a slot is free again: a rank that sends a gradient has read the weights, and a leader that broadcasts new
weights has read the gradients. The sockets close with their process, so a death is noticed at once.
"""

from __future__ import annotations

import mmap
import shutil
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roundelay.comm.shared_memory import PAGE, allocate, shared_folder
from roundelay.core.contracts import Communicator, Store, Work
from roundelay.fleet.store import wait_for_key

READY = b"."


class CollectiveNodeGroup:
    """A node group by the communicator's own collectives: for threads, and for ranks that share no memory."""

    slot = None

    def __init__(self, comm: Communicator) -> None:
        self.broadcast, self.reduce = comm.broadcast, comm.all_reduce_


class _PendingReduce:
    """A reduction in progress; `add` completes it."""

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
    """A node group in shared memory. Collective: all ranks of the node must construct it.

    `guard` runs every blocking call and turns its connection errors into PeerLost.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        like: Tensor,
        store: Store,
        name: str,
        timeout_s: float,
        guard: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.rank, self.size, self._timeout_s, self._guard = rank, size, timeout_s, guard
        self._unread: dict[int, int] = dict.fromkeys(range(size), 0)
        folder = shared_folder(store, name, rank, rank == 0, timeout_s)
        slot_bytes = -(-like.numel() * like.element_size() // PAGE) * PAGE
        if rank == 0:
            allocate(folder / "slots", slot_bytes * size, rank)
        self._peers: dict[int, socket.socket] = guard(lambda: self._connect(str(folder / "leader"), store, f"{name}/open"))
        with open(folder / "slots", "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._slots = [
            torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=slot_bytes * member) for member in range(size)
        ]
        self.slot = self._slots[rank]
        if rank == 0:
            guard(self._await_all)  # all ranks have mapped the slots
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self._signal(0)

    def _connect(self, path: str, store: Store, key: str) -> dict[int, socket.socket]:
        """Connect to the leader; on the leader, accept all other ranks."""
        if self.rank:
            wait_for_key(store, key, self._timeout_s, self.rank)
            leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            leader.settimeout(self._timeout_s)
            leader.connect(path)
            leader.sendall(self.rank.to_bytes(4, "little"))
            return {0: leader}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.settimeout(self._timeout_s)
            listener.bind(path)
            listener.listen(self.size)
            store.set(key, "1")
            peers: dict[int, socket.socket] = {}
            while len(peers) < self.size - 1:
                peer, _ = listener.accept()
                peer.settimeout(self._timeout_s)
                peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")] = peer
            return dict(sorted(peers.items()))

    def _signal(self, peer: int) -> None:
        self._peers[peer].sendall(READY)

    def _await(self, peer: int) -> None:
        """Block for the next signal of a peer."""
        if not self._unread[peer]:
            self._unread[peer] = len(self._peers[peer].recv(64))
            if not self._unread[peer]:
                raise ConnectionResetError(f"member {peer} of this node closed its connection")
        self._unread[peer] -= 1

    def _await_all(self) -> None:
        for peer in self._peers:
            self._await(peer)

    def broadcast(self, x: Tensor) -> None:
        self._guard(lambda: self._broadcast(x))

    def _broadcast(self, x: Tensor) -> None:
        if self.rank:
            self._await(0)
            x.copy_(self._slots[0])
            return
        if x.data_ptr() != self.slot.data_ptr():
            self.slot.copy_(x)
        for peer in self._peers:
            self._signal(peer)

    def reduce(self, x: Tensor) -> Work:
        where = slice(x.storage_offset(), x.storage_offset() + x.numel())
        if self.rank == 0:
            return _PendingReduce(x, lambda: self._guard(lambda: self._add_slots(x, where)))
        own = self.slot[where]
        if x.data_ptr() != own.data_ptr():
            own.copy_(x)
        self._guard(lambda: self._signal(0))
        return _PendingReduce(x, None)

    def _add_slots(self, x: Tensor, where: slice) -> None:
        for peer in self._peers:  # in rank order: the bits do not depend on timing
            self._await(peer)
            x.add_(self._slots[peer][where])

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
