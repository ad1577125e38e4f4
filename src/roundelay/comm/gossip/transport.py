"""TCP connections of one gossip thread: framed messages, handshake, remote reads and writes. Nothing is unpickled.

One selector polls the wake-up socket, the listening socket and all connections. Only the header of a message is read when it
arrives. The payload stays in the socket buffers until the receiver provides a tensor; until then TCP flow control holds the
sender back.

One gloo group of two ranks per edge would not do: a gossip thread must notice a request for any round on any edge while it
waits on another edge, gloo cannot wait on several groups at once, and a gloo timeout closes the pair for good.
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

from torch import Tensor

from roundelay.comm.shared_memory import SharedVectors, drain_socket
from roundelay.errors import PeerLost

HEADER = struct.Struct("<4sBqq")
MAGIC = b"RDL1"


def bytes_of(vector: Tensor) -> memoryview:
    """Return the memory of a contiguous host vector, without a copy."""
    return memoryview(vector.numpy()).cast("B")  # type: ignore[arg-type]  # numpy arrays are buffers


class MessageType(IntEnum):
    """Type of a message."""

    HELLO = 1  # number: the sender's rank; payload: the job's token
    EXCHANGE = 2  # number: the round; payload: a snapshot
    GET = 3  # request the vector
    ADD = 4  # payload: add this to the vector
    REPLY = 5  # number: the vector's version; payload: the vector (GET) or nothing (ADD)


@dataclass
class Message:
    """The header of a message; the payload is read separately."""

    kind: MessageType
    number: int
    bytes: int


class ConnectionClosed(Exception):
    """The connection is closed or unusable."""


class PeerConnection(Protocol):
    """A connection to one peer, on any transport.

    Messages arrive in the order they were sent. A payload is read when the gossip thread provides a buffer; nothing after it is
    read until then.
    """

    peer: int | None
    """The partner's rank; None on the connection of a client that only uses one-sided operations."""
    client: int
    """The client's rank; -1 on the connection of a partner."""
    sent_bytes: int
    unsent: int
    """Messages that `send` has queued and that are not sent yet."""
    error: str
    """Why sending failed; empty if it has not."""
    unread: Message | None
    """The header of a message whose payload is unread."""

    def fileno(self) -> int:
        """Return the descriptor to poll; negative: there is none, and a message wakes the gossip thread."""

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None:
        """Queue a message without blocking; the payload must not change until `unsent` is 0."""

    def read_header(self) -> Message | None:
        """Return the next message's header, or None if it has not arrived. Does not block."""

    def read_payload(self, buffer: memoryview) -> None:
        """Read the unread payload into `buffer`; block until it is complete."""

    def check_alive(self, waited_s: float) -> None:
        """Raise PeerLost if the peer, awaited for `waited_s` seconds, is known to have failed."""

    def close(self) -> None: ...


