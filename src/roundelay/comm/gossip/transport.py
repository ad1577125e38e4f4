"""TCP connections of one gossip thread: framed messages, handshake, remote reads and writes. Nothing is unpickled.

One selector polls the wake-up socket, the listening socket and all connections. All sockets are non-blocking, so a peer that is
slow, stopped or gone delays its own messages and no others. The payload of a message stays in the socket buffers until the
receiver provides memory for it; until then TCP flow control holds the sender back.

One gloo group of two ranks per edge would not do: a gossip thread must notice a request on any edge while it waits on another
edge, gloo cannot wait on several groups at once, and a gloo timeout closes the pair for good.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from roundelay.errors import PeerLost

HEADER = struct.Struct("<4sBqq")
MAGIC = b"RDL2"
APPLIED = struct.Struct("<q")
USER_TIMEOUT_MS = 10_000
"""Unacknowledged data closes a connection after this time, and so does a peer that has vanished while nothing is sent."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
TCP_INFO_BYTES = struct.Struct("=120xQQ")
"""bytes_acked and bytes_received in Linux's struct tcp_info."""


def bytes_of(vector: Tensor) -> memoryview:
    """Return the memory of a contiguous host vector, without a copy."""
    return memoryview(vector.numpy()).cast("B")  # type: ignore[arg-type]  # numpy arrays are buffers


class MessageType(IntEnum):
    """Type of a message."""

    HELLO = 1  # number: the sender's rank; payload: the job's token and the last exchange applied
    EXCHANGE = 2  # number: of the snapshot on this edge; payload: the snapshot
    GET = 3  # request the vector
    ADD = 4  # payload: add this to the vector
    REPLY = 5  # number: the vector's version; payload: the vector (GET) or nothing (ADD)
    ACK = 6  # number: the last exchange that the sender has applied


@dataclass
class Message:
    """The header of a message; the payload is read separately."""

    kind: MessageType
    number: int
    bytes: int


class ConnectionClosed(Exception):
    """The connection is closed or unusable."""


class PeerConnection(Protocol):
    """A connection to one peer, on any transport. Messages arrive in order. Use it under the gossip thread's mutex only."""

    peer: int | None
    """The partner's rank; None on the connection of a client that only uses one-sided operations."""
    client: int
    """The client's rank; -1 on the connection of a partner."""
    sent_bytes: int

    def fileno(self) -> int:
        """Return the descriptor to poll; negative: there is none, and a message wakes the gossip thread."""

    @property
    def reads(self) -> bool:
        """Whether there is memory for what arrives next: a header, or a payload after `receive`."""

    @property
    def writes(self) -> bool:
        """Whether messages are queued that the transport has not taken yet."""

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None:
        """Queue a message without blocking. The payload must not change before the peer has acknowledged it."""

    def read(self) -> Message | None:
        """Read what has arrived, without blocking: return a header, or a message whose payload has become complete.

        Raises ConnectionClosed. None: nothing is complete yet.
        """

    def receive(self, buffer: memoryview) -> None:
        """Provide memory for the payload of the last header. `read` returns the message again when it is complete."""

    def flush(self) -> None:
        """Send as much as possible without blocking. Raises ConnectionClosed."""

    def bytes_moved(self) -> int:
        """Return a number that grows while bytes move in either direction."""

    def check_alive(self, waited_s: float) -> None:
        """Raise PeerLost if the peer, awaited for `waited_s` seconds, is known to have failed and the job cannot continue."""

    def close(self) -> None: ...


