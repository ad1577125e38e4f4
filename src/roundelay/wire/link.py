"""Connections between agents: framed messages over TCP, never blocking, never unpickling.

Why not a two-member gloo group per edge: an agent must notice "somebody asks for round 12" on any edge while it waits on
another, and gloo offers neither polling nor waiting on several groups; its time-outs destroy the pair. A socket does both,
reports a dead peer at once, and costs the same copies.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from roundelay.errors import PeerLost

HEADER = struct.Struct("<4sBqq")
MAGIC = b"RDL1"
BUFFER_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20


class Kind(IntEnum):
    """What a message says."""

    HELLO = 1  # number: the sender's rank; payload: the job's token
    MEET = 2  # number: the round; payload: a snapshot
    GET = 3  # please send your vector
    ADD = 4  # payload: add this to your vector
    ANSWER = 5  # number: the vector's version; payload: the vector (GET) or nothing (ADD)


@dataclass
class Arrival:
    """A message, or its header while the payload waits to be fetched."""

    kind: Kind
    number: int
    bytes: int


class LinkClosed(Exception):
    """The other end is gone."""


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Link:
    """One non-blocking connection. A payload stays in the socket until a buffer is offered for it: back-pressure for free."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        tune(sock)
        self.sock = sock
        self.peer: int | None = None
        self.sent_bytes = 0
        self._out: deque[memoryview] = deque()
        self._head = bytearray()
        self.waiting: Arrival | None = None
        """A message whose payload has not been asked for yet."""
        self._into: memoryview | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    @property
    def wants_to_read(self) -> bool:
        return self.waiting is None or self._into is not None

    def send(self, kind: Kind, number: int, payload: memoryview | None = None) -> None:
        """Queues a message; the payload must stay as it is until nothing is left to write."""
        self._out.append(memoryview(HEADER.pack(MAGIC, kind, number, len(payload) if payload is not None else 0)))
        if payload is not None:
            self._out.append(payload)
        self.write()

    def write(self) -> None:
        try:
            while self._out:
                sent = self.sock.send(self._out[0][:CHUNK_BYTES])
                self.sent_bytes += sent
                rest = self._out[0][sent:]
                if len(rest):
                    self._out[0] = rest
                else:
                    self._out.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def offer(self, buffer: memoryview) -> None:
        """A buffer for the payload that waits."""
        assert self.waiting is not None
        if len(buffer) != self.waiting.bytes:
            raise LinkClosed(f"a payload of {self.waiting.bytes} bytes where {len(buffer)} were expected")
        self._into = buffer

    def read(self) -> Arrival | None:
        """Reads what is there: a whole message if one is complete (its payload is in the offered buffer), else None."""
        try:
            if self.waiting is None:
                part = self.sock.recv(HEADER.size - len(self._head))
                if not part:
                    raise LinkClosed("connection closed")
                self._head += part
                if len(self._head) < HEADER.size:
                    return None
                magic, kind, number, length = HEADER.unpack(self._head)
                self._head.clear()
                if magic != MAGIC or kind not in Kind._value2member_map_ or length < 0:
                    raise LinkClosed("not a Roundelay message")
                arrival = Arrival(Kind(kind), number, length)
                if length == 0:
                    return arrival
                self.waiting = arrival
                return None
            if self._into is None:
                return None
            while len(self._into):
                got = self.sock.recv_into(self._into, min(len(self._into), CHUNK_BYTES))
                if got == 0:
                    raise LinkClosed("connection closed")
                self._into = self._into[got:]
            arrival, self.waiting, self._into = self.waiting, None, None
            return arrival
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def close(self) -> None:
        self.sock.close()


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
    sock.sendall(HEADER.pack(MAGIC, Kind.HELLO, rank, len(token)) + token)
    return sock


def admit(sock: socket.socket, token: bytes, timeout_s: float = 5.0) -> int:
    """The rank of a newcomer who knows the job's token; anybody else is turned away."""
    sock.settimeout(timeout_s)
    try:
        head = _exactly(sock, HEADER.size)
        magic, kind, rank, length = HEADER.unpack(head)
        if magic != MAGIC or kind != Kind.HELLO or length != len(token):
            raise LinkClosed("a stranger knocked")
        if not hmac.compare_digest(_exactly(sock, length), token):
            raise LinkClosed("a wrong token")
    except OSError as error:
        raise LinkClosed(str(error)) from error
    return rank


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = sock.recv(count - len(found))
        if not part:
            raise LinkClosed("connection closed")
        found += part
    return bytes(found)


class Caller:
    """One-sided verbs on a remote vector, from the thread that needs the answer."""

    def __init__(self, address: str, rank: int, peer: int, token: bytes, timeout_s: float) -> None:
        self.peer = peer
        self._sock = connect(address, -1 - rank, token, timeout_s)  # negative: a caller, not a partner for meetings
        self._sock.settimeout(timeout_s)

    def add(self, d: memoryview) -> int:
        return self._ask(HEADER.pack(MAGIC, Kind.ADD, 0, len(d)), d, None)

    def get(self, out: memoryview) -> int:
        return self._ask(HEADER.pack(MAGIC, Kind.GET, 0, 0), None, out)

    def _ask(self, head: bytes, payload: memoryview | None, out: memoryview | None) -> int:
        try:
            self._sock.sendall(head)
            if payload is not None:
                self._sock.sendall(payload)
            _, _, version, length = HEADER.unpack(_exactly(self._sock, HEADER.size))
            if length:
                assert out is not None and len(out) == length
                while len(out):
                    got = self._sock.recv_into(out)
                    if got == 0:
                        raise LinkClosed("connection closed")
                    out = out[got:]
            return int(version)
        except (OSError, LinkClosed) as error:
            raise PeerLost(
                f"rank {self.peer} does not answer",
                where=str(error),
                do="look at its log; resume=auto goes on from the last checkpoint",
            ) from error

    def close(self) -> None:
        self._sock.close()
