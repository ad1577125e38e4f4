"""The ways to an agent's partners and callers on other machines, and what comes along them.

One selector watches the agent's wake-ups, the door and every way. A message is read up to its header; who it is for takes the
payload when it has room for it, and until then the socket holds the sender back.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

from roundelay.wire.board import Board, drain
from roundelay.wire.link import AnyLink, Arrival, Link, LinkClosed, Sender, admit


class Traffic:
    """One agent's ways. Others invite, read `sent_bytes` and count partners; all else is for the agent's own thread."""

    def __init__(
        self,
        board: Board,
        token: bytes,
        door: socket.socket | None,
        arrived: Callable[[AnyLink, Arrival], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self.partners: dict[int, AnyLink] = {}
        self.callers: list[AnyLink] = []
        """Who uses one-sided verbs; nobody waits for them."""
        self._board, self._token, self._door, self._arrived, self._lost = board, token, door, arrived, lost
        self._sender: Sender | None = None if door is None else Sender(lambda: board.wake(board.rank))
        self._invited: deque[tuple[int, socket.socket | AnyLink]] = deque()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(board.wakeups(), selectors.EVENT_READ, None)
        if door is not None:
            self._selector.register(door, selectors.EVENT_READ, "door")

    @property
    def sent_bytes(self) -> int:
        return sum(link.sent_bytes for link in [*self.partners.values(), *self.callers])

    def invite(self, peer: int, way: socket.socket | AnyLink) -> None:
        """Hands over the way to a partner (negative: to somebody who calls for one-sided verbs)."""
        self._invited.append((peer, way))
        self._board.wake(self._board.rank)

    def take_in(self) -> None:
        """Those who were invited are partners and callers from now on."""
        while self._invited:
            peer, way = self._invited.popleft()
            link: AnyLink
            if isinstance(way, socket.socket):
                assert self._sender is not None
                link = Link(way, self._sender)
            else:
                link = way
            if peer >= 0:
                link.peer = peer
                self.partners[peer] = link
            else:
                link.caller = -1 - peer
                self.callers.append(link)

    def listen(self, timeout_s: float) -> bool:
        """Waits for wake-ups and traffic, and moves bytes; whether there was anything."""
        news = False
        for link in [*self.partners.values(), *self.callers]:
            if link.error:
                self.hang_up(link, link.error)
            elif link.waiting is None and link.fileno() < 0:
                news |= self._read(link)
            elif link.waiting is None:
                self._watch(link)
        if news:
            return True
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.data is None:
                drain(self._board.wakeups())
            elif key.data == "door":
                self._welcome()
            else:
                self._read(key.data)
        return bool(events)

    def hang_up(self, link: AnyLink, why: str) -> None:
        self._unwatch(link)
        link.close()
        if link.peer is not None:
            self.partners.pop(link.peer, None)
            self._lost(link.peer, why)
        else:
            self.callers.remove(link)

    def close(self) -> None:
        self._closed = True  # before the invited are looked through: who comes through the door later sees it
        while self._invited:
            self._invited.popleft()[1].close()
        for link in [*self.partners.values(), *self.callers]:
            link.close()
        if self._sender is not None:
            self._sender.close()
        self._selector.close()
        if self._door is not None:
            self._door.close()

    def _watch(self, link: AnyLink) -> None:
        if link.fileno() not in self._selector.get_map():
            self._selector.register(link, selectors.EVENT_READ, link)

    def _unwatch(self, link: AnyLink) -> None:
        if link.fileno() >= 0 and link.fileno() in self._selector.get_map():
            self._selector.unregister(link)

    def _welcome(self) -> None:
        assert self._door is not None
        try:
            sock, _ = self._door.accept()
        except OSError:
            return
        # in a thread of its own: somebody who connects and says nothing must not keep this agent from its meetings
        threading.Thread(target=self._admit, args=(sock,), name=f"door-{self._board.rank}", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            self.invite(admit(sock, self._token), sock)
        except LinkClosed:
            sock.close()
        if self._closed:
            sock.close()

    def _read(self, link: AnyLink) -> bool:
        """Takes what has arrived; whether there was anything."""
        try:
            arrival = link.read_header()
            if link.waiting is not None:
                # its payload is taken when the agent is ready for it; until then the socket holds the sender back
                self._unwatch(link)
            if arrival is not None:
                self._arrived(link, arrival)
            return arrival is not None
        except LinkClosed as error:
            self.hang_up(link, str(error))
            return False