class ConnectionSet:
    """All connections of one gossip thread.

    Thread safety: `add`, `sent_bytes` and `len(partners)` may be used from any thread; everything else only from the gossip
    thread. `on_message` is called with every header that arrives, `on_lost` with the rank and reason of a lost partner.
    """

    def __init__(
        self,
        vectors: SharedVectors,
        token: bytes,
        listener: socket.socket | None,
        on_message: Callable[[PeerConnection, Message], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self.partners: dict[int, PeerConnection] = {}
        self.clients: list[PeerConnection] = []
        """Connections for one-sided operations; losing one is not a failure of its rank."""
        self._vectors, self._token, self._listener = vectors, token, listener
        self._on_message, self._on_lost = on_message, on_lost
        self._sender: SenderThread | None = None if listener is None else SenderThread(lambda: vectors.wake(vectors.rank))
        self._added: deque[tuple[int, socket.socket | PeerConnection]] = deque()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(vectors.wakeups(), selectors.EVENT_READ, None)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, listener)

    @property
    def sent_bytes(self) -> int:
        return sum(connection.sent_bytes for connection in [*self.partners.values(), *self.clients])

    def add(self, peer: int, transport: socket.socket | PeerConnection) -> None:
        """Hand over the connection to a partner; a negative peer is -1 - rank of a client for one-sided operations."""
        self._added.append((peer, transport))
        self._vectors.wake(self._vectors.rank)

    def register_added(self) -> None:
        """Make the connections passed to `add` partners and clients."""
        while self._added:
            peer, transport = self._added.popleft()
            connection: PeerConnection
            if isinstance(transport, socket.socket):
                assert self._sender is not None
                connection = Connection(transport, self._sender)
            else:
                connection = transport
            if peer >= 0:
                connection.peer = peer
                self.partners[peer] = connection
            else:
                connection.client = -1 - peer
                self.clients.append(connection)

    def poll(self, timeout_s: float) -> bool:
        """Wait for wake-ups and messages and read them; return whether anything happened within `timeout_s`."""
        active = False
        for connection in [*self.partners.values(), *self.clients]:
            if connection.error:
                self.drop(connection, connection.error)
            elif connection.unread is None and connection.fileno() < 0:
                active |= self._read(connection)
            elif connection.unread is None:
                self._watch(connection)
        if active:
            return True
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.data is None:
                drain_socket(self._vectors.wakeups())
            elif key.data is self._listener:
                self._accept()
            else:
                self._read(key.data)
        return bool(events)

    def drop(self, connection: PeerConnection, reason: str) -> None:
        """Close a connection; a lost partner is passed to `on_lost`."""
        self._unwatch(connection)
        connection.close()
        if connection.peer is not None:
            self.partners.pop(connection.peer, None)
            self._on_lost(connection.peer, reason)
        else:
            self.clients.remove(connection)

    def close(self) -> None:
        self._closed = True  # first: a handshake that ends later sees it and closes its socket
        while self._added:
            self._added.popleft()[1].close()
        for connection in [*self.partners.values(), *self.clients]:
            connection.close()
        if self._sender is not None:
            self._sender.close()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()

    def _watch(self, connection: PeerConnection) -> None:
        if connection.fileno() not in self._selector.get_map():
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def _unwatch(self, connection: PeerConnection) -> None:
        if connection.fileno() >= 0 and connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        # on its own thread: a peer that connects and sends nothing must not delay exchanges
        threading.Thread(target=self._handshake, args=(sock,), name=f"handshake-{self._vectors.rank}", daemon=True).start()

    def _handshake(self, sock: socket.socket) -> None:
        try:
            self.add(accept_handshake(sock, self._token), sock)
        except ConnectionClosed:
            sock.close()
        if self._closed:
            sock.close()

    def _read(self, connection: PeerConnection) -> bool:
        """Read one header; return whether there was one."""
        try:
            message = connection.read_header()
            if connection.unread is not None:
                self._unwatch(connection)  # the payload is read later; until then the socket back-pressures the sender
            if message is not None:
                self._on_message(connection, message)
            return message is not None
        except ConnectionClosed as error:
            self.drop(connection, str(error))
            return False


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Connection:
    """A TCP connection; see `PeerConnection` for the contract.

    Headers are read without blocking and payloads in one call. Messages are sent by a thread: a model-sized message takes two
    system calls instead of hundreds of turns of the selector.
    """

    def __init__(self, sock: socket.socket, sender: SenderThread) -> None:
        sock.settimeout(None)
        tune(sock)
        self.sock, self._sender = sock, sender
        self.peer: int | None = None
        self.client = -1
        self.sent_bytes = 0
        self.unsent = 0
        self.error = ""
        self.unread: Message | None = None
        self._header = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None:
        self.unsent += 1
        header = HEADER.pack(MAGIC, kind, number, len(payload) if payload is not None else 0)
        self._sender.queue.put((self, header, payload))

    def read_header(self) -> Message | None:
        try:
            part = self.sock.recv(HEADER.size - len(self._header), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        if not part:
            raise ConnectionClosed("connection closed")
        self._header += part
        if len(self._header) < HEADER.size:
            return None
        magic, kind, number, length = HEADER.unpack(self._header)
        self._header.clear()
        if magic != MAGIC or kind not in MessageType._value2member_map_ or length < 0:
            raise ConnectionClosed("not a Roundelay message")
        message = Message(MessageType(kind), number, length)
        if length:
            self.unread = message
        return message

    def read_payload(self, buffer: memoryview) -> None:
        assert self.unread is not None
        if len(buffer) != self.unread.bytes:
            raise ConnectionClosed(f"payload must have {len(buffer)} bytes (got {self.unread.bytes})")
        receive_into(self.sock, buffer)
        self.unread = None

    def check_alive(self, waited_s: float) -> None:
        """Do nothing: a socket reports a dead peer by itself."""

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def receive_into(sock: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer from a blocking socket."""
    try:
        while len(buffer):
            count = sock.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionClosed("connection closed")
            buffer = buffer[count:]
    except OSError as error:
        raise ConnectionClosed(str(error)) from error


class SenderThread:
    """The thread that sends the messages of one gossip thread; `on_sent` is called on it after each message."""

    def __init__(self, on_sent: Callable[[], None]) -> None:
        self.queue: SimpleQueue[tuple[Connection, bytes, memoryview | None] | None] = SimpleQueue()
        self._on_sent = on_sent
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            connection, header, payload = item
            try:
                connection.sock.sendall(header)
                if payload is not None:
                    connection.sock.sendall(payload)
                connection.sent_bytes += len(header) + (len(payload) if payload is not None else 0)
            except OSError as error:
                connection.error = str(error)
            connection.unsent -= 1
            self._on_sent()

    def close(self) -> None:
        self.queue.put(None)


def listen(host: str) -> socket.socket:
    """Return a non-blocking listening socket bound to this address only; the system chooses the port."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256)
    listener.setblocking(False)
    return listener


def connect(address: str, rank: int, token: bytes, timeout_s: float) -> socket.socket:
    """Connect to a peer's gossip thread and send the handshake of `rank`."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    tune(sock)
    sock.sendall(HEADER.pack(MAGIC, MessageType.HELLO, rank, len(token)) + token)
    return sock


def accept_handshake(sock: socket.socket, token: bytes, timeout_s: float = 5.0) -> int:
    """Return the rank in a peer's handshake. Raises ConnectionClosed if the handshake is invalid or its token is wrong."""
    sock.settimeout(timeout_s)
    try:
        header = _receive(sock, HEADER.size)
        magic, kind, rank, length = HEADER.unpack(header)
        if magic != MAGIC or kind != MessageType.HELLO or length != len(token):
            raise ConnectionClosed("handshake rejected: bad magic, message type or token length")
        if not hmac.compare_digest(_receive(sock, length), token):
            raise ConnectionClosed("handshake rejected: wrong token")
    except OSError as error:
        raise ConnectionClosed(str(error)) from error
    return rank


def _receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionClosed("connection closed")
        data += part
    return bytes(data)


class RemoteMemoryClient:
    """One-sided operations on a peer's shared vector. Calls block on the calling thread; one call at a time."""

    def __init__(self, address: str, rank: int, peer: int, token: bytes, timeout_s: float) -> None:
        self.peer = peer
        self._sock = connect(address, -1 - rank, token, timeout_s)  # negative: a client, not a partner for exchanges
        self._sock.settimeout(timeout_s)

    def add(self, d: memoryview) -> int:
        """Add d to the vector; return its version before the addition."""
        return self._request(HEADER.pack(MAGIC, MessageType.ADD, 0, len(d)), d, None)

    def get(self, out: memoryview) -> int:
        """Copy the vector to out; return its version."""
        return self._request(HEADER.pack(MAGIC, MessageType.GET, 0, 0), None, out)

    def _request(self, header: bytes, payload: memoryview | None, out: memoryview | None) -> int:
        try:
            self._sock.sendall(header)
            if payload is not None:
                self._sock.sendall(payload)
            _, _, version, length = HEADER.unpack(_receive(self._sock, HEADER.size))
            if length:
                assert out is not None
                assert len(out) == length
                receive_into(self._sock, out)
            return int(version)
        except (OSError, ConnectionClosed) as error:
            raise PeerLost(
                f"rank {self.peer} does not answer",
                where=str(error),
                hint="look at its log; resume=auto continues from the last checkpoint",
            ) from error

    def close(self) -> None:
        self._sock.close()
