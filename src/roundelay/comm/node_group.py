"""Broadcast and reduce among the ranks of one node, rooted at its leader.

In shared memory every rank has one slot. The leader's weights live in its slot and the gradients of the other ranks in theirs,
which avoids copies. A byte on a socket between the leader and each other rank signals that a slot, or a slice of it, is ready.
No byte signals that a slot is free again: a rank that sends a gradient has read the weights, and a leader that broadcasts new
weights has read the gradients. The sockets close with their process, so a death is noticed at once.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roundelay.comm.shared_memory import PAGE, memory_file, open_memory_file
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
        slot_bytes = -(-like.numel() * like.element_size() // PAGE) * PAGE
        nbytes = slot_bytes * size
        own_file = memory_file("roundelay-slots", nbytes, f"rank {rank}") if rank == 0 else -1
        self._peers: dict[int, socket.socket] = {}
        leader_pid, leader_file = guard(lambda: self._connect(own_file, store, f"{name}/leader"))
        file = own_file if rank == 0 else open_memory_file(leader_pid, leader_file, "roundelay-slots", nbytes)
        memory = mmap.mmap(file, 0)
        self._slots = [
            torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=slot_bytes * member) for member in range(size)
        ]
        self.slot = self._slots[rank]
        if rank == 0:
            guard(self._await_all)  # all ranks have mapped the slots
        else:
            self._signal(0)
        os.close(file)

    def _connect(self, file: int, store: Store, key: str) -> tuple[int, int]:
        """Connect to the leader; on the leader, accept all other ranks. Return process and descriptor of the slots' memory."""
        if self.rank:
            pid, fd, address = wait_for_key(store, key, self._timeout_s, self.rank).split()
            leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            leader.settimeout(self._timeout_s)
            leader.connect("\0" + address)
            leader.sendall(self.rank.to_bytes(4, "little"))
            self._peers[0] = leader
            return int(pid), int(fd)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.settimeout(self._timeout_s)
            address = f"roundelay-{os.getpid()}-{secrets.token_hex(8)}"
            listener.bind("\0" + address)  # abstract: no file
            listener.listen(self.size)
            store.set(key, f"{os.getpid()} {file} {address}")
            peers: dict[int, socket.socket] = {}
            while len(peers) < self.size - 1:
                peer, _ = listener.accept()
                peer.settimeout(self._timeout_s)
                peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")] = peer
            self._peers = dict(sorted(peers.items()))
            return os.getpid(), file

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
