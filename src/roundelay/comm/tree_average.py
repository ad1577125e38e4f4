"""A mean over ranks of which some pairs cannot reach each other: sums go up a tree of TCP connections, the mean comes down.

Every rank connects to all higher ranks of the group and publishes which of them answered. All ranks derive the same tree from
that: breadth first from the lowest rank of the largest part of the group whose ranks reach each other, directly or through
other ranks. It moves each vector twice per connection, one level after the other, so it is slower than an all-reduce. It is
meant for the case in which an all-reduce cannot work.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from roundelay.comm.gossip.transport import (
    ConnectionClosed,
    accept_handshake,
    answer_handshake,
    bytes_of,
    connect,
    receive_bytes,
    receive_into,
)
from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost

CONNECT_S = 4.0
"""Deadline of one connection, including the handshake."""
MAX_CONNECTING = 32
COUNT = struct.Struct("<q")


class Unreachable(PeerLost):
    """This rank cannot reach most ranks of the group, which can average without it."""


def spanning_tree(ranks: Collection[int], pairs: Collection[tuple[int, int]]) -> dict[int, int | None]:
    """Return the parent of every rank of the largest connected part, None for its root; parents come before children.

    `pairs` are the ranks that reach each other. Of two parts of equal size the one with the lowest rank counts.
    """
    neighbors: dict[int, set[int]] = {rank: set() for rank in ranks}
    for a, b in pairs:
        neighbors[a].add(b)
        neighbors[b].add(a)
    best: dict[int, int | None] = {}
    seen: set[int] = set()
    for root in sorted(ranks):
        if root in seen:
            continue
        parents: dict[int, int | None] = {root: None}
        queue = [root]
        while queue:
            rank = queue.pop(0)
            for peer in sorted(neighbors[rank] - set(parents)):
                parents[peer] = rank
                queue.append(peer)
        seen |= set(parents)
        if len(parents) > len(best):
            best = parents
    return best


class TreeAverage:
    """The connections of one rank for one mean. Collective: all `ranks` construct it and call `mean` once, then `close`.

    store, name     where the ranks publish their addresses; `name` must be new for every mean
    failed          returns the ranks that have failed; may read the store
    timeout_s       deadline for the other ranks to appear, and on progress: it restarts with every byte that moves
    """

    def __init__(
        self,
        store: Store,
        name: str,
        ranks: Sequence[int],
        rank: int,
        bind_address: str,
        token: bytes,
        timeout_s: float,
        failed: Callable[[], Collection[int]],
    ) -> None:
        self._store, self._name, self._ranks, self._rank = store, name, sorted(ranks), rank
        self._token, self._timeout_s, self._failed = token, timeout_s, failed
        self._sockets: dict[int, socket.socket] = {}
        self._accepted = threading.Condition()
        family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
        self._listener = socket.create_server((bind_address, 0), family=family, backlog=512)
        threading.Thread(target=self._accept, name="tree average", daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        store.set(f"{name}/address/{rank}", f"{host}:{port}")

    def mean(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the means of the vectors over all ranks that reach each other. The vectors are not changed.

        Raises PeerLost if a rank fails or makes no progress, and Unreachable if this rank is not in the largest part.
        """
        try:
            parents = self._connect()
            return self._reduce(parents, vectors)
        except (OSError, ConnectionClosed) as error:
            raise self._lost(f"a connection of the final average failed: {error}") from error

    def close(self) -> None:
        with suppress(OSError):  # wakes accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._accepted:
            for sock in self._sockets.values():
                sock.close()

    def _lost(self, message: str) -> PeerLost:
        return PeerLost(
            message,
            where=f"rank {self._rank}",
            hint="check the network between the machines; continue with resume=auto",
        )

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            peer, _ = accept_handshake(sock, self._token)
            with self._accepted:  # before the answer: the peer may count on this connection from then on
                self._sockets[peer] = sock
                self._accepted.notify_all()
            answer_handshake(sock, self._rank, 0)
        except ConnectionClosed:
            sock.close()

    def _gather(self, what: str) -> dict[int, str]:
        """Return what all ranks have published under `what`. Raises PeerLost if one fails or does not publish in time."""
        keys = {f"{self._name}/{what}/{rank}": rank for rank in self._ranks}
        values: Mapping[str, str | None] = {}

        def complete() -> bool:
            nonlocal values
            values = self._store.get_many(list(keys))
            return all(text is not None for text in values.values())

        def late() -> PeerLost:
            missing = [rank for key, rank in keys.items() if values[key] is None]
            return self._lost(f"ranks {missing} did not take part in the final average")

        wait_until(complete, self._timeout_s, late, failures=self._failed, awaited=self._ranks, poll_s=0.02)
        return {rank: text for key, rank in keys.items() if (text := values[key]) is not None}

    def _connect(self) -> dict[int, int | None]:
        """Connect to all higher ranks, and return the tree that all ranks agree on."""
        addresses = self._gather("address")
        higher = [rank for rank in self._ranks if rank > self._rank]

        def reach(peer: int) -> socket.socket | None:
            try:
                return connect(addresses[peer], self._rank, self._token, CONNECT_S)[0]
            except (OSError, ConnectionClosed):
                return None

        if higher:
            with ThreadPoolExecutor(min(len(higher), MAX_CONNECTING)) as pool:
                sockets = dict(zip(higher, pool.map(reach, higher), strict=True))
            with self._accepted:
                self._sockets.update({peer: sock for peer, sock in sockets.items() if sock is not None})
        reached = [peer for peer in higher if peer in self._sockets]
        self._store.set(f"{self._name}/reached/{self._rank}", json.dumps(reached))
        pairs = [(rank, peer) for rank, text in self._gather("reached").items() for peer in json.loads(text)]
        parents = spanning_tree(self._ranks, pairs)
        if self._rank not in parents:
            raise Unreachable(
                f"this rank reaches none of the ranks {sorted(parents)}, which finish without it",
                where=f"rank {self._rank}, final average",
                hint="check the network of this machine; continue with resume=auto",
            )
        return parents

    def _socket(self, peer: int) -> socket.socket:
        with self._accepted:
            if not self._accepted.wait_for(lambda: peer in self._sockets, CONNECT_S):
                raise ConnectionClosed(f"rank {peer} has not connected")
            sock = self._sockets[peer]
        sock.settimeout(self._timeout_s)
        return sock

    # -- the mean ----------------------------------------------------------------------------------------------------

    def _reduce(self, parents: dict[int, int | None], vectors: Sequence[Tensor]) -> list[Tensor]:
        parent = parents[self._rank]
        children = [self._socket(rank) for rank, above in parents.items() if above == self._rank]
        up = self._socket(parent) if parent is not None else None
        count = 1 + sum(COUNT.unpack(receive_bytes(child, COUNT.size))[0] for child in children)
        if up is not None:
            _send(up, COUNT.pack(count))
        means = []
        for vector in vectors:
            mean = vector.detach().to("cpu", copy=True).contiguous()
            if mean.numel():
                self._reduce_one(mean, count, up, children)
            means.append(mean.to(vector.device))
        return means

    @staticmethod
    def _reduce_one(x: Tensor, count: int, up: socket.socket | None, children: Sequence[socket.socket]) -> None:
        """x becomes the mean; `count` is the number of ranks in the part of the tree below this rank, itself included."""
        for child in children:  # in rank order: the same tree gives the same bits
            part = torch.empty_like(x)
            receive_into(child, bytes_of(part))
            x.add_(part)
        if up is None:
            x.div_(count)
        else:
            _send(up, bytes_of(x))
            receive_into(up, bytes_of(x))
        for child in children:
            _send(child, bytes_of(x))


def _send(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send all data; the time-out of the socket is a deadline on progress, which it is not for `sendall`."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[sock.send(rest) :]