def tune(sock: socket.socket) -> None:
    """Disable delays and set the time-outs that notice a vanished peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection:
    """A TCP connection; see `PeerConnection` for the contract."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        tune(sock)
        self.sock = sock
        self.peer: int | None = None
        self.client = -1
        self.sent_bytes = 0
        self._outgoing: deque[memoryview] = deque()
        self._header = bytearray()
        self._message: Message | None = None
        self._rest: memoryview | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def reads(self) -> bool:
        return self._message is None or self._rest is not None

    @property
    def writes(self) -> bool:
        return bool(self._outgoing)

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None:
        self._outgoing.append(memoryview(HEADER.pack(MAGIC, kind, number, len(payload) if payload is not None else 0)))
        if payload is not None:
            self._outgoing.append(payload)
        with suppress(ConnectionClosed):  # the next read or flush reports it
            self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                count = self.sock.send(self._outgoing[0])
                self.sent_bytes += count
                if count < len(self._outgoing[0]):
                    self._outgoing[0] = self._outgoing[0][count:]
                else:
                    self._outgoing.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionClosed(str(error)) from error

    def read(self) -> Message | None:
        try:
            if self._message is not None:
                return self._read_payload()
            part = self.sock.recv(HEADER.size - len(self._header))
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
            self._message = message
        return message

    def receive(self, buffer: memoryview) -> None:
        assert self._message is not None
        if len(buffer) != self._message.bytes:
            raise ConnectionClosed(f"payload must have {len(buffer)} bytes (got {self._message.bytes})")
        self._rest = buffer

    def _read_payload(self) -> Message | None:
        if self._rest is None:
            return None
        count = self.sock.recv_into(self._rest)
        if not count:
            raise ConnectionClosed("connection closed")
        self._rest = self._rest[count:]
        if len(self._rest):
            return None
        message, self._message, self._rest = self._message, None, None
        return message

    def bytes_moved(self) -> int:
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES.size)
            return sum(TCP_INFO_BYTES.unpack(info))
        except (OSError, struct.error):
            return 0

    def check_alive(self, waited_s: float) -> None:
        """Do nothing: a socket reports a lost connection by itself, and failures are declared in the store."""

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def listen(host: str) -> socket.socket:
    """Return a non-blocking listening socket bound to this address only; the system chooses the port."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256)
    listener.setblocking(False)
    return listener


# -- handshake: blocking, with a deadline, never on the gossip thread ----------------------------------------------------


def connect(address: str, rank: int, token: bytes, timeout_s: float, applied: int = 0) -> tuple[socket.socket, int]:
    """Connect to a peer's gossip thread; return the socket and the last exchange that the peer has applied.

    `rank` is the own rank, or -1 - rank for a client of one-sided operations. Raises OSError or ConnectionClosed.
    """
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    try:
        tune(sock)
        sock.sendall(HEADER.pack(MAGIC, MessageType.HELLO, rank, len(token) + APPLIED.size) + token + APPLIED.pack(applied))
        magic, kind, _, length = HEADER.unpack(receive_bytes(sock, HEADER.size))
        if magic != MAGIC or kind != MessageType.HELLO or length != APPLIED.size:
            raise ConnectionClosed("handshake rejected")
        return sock, int(APPLIED.unpack(receive_bytes(sock, APPLIED.size))[0])
    except BaseException:
        sock.close()
        raise


def accept_handshake(sock: socket.socket, token: bytes, timeout_s: float = 5.0) -> tuple[int, int]:
    """Return rank and last applied exchange of a peer's handshake; answer it with `answer_handshake`.

    Raises ConnectionClosed if the handshake is invalid or its token is wrong.
    """
    sock.settimeout(timeout_s)
    try:
        header = receive_bytes(sock, HEADER.size)
        magic, kind, rank, length = HEADER.unpack(header)
        if magic != MAGIC or kind != MessageType.HELLO or length != len(token) + APPLIED.size:
            raise ConnectionClosed("handshake rejected: bad magic, message type or token length")
        if not hmac.compare_digest(receive_bytes(sock, len(token)), token):
            raise ConnectionClosed("handshake rejected: wrong token")
        return rank, int(APPLIED.unpack(receive_bytes(sock, APPLIED.size))[0])
    except OSError as error:
        raise ConnectionClosed(str(error)) from error


def answer_handshake(sock: socket.socket, rank: int, applied: int) -> None:
    """Accept a handshake: send the own rank and the last exchange applied."""
    try:
        sock.sendall(HEADER.pack(MAGIC, MessageType.HELLO, rank, APPLIED.size) + APPLIED.pack(applied))
    except OSError as error:
        raise ConnectionClosed(str(error)) from error


def receive_into(sock: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer from a blocking socket. Raises ConnectionClosed."""
    try:
        while len(buffer):
            count = sock.recv_into(buffer)
            if count == 0:
                raise ConnectionClosed("connection closed")
            buffer = buffer[count:]
    except OSError as error:
        raise ConnectionClosed(str(error)) from error


def receive_bytes(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes from a blocking socket. Raises ConnectionClosed."""
    data = bytearray(count)
    receive_into(sock, memoryview(data))
    return bytes(data)


class RemoteMemoryClient:
    """One-sided operations on a peer's shared vector. Calls block on the calling thread; one call at a time.

    `timeout_s` is a deadline on progress: it restarts with every byte that moves.
    """

    def __init__(self, address: str, rank: int, peer: int, token: bytes, timeout_s: float) -> None:
        self.peer = peer
        try:
            self._sock, _ = connect(address, -1 - rank, token, timeout_s)  # negative: a client, not a partner for exchanges
        except (OSError, ConnectionClosed) as error:
            raise self._lost(error) from error
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
            while payload:
                payload = payload[self._sock.send(payload) :]
            _, _, version, length = HEADER.unpack(receive_bytes(self._sock, HEADER.size))
            if length:
                assert out is not None
                assert len(out) == length
                receive_into(self._sock, out)
            return int(version)
        except (OSError, ConnectionClosed) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(
            f"rank {self.peer} does not answer",
            where=str(error),
            hint="look at its log; resume=auto continues from the last checkpoint",
        )

    def close(self) -> None:
        self._sock.close()
