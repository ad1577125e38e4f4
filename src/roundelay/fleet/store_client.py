"""The client of a job's store: one round trip per call, a deadline on every call, reconnection.

A call takes an idle connection from a pool, or opens one, so that no thread waits behind another one's long wait. Every
connection has a session and numbers its requests. After a lost connection the request is sent again under the same session
and number, and the server does not apply it twice.

Once a call has found that the server is lost, all calls of the client and of its clones raise at once, those under way too: the
process ends after one time-out, not after one per call. Time in which this process was suspended does not count.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from roundelay.errors import PeerLost, UsageError
from roundelay.fleet.embedded_store import set_tcp_options
from roundelay.fleet.frames import PROTOCOL, FrameError, decode, encode

TIMEOUT_S = 10.0
"""Longest time without any progress of a call over TCP."""
UNIX_TIMEOUT_S = 60.0
"""The same over a Unix socket: the kernel reports the death of its server at once, so silence means that it is suspended."""
PATIENCE_S = 8.0
"""Time to reconnect after the connection was closed or reset."""
REFUSED_S = 3.0
"""A machine that refuses connections for this long no longer runs the server."""
SUSPENDED_S = 1.0
"""A time-out that is noticed this much late means that this process was suspended."""
RESUMPTIONS = 3
"""How often one request starts its time again after a suspension; more means that this process gets no processor."""
WAIT_S = 2.0
"""Longest wait of one request at the server; longer waits are several requests."""
BACKOFF_S = (0.02, 0.5)
CHUNK = 1 << 18

UNIX = "unix:"


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`; the port of `unix:/path` is 0."""
    if address.startswith(UNIX):
        return address, 0
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"the address of a store must be host:port or unix:/path (got '{address}')", where="store", hint="check it"
        )
    return host.strip("[]"), int(port)


