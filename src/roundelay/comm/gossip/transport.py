"""TCP connections of one gossip thread: framed messages, handshake, remote reads and writes. Nothing is unpickled.

One selector polls the wake-up socket, the listening socket and all connections. Only the header of a message is read when it
arrives; the payload stays in the kernel buffer until the receiver provides a tensor, which back-pressures the sender.

A gloo group of two ranks per edge cannot do this: a gossip thread must notice a request for any round on any edge while it
waits on another one, and gloo offers neither polling nor waiting on several groups.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from queue import SimpleQueue
from typing import Protocol

from roundelay.comm.shared_memory import SharedVectors, drain_socket
from roundelay.errors import PeerLost


class ConnectionSet:
    """One agent's ways. Others invite, read `sent_bytes` and count partners; all else is for the agent's own thread."""

    def __init__(
        self,
        board: SharedVectors,
        token: bytes,
        door: socket.socket | None,
        arrived: Callable[[PeerConnection, Message], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self.partners: dict[int, PeerConnection] = {}
        self.callers: list[PeerConnection] = []
        """Who uses one-sided verbs; nobody waits for them."""
        self._board, self._token, self._door, self._arrived, self._lost = board, token, door, arrived, lost
        self._sender: Sender | None = None if door is None else Sender(lambda: board.wake(board.rank))
        self._invited: deque[tuple[int, socket.socket | PeerConnection]] = deque()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(board.wakeups(), selectors.EVENT_READ, None)
        if door is not None:
            self._selector.register(door, selectors.EVENT_READ, "door")

    @property
    def sent_bytes(self) -> int:
        return sum(link.sent_bytes for link in [*self.partners.values(), *self.callers])

    def invite(self, peer: int, way: socket.socket | PeerConnection) -> None:
        """Hands over the way to a partner (negative: to somebody who calls for one-sided verbs)."""
        self._invited.append((peer, way))
        self._board.wake(self._board.rank)

    def take_in(self) -> None:
        """Those who were invited are partners and callers from now on."""
        while self._invited:
            peer, way = self._invited.popleft()
            link: PeerConnection
            if isinstance(way, socket.socket):
                assert self._sender is not None
                link = Connection(way, self._sender)
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
                drain_socket(self._board.wakeups())
            elif key.data == "door":
                self._welcome()
            else:
                self._read(key.data)
        return bool(events)

    def hang_up(self, link: PeerConnection, why: str) -> None:
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

    def _watch(self, link: PeerConnection) -> None:
        if link.fileno() not in self._selector.get_map():
            self._selector.register(link, selectors.EVENT_READ, link)

    def _unwatch(self, link: PeerConnection) -> None:
        if link.fileno() >= 0 and link.fileno() in self._selector.get_map():
            self._selector.unregister(link)

    def _welcome(self) -> None:
        assert self._door is not None
        try:
            sock, _ = self._door.accept()
        except OSError:
            return
        # in a thread of its own: somebody who connects and says nothing must not keep this agent from its exchanges
        threading.Thread(target=self._admit, args=(sock,), name=f"door-{self._board.rank}", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            self.invite(accept_handshake(sock, self._token), sock)
        except ConnectionClosed:
            sock.close()
        if self._closed:
            sock.close()

    def _read(self, link: PeerConnection) -> bool:
        """Takes what has arrived; whether there was anything."""
        try:
            arrival = link.read_header()
            if link.waiting is not None:
                # its payload is taken when the agent is ready for it; until then the socket holds the sender back
                self._unwatch(link)
            if arrival is not None:
                self._arrived(link, arrival)
            return arrival is not None
        except ConnectionClosed as error:
            self.hang_up(link, str(error))
            return False


HEADER = struct.Struct("<4sBqq")
MAGIC = b"RDL1"


class MessageType(IntEnum):
    """What a message says."""

    HELLO = 1  # number: the sender's rank; payload: the job's token
    EXCHANGE = 2  # number: the round; payload: a snapshot
    GET = 3  # please send your vector
    ADD = 4  # payload: add this to your vector
    REPLY = 5  # number: the vector's version; payload: the vector (GET) or nothing (ADD)


@dataclass
class Message:
    """A message, or its header while the payload waits to be fetched."""

    kind: MessageType
    number: int
    bytes: int


class ConnectionClosed(Exception):
    """The other end is gone."""


class PeerConnection(Protocol):
    """What an agent has of a peer, whatever carries it. Messages arrive in the order they were sent in; a payload is taken when
    the agent offers a buffer for it, and until then nothing behind it is read."""

    peer: int | None
    caller: int
    sent_bytes: int
    sending: int
    error: str
    waiting: Message | None

    def fileno(self) -> int:
        """What to watch for news; negative: there is no such thing, and news wakes the agent through its board."""

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None: ...

    def read_header(self) -> Message | None: ...

    def read_payload(self, buffer: memoryview) -> None: ...

    def look(self, waited_s: float) -> None:
        """The agent has waited for this peer for so long: is it still there?"""

    def close(self) -> None: ...


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Connection:
    """One connection. Headers are read without blocking, so that many links can be watched at once; a payload stays in the
    socket until a buffer is offered for it, which is back-pressure for free, and is then taken in one call. Sending is the
    sender's business: model-sized messages move in two system calls, not in hundreds of turns through the interpreter."""

    def __init__(self, sock: socket.socket, sender: Sender) -> None:
        sock.settimeout(None)
        tune(sock)
        self.sock, self._sender = sock, sender
        self.peer: int | None = None
        self.caller = -1
        """Who calls for one-sided verbs on this connection; -1 on a partner's."""
        self.sent_bytes = 0
        self.sending = 0
        """Messages handed to the sender and not yet gone."""
        self.error = ""
        """What the sender met, if it met anything."""
        self._head = bytearray()
        self.waiting: Message | None = None
        """A message whose payload is still in the socket."""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None:
        """Hands a message to the sender; the payload must stay as it is until `sending` is 0 again."""
        self.sending += 1
        self._sender.queue.put((self, HEADER.pack(MAGIC, kind, number, len(payload) if payload is not None else 0), payload))

    def read_header(self) -> Message | None:
        """The next message's header if it is there; a message without payload is complete with it."""
        try:
            part = self.sock.recv(HEADER.size - len(self._head), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        if not part:
            raise ConnectionClosed("connection closed")
        self._head += part
        if len(self._head) < HEADER.size:
            return None
        magic, kind, number, length = HEADER.unpack(self._head)
        self._head.clear()
        if magic != MAGIC or kind not in MessageType._value2member_map_ or length < 0:
            raise ConnectionClosed("not a Roundelay message")
        arrival = Message(MessageType(kind), number, length)
        if length:
            self.waiting = arrival
        return arrival

    def read_payload(self, buffer: memoryview) -> None:
        """Takes the payload that waits; blocks until all of it is there."""
        assert self.waiting is not None
        if len(buffer) != self.waiting.bytes:
            raise ConnectionClosed(f"a payload of {self.waiting.bytes} bytes where {len(buffer)} were expected")
        receive_all(self.sock, buffer)
        self.waiting = None

    def look(self, waited_s: float) -> None:
        """A socket reports a dead peer by itself."""

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def receive_all(sock: socket.socket, buffer: memoryview) -> None:
    try:
        while len(buffer):
            got = sock.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
            if got == 0:
                raise ConnectionClosed("connection closed")
            buffer = buffer[got:]
    except OSError as error:
        raise ConnectionClosed(str(error)) from error


class Sender:
    """The thread that sends for an agent."""

    def __init__(self, sent: Callable[[], None]) -> None:
        self.queue: SimpleQueue[tuple[Connection, bytes, memoryview | None] | None] = SimpleQueue()
        self._sent = sent
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            link, head, payload = item
            try:
                link.sock.sendall(head)
                if payload is not None:
                    link.sock.sendall(payload)
                link.sent_bytes += len(head) + (len(payload) if payload is not None else 0)
            except OSError as error:
                link.error = str(error)
            link.sending -= 1
            self._sent()

    def close(self) -> None:
        self.queue.put(None)


def listen(host: str) -> socket.socket:
    """A listener on that address alone; the system chooses the port."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256)
    listener.setblocking(False)
    return listener


def connect(address: str, rank: int, token: bytes, timeout_s: float) -> socket.socket:
    """A blocking connection to a peer's agent, introduced as `rank`."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    tune(sock)
    sock.sendall(HEADER.pack(MAGIC, MessageType.HELLO, rank, len(token)) + token)
    return sock


def accept_handshake(sock: socket.socket, token: bytes, timeout_s: float = 5.0) -> int:
    """The rank of a newcomer who knows the job's token; anybody else is turned away."""
    sock.settimeout(timeout_s)
    try:
        head = _exactly(sock, HEADER.size)
        magic, kind, rank, length = HEADER.unpack(head)
        if magic != MAGIC or kind != MessageType.HELLO or length != len(token):
            raise ConnectionClosed("a stranger knocked")
        if not hmac.compare_digest(_exactly(sock, length), token):
            raise ConnectionClosed("a wrong token")
    except OSError as error:
        raise ConnectionClosed(str(error)) from error
    return rank


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = sock.recv(count - len(found))
        if not part:
            raise ConnectionClosed("connection closed")
        found += part
    return bytes(found)


class RemoteMemoryClient:
    """One-sided verbs on a remote vector, from the thread that needs the answer."""

    def __init__(self, address: str, rank: int, peer: int, token: bytes, timeout_s: float) -> None:
        self.peer = peer
        self._sock = connect(address, -1 - rank, token, timeout_s)  # negative: a caller, not a partner for exchanges
        self._sock.settimeout(timeout_s)

    def add(self, d: memoryview) -> int:
        return self._ask(HEADER.pack(MAGIC, MessageType.ADD, 0, len(d)), d, None)

    def get(self, out: memoryview) -> int:
        return self._ask(HEADER.pack(MAGIC, MessageType.GET, 0, 0), None, out)

    def _ask(self, head: bytes, payload: memoryview | None, out: memoryview | None) -> int:
        try:
            self._sock.sendall(head)
            if payload is not None:
                self._sock.sendall(payload)
            _, _, version, length = HEADER.unpack(_exactly(self._sock, HEADER.size))
            if length:
                assert out is not None
                assert len(out) == length
                receive_all(self._sock, out)
            return int(version)
        except (OSError, ConnectionClosed) as error:
            raise PeerLost(
                f"rank {self.peer} does not answer",
                where=str(error),
                hint="look at its log; resume=auto goes on from the last checkpoint",
            ) from error

    def close(self) -> None:
        self._sock.close()
