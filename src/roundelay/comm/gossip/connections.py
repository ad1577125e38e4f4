"""The connections of one gossip thread: accepting, connecting again, polling."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from roundelay.comm.gossip.transport import (
    Connection,
    ConnectionClosed,
    PeerConnection,
    accept_handshake,
    answer_handshake,
    connect,
)
from roundelay.comm.vectors import drain_socket
from roundelay.errors import RoundelayError

CONNECT_S = 3.0
"""Deadline of one attempt to connect, including the handshake."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0

logger = logging.getLogger(__name__)


class ConnectionSet:
    """All connections of one gossip thread. `add`, `sent_bytes` and `connect_to` may be used from any thread, the rest only
    under the gossip thread's mutex.
    """

    def __init__(
        self, rank: int, token: bytes, listener: socket.socket | None, wakeups: socket.socket, wake: Callable[[], None]
    ) -> None:
        self.partners: dict[int, PeerConnection] = {}
        self.clients: list[PeerConnection] = []
        """Connections for one-sided operations; losing one is not a failure of its rank."""
        self._rank, self._token, self._listener, self._wakeups, self._wake = rank, token, listener, wakeups, wake
        self._added: deque[tuple[int, int, socket.socket | PeerConnection, bool]] = deque()
        self._closed_bytes = 0
        self._closed = threading.Event()
        self._connecting: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeups, selectors.EVENT_READ, None)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, listener)

    @property
    def sent_bytes(self) -> int:
        return self._closed_bytes + sum(connection.sent_bytes for connection in [*self.partners.values(), *self.clients])

    # -- new connections ---------------------------------------------------------------------------------------------

    def add(self, peer: int, transport: socket.socket | PeerConnection, applied: int = 0, answer: bool = False) -> None:
        """Hand over the connection to a partner; a negative peer is -1 - rank of a client for one-sided operations.

        `applied`: the last exchange that the partner has applied. `answer`: its handshake is still to be answered.
        """
        self._added.append((peer, applied, transport, answer))
        self._wake()

    def take_added(self) -> Iterator[tuple[int, int, socket.socket | PeerConnection, bool]]:
        """Yield what was handed over by `add`."""
        while self._added:
            added = self._added.popleft()
            self._connecting.discard(added[0])  # not earlier: the partner would be connected to twice
            yield added

    def register(self, peer: int, transport: socket.socket | PeerConnection, answer: bool, applied: int) -> bool:
        """Make a connection one of the set, and answer its handshake with the last exchange applied here."""
        connection: PeerConnection
        if isinstance(transport, socket.socket):
            try:
                if answer:
                    answer_handshake(transport, self._rank, applied)
                connection = Connection(transport)
            except (ConnectionClosed, OSError):
                transport.close()
                return False
        else:
            connection = transport
        if peer >= 0:
            connection.peer = peer
            self.partners[peer] = connection
        else:
            connection.client = -1 - peer
            self.clients.append(connection)
        return True

    def connect_to(self, peer: int, address: Callable[[], str], applied: Callable[[], int], wanted: Callable[[], bool]) -> None:
        """Connect to a partner in the background, again and again with growing pauses, while `wanted()`."""
        if peer in self._connecting or self._closed.is_set():
            return
        self._connecting.add(peer)

        def run() -> None:
            pause = FIRST_RETRY_S
            connection: tuple[socket.socket, int] | None = None
            while connection is None and wanted() and not self._closed.is_set():
                try:
                    connection = connect(address(), self._rank, self._token, CONNECT_S, applied())
                except (OSError, ConnectionClosed, RoundelayError) as error:  # RoundelayError: it has not published an address
                    logger.debug("rank %d cannot connect to rank %d: %s", self._rank, peer, error)
                    self._closed.wait(pause)
                    pause = min(2 * pause, LAST_RETRY_S)
            if connection is None:
                self._connecting.discard(peer)
            else:
                self.add(peer, *connection)

        threading.Thread(target=run, name=f"connect-{self._rank}-{peer}", daemon=True).start()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        # on its own thread: a peer that connects and sends nothing must not delay exchanges
        threading.Thread(target=self._handshake, args=(sock,), name=f"handshake-{self._rank}", daemon=True).start()

    def _handshake(self, sock: socket.socket) -> None:
        try:
            peer, applied = accept_handshake(sock, self._token)
            self.add(peer, sock, applied, answer=True)
        except ConnectionClosed:
            sock.close()
        if self._closed.is_set():
            sock.close()

    def __contains__(self, connection: PeerConnection) -> bool:
        """Return whether a connection has been registered and neither removed nor replaced."""
        return connection in self.clients or (connection.peer is not None and self.partners.get(connection.peer) is connection)

    # -- polling -----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Tell the selector what to wait for on each connection."""
        watched = self._selector.get_map()
        for connection in [*self.partners.values(), *self.clients]:
            fd = connection.fileno()
            if fd < 0:
                continue
            events = (selectors.EVENT_READ if connection.reads else 0) | (selectors.EVENT_WRITE if connection.writes else 0)
            key = watched.get(fd)
            if key is None and events:
                self._selector.register(fd, events, connection)
            elif key is not None and not events:
                self._selector.unregister(fd)
            elif key is not None and (key.events != events or key.data is not connection):
                self._selector.modify(fd, events, connection)

    def select(self, timeout_s: float) -> list[PeerConnection]:
        """Wait for wake-ups and sockets; return the connections that are ready, and all those without a socket."""
        ready = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                drain_socket(self._wakeups)
            elif key.data is self._listener:
                self._accept()
            else:
                ready.append(key.data)
        return ready + [c for c in [*self.partners.values(), *self.clients] if c.fileno() < 0]

    def remove(self, connection: PeerConnection) -> None:
        """Close a connection and forget it."""
        fd = connection.fileno()
        if fd >= 0:
            with suppress(KeyError):
                self._selector.unregister(fd)
        self._closed_bytes += connection.sent_bytes
        connection.close()
        if connection.peer is not None:
            if self.partners.get(connection.peer) is connection:
                del self.partners[connection.peer]
        elif connection in self.clients:
            self.clients.remove(connection)

    def close(self) -> None:
        self._closed.set()  # first: a handshake that ends later sees it and closes its socket
        while self._added:
            self._added.popleft()[2].close()
        for connection in [*self.partners.values(), *self.clients]:
            self.remove(connection)
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