class _Loss:
    """What a client and its clones know about the loss of their server, and the connections that end with it."""

    def __init__(self) -> None:
        self.reason = ""
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._sockets: set[socket.socket] = set()

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            if self._process != os.getpid():  # forked: the connections belong to the parent
                self._process, self._sockets = os.getpid(), set()
            self._sockets.add(sock)

    def discard(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)

    def declare(self, reason: str) -> None:
        """The server is lost: end the calls that are under way in other threads."""
        with self._lock:
            self.reason = self.reason or reason
            for sock in self._sockets if self._process == os.getpid() else ():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class StoreClient:
    """Connections to one server. Any thread may call any method. All methods raise PeerLost if the server is lost."""

    def __init__(self, address: str, timeout_s: float | None = None) -> None:
        self.address = address
        self.host, self.port = parse_address(address)
        self.local = address.startswith(UNIX)
        self.timeout_s = timeout_s or (UNIX_TIMEOUT_S if self.local else TIMEOUT_S)
        self.server = ""
        """Identity of the server, known after the first connection."""
        self.endpoint: tuple[int, Any] | None = None
        self.loss = _Loss()
        self._process = os.getpid()
        self._idle: list[_Connection] = []
        self._thread = threading.local()

    @property
    def lost(self) -> bool:
        """Whether a call of this client, or of a clone, has found that the server is lost."""
        return bool(self.loss.reason)

    def connect(self, timeout_s: float) -> None:
        """Connect for the first time. Raises PeerLost after `timeout_s`."""
        end = time.monotonic() + timeout_s
        delay = BACKOFF_S[0]
        while True:
            connection = _Connection(self)
            try:
                connection.open(max(0.1, min(self.timeout_s, end - time.monotonic())))
                self._idle.append(connection)
                return
            except (OSError, FrameError) as error:
                connection.close()
                if time.monotonic() + delay > end:
                    raise PeerLost(
                        f"the job's store at {self.address} does not answer",
                        where=f"MASTER_ADDR, MASTER_PORT: {error}",
                        hint="check that the process of the first machine runs, and that the address and port are reachable "
                        "from here",
                    ) from error
            time.sleep(delay)
            delay = min(2 * delay, BACKOFF_S[1])

    def clone(self) -> StoreClient:
        """Return a client with connections of its own, which share no queue with those of this one."""
        other = StoreClient(self.address, self.timeout_s)
        other.server, other.endpoint, other.loss = self.server, self.endpoint, self.loss
        return other

    def close(self) -> None:
        """Close all idle connections. Later calls open new ones."""
        while self._idle:
            self._idle.pop().close()

    def call(self, operation: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Send one request and return its result. Blocks for the round trip and at most `wait_s` more."""
        if self._process != os.getpid():  # forked: the connections belong to the parent
            self._process, self._idle = os.getpid(), []
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(self)
        try:
            reply = connection.request(operation, arguments, wait_s)
        except BaseException:  # also an interrupt in the middle: the state of the connection is unknown
            connection.close()
            raise
        self._idle.append(connection)
        self._thread.revision = reply[1]
        if len(reply) > 3:
            raise UsageError(f"the store refused a request: {reply[3]}", where=f"{operation} {arguments[:1]}")
        return reply[2]

    def watch(self, seconds: float, keys: list[str]) -> bool:
        """Block until one of the keys has changed since this thread's last call, at most `seconds`; return whether it has."""
        return self._wait("watch", seconds, keys, getattr(self._thread, "revision", None))

    def wait(self, seconds: float, keys: list[str]) -> bool:
        """Block until all keys exist, at most `seconds`; return whether they do."""
        return self._wait("wait", seconds, keys)

    def _wait(self, operation: str, seconds: float, keys: list[str], *arguments: Any) -> bool:
        end = time.monotonic() + seconds
        while True:
            part = max(0.0, min(end - time.monotonic(), WAIT_S))
            if self.call(operation, part, keys, *arguments, wait_s=part):
                return True
            if time.monotonic() >= end:
                return False


class _Connection:
    """One session with the server, used by one thread at a time. `sock` is None while it is not connected."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.sock: socket.socket | None = None
        self._session = secrets.token_hex(8)
        self._number = 0
        self._buffer = bytearray()
        self._due = 0.0
        """When the blocking call that is under way ends at the latest, unless this process is suspended."""

    def open(self, timeout_s: float) -> None:
        """Connect and shake hands. Raises OSError or FrameError."""
        client = self.client
        if client.endpoint is None:
            if client.local:
                client.endpoint = (socket.AF_UNIX, client.host.removeprefix(UNIX))
            else:
                resolved = socket.getaddrinfo(client.host, client.port, type=socket.SOCK_STREAM)[0]
                client.endpoint = (resolved[0], resolved[4])
        sock = socket.socket(client.endpoint[0])
        client.loss.add(sock)
        try:
            self._limit(sock, timeout_s)
            if not client.local:
                set_tcp_options(sock)
            if client.lost:
                raise ConnectionAbortedError(client.loss.reason)
            sock.connect(client.endpoint[1])
            self._limit(sock, timeout_s)
            self._buffer.clear()
            self._handshake(sock)
        except BaseException:
            client.loss.discard(sock)
            sock.close()
            raise
        self.sock = sock

    def _limit(self, sock: socket.socket, timeout_s: float) -> None:
        """Set the longest time of each of the next blocking calls."""
        sock.settimeout(timeout_s)
        self._due = time.monotonic() + timeout_s

    def _suspended(self) -> bool:
        """Return whether this process was suspended in its latest blocking call."""
        return time.monotonic() > self._due + SUSPENDED_S

    def _handshake(self, sock: socket.socket) -> None:
        """Send the first message and check the answer. Authentication belongs here."""
        sock.sendall(encode([PROTOCOL, self._session]))
        answer = self._receive(sock)
        if len(answer) != 2 or answer[0] != PROTOCOL:
            raise FrameError("the server is not a store of this version")
        if self.client.server not in ("", answer[1]):
            self.client_lost("another server has taken its address")
        self.client.server = answer[1]

    def _receive(self, sock: socket.socket) -> list[Any]:
        while (message := decode(self._buffer)) is None:
            chunk = sock.recv(CHUNK)  # every chunk is progress: the time-out starts again
            if not chunk:
                raise ConnectionResetError("connection closed by the server")
            self._buffer += chunk
            self._due = time.monotonic() + (sock.gettimeout() or 0.0)
        return message

    def request(self, operation: str, arguments: tuple[Any, ...], wait_s: float) -> list[Any]:
        """Send a request until it is answered. Raises PeerLost if there is no progress in time."""
        self._number += 1
        try:
            frame = encode([self._number, operation, *arguments])
        except FrameError as error:
            raise UsageError(f"{operation} failed: {error}", where="store", hint="store less in one key") from error
        attempt_s = self.client.timeout_s / 2
        end = 0.0
        refused_at: float | None = None
        delay = BACKOFF_S[0]
        began = time.monotonic()
        self._due = began + attempt_s
        resumptions = 0
        while True:
            self._raise_if_lost()
            if end and resumptions < RESUMPTIONS and self._suspended():  # in the pause between two attempts
                resumptions, began, end = resumptions + 1, time.monotonic(), 0.0
                self._due = began + attempt_s
            try:
                if self.sock is None:
                    self.open(max(0.2, min(attempt_s, end - time.monotonic())) if end else attempt_s)
                assert self.sock is not None
                self._limit(self.sock, attempt_s + wait_s)
                self.sock.sendall(frame)
                self._limit(self.sock, attempt_s + wait_s)
                reply = self._receive(self.sock)
                if reply[0] != self._number or len(reply) < 3:
                    raise FrameError("a reply to another request")
                return reply
            except (OSError, FrameError) as error:
                self.close()
                self._raise_if_lost()
                now = time.monotonic()
                if resumptions < RESUMPTIONS and self._suspended():
                    resumptions, began, end, refused_at, delay = resumptions + 1, now, 0.0, None, BACKOFF_S[0]
                end = end or max(began + self.client.timeout_s + wait_s, now + attempt_s)
                if not isinstance(error, TimeoutError):  # a silent server may be suspended, one that closes is not
                    end = min(end, now + PATIENCE_S)
                if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                    refused_at = refused_at or now
                    if self.client.local or now - refused_at > REFUSED_S:
                        self.client_lost(str(error))
                else:
                    refused_at = None
                if now + delay > end:
                    self.client_lost(str(error))
                self._due = now + delay
                time.sleep(delay)
                delay = min(2 * delay, BACKOFF_S[1])

    def client_lost(self, reason: str) -> NoReturn:
        """The server is lost: note it for all later calls, and raise PeerLost."""
        self.client.loss.declare(reason)
        raise self._lost_error()

    def _raise_if_lost(self) -> None:
        if self.client.lost:
            raise self._lost_error()

    def _lost_error(self) -> PeerLost:
        return PeerLost(
            "the job's store no longer answers",
            where=f"{self.client.address}: {self.client.loss.reason}",
            hint="the process that started the job has ended or cannot be reached; start again with resume=auto",
        )

    def close(self) -> None:
        if self.sock is not None:
            self.client.loss.discard(self.sock)
            self.sock.close()
            self.sock = None


def connect_store(host: str, port: int, timeout_s: float) -> StoreClient:
    """Connect to the store at host:port, or at `unix:/path`. Raises PeerLost after `timeout_s`."""
    client = StoreClient(host if host.startswith(UNIX) else f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    client.connect(timeout_s)
    return client
