"""The server of a job's store: one thread, one selector, all data in memory.

A connection that sends garbage, too much or nothing is closed and harms no other. Times to live are measured by the server's
monotonic clock without the time in which the server itself did not run: no key expires because its owner could not reach a
suspended server.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from roundelay.errors import UsageError
from roundelay.fleet.frames import MAX_BYTES, MAX_HELLO_BYTES, PROTOCOL, FrameError, decode, encode
from roundelay.fleet.table import Table

TURN_S = 0.5
"""Longest time between two turns of the loop."""
SILENCE_S = 2.0
"""A gap between two turns longer than this means that the process was suspended."""
HELLO_S = 10.0
"""Time in which a new connection must have sent its first message."""
MAX_UNKNOWN = 1024
"""Connections without a first message; the oldest is closed when there are more."""
SESSION_S = 120.0
"""Time for which the last reply to a disconnected client is kept."""
MAX_SECONDS = 1e9
CHUNK = 1 << 18

logger = logging.getLogger(__name__)


class ClientSession:
    """What the server remembers of one client connection, across reconnections."""

    def __init__(self) -> None:
        self.number = 0
        self.reply = b""
        self.connection: StoreConnection | None = None
        self.left_at = 0.0


class StoreConnection:
    """One accepted socket."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock, self.accepted_at = sock, now
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.session: ClientSession | None = None
        self.wait: Wait | None = None
        self.closed = False


class Wait:
    """A request that is answered later: when `ready` returns true, or with False at `end`."""

    def __init__(
        self, connection: StoreConnection, number: int, end: float, keys: Sequence[str], ready: Callable[[], bool]
    ) -> None:
        self.connection, self.number, self.end, self.keys, self.ready = connection, number, end, keys, ready


class EmbeddedStore:
    """Serve a store on a bound and listening socket, on a thread of its own, until close()."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.unix_path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
        self.port = 0 if self.unix_path else int(listener.getsockname()[1])
        self.identity = secrets.token_hex(8)
        self._table = Table()
        self._silent_s = 0.0
        self._unknown: OrderedDict[StoreConnection, None] = OrderedDict()
        self._connections: set[StoreConnection] = set()
        self._sessions: dict[str, ClientSession] = {}
        self._waits: dict[str, set[Wait]] = {}
        self._waiting: set[Wait] = set()
        self._operations = self._build_operations()
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._stop_receiving, self._stop_sending = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._stop_receiving, selectors.EVENT_READ, None)
        self._accept_after = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close all connections. A second call does nothing."""
        if not self._closing:
            self._closing = True
            with suppress(OSError):
                self._stop_sending.send(b"!")
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    # -- the loop --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Return the time without the seconds in which this process did not run."""
        return time.monotonic() - self._silent_s

    def _serve(self) -> None:
        last = time.monotonic()
        housekeeping = 0.0
        while not self._closing:
            events = self._selector.select(self._timeout())
            turn = time.monotonic()
            if turn - last > SILENCE_S:
                self._silent_s += turn - last
                logger.warning("the store did not run for %.1f s; all times to live are extended by it", turn - last)
            last = turn
            now = self._now()
            self._table.expire(now)
            self._answer_waits()
            for key, mask in events:
                if key.fileobj is self._listener:
                    self._accept(now)
                elif key.data is not None:
                    self._handle(key.data, mask)
            if self._waiting:
                self._end_waits(now)
            if now > housekeeping:
                housekeeping = now + TURN_S
                self._tidy(now)
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        for sock in (self._listener, self._stop_receiving, self._stop_sending):
            sock.close()
        if self.unix_path:
            with suppress(OSError):
                os.unlink(self.unix_path)

    def _timeout(self) -> float:
        ends = [wait.end for wait in self._waiting]
        if (expiry := self._table.next_expiry()) is not None:
            ends.append(expiry)
        return min(TURN_S, max(0.0, min(ends) - self._now())) if ends else TURN_S

    def _tidy(self, now: float) -> None:
        """Close connections that never sent a first message, forget clients that left, accept again after a shortage."""
        for connection in list(self._unknown):
            if now - connection.accepted_at < HELLO_S:
                break
            self._drop(connection)
        for name in [n for n, s in self._sessions.items() if s.connection is None and now - s.left_at > SESSION_S]:
            del self._sessions[name]
        if self._accept_after and now > self._accept_after:
            self._accept_after = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    # -- connections -----------------------------------------------------------------------------------------------

    def _accept(self, now: float) -> None:
        for _ in range(64):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptors left: make room, or accept again later
                if self._unknown:
                    self._drop(next(iter(self._unknown)))
                    continue
                self._selector.unregister(self._listener)
                self._accept_after = now + TURN_S
                return
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                with suppress(OSError):  # already reset
                    set_tcp_options(sock)
            connection = StoreConnection(sock, now)
            self._connections.add(connection)
            self._unknown[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)
            if len(self._unknown) > MAX_UNKNOWN:
                self._drop(next(iter(self._unknown)))

    def _drop(self, connection: StoreConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._connections.discard(connection)
        self._unknown.pop(connection, None)
        if connection.wait is not None:
            self._forget(connection.wait)
        session = connection.session
        if session is not None and session.connection is connection:
            session.connection, session.left_at = None, self._now()
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _handle(self, connection: StoreConnection, mask: int) -> None:
        if connection.closed:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ:
                chunk = connection.sock.recv(CHUNK)
                if not chunk:
                    self._drop(connection)
                    return
                connection.incoming += chunk
                self._read_messages(connection)
        except BlockingIOError:
            return
        except (OSError, FrameError):
            self._drop(connection)
        except Exception:
            logger.exception("the store failed in a request and closes its connection")
            self._drop(connection)

    def _read_messages(self, connection: StoreConnection) -> None:
        while not connection.closed:
            message = decode(connection.incoming, MAX_HELLO_BYTES if connection.session is None else MAX_BYTES)
            if message is None:
                return
            if connection.session is None:
                self._handshake(connection, message)
            else:
                self._answer(connection, connection.session, message)

    def _handshake(self, connection: StoreConnection, message: list[Any]) -> None:
        """Check the first message of a client and take up its session. Authentication belongs here."""
        if len(message) != 2 or message[0] != PROTOCOL or not isinstance(message[1], str):
            raise FrameError("not a client of this store")
        session = self._sessions.setdefault(message[1], ClientSession())
        if session.connection is not None:
            self._drop(session.connection)
        session.connection, connection.session = connection, session
        self._unknown.pop(connection, None)
        self._send(connection, encode([PROTOCOL, self.identity]))

    def _send(self, connection: StoreConnection, data: bytes) -> None:
        if connection.outgoing:
            connection.outgoing += data
            if len(connection.outgoing) > 2 * MAX_BYTES:
                self._drop(connection)
            return
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        if sent < len(data):
            connection.outgoing += data[sent:]
            self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _flush(self, connection: StoreConnection) -> None:
        sent = connection.sock.send(connection.outgoing[:CHUNK])
        del connection.outgoing[:sent]
        if not connection.outgoing:
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    # -- requests --------------------------------------------------------------------------------------------------

    def _answer(self, connection: StoreConnection, session: ClientSession, message: list[Any]) -> None:
        """Run a request and send its reply. A request with the last number was repeated after a lost connection."""
        number, name, *arguments = message if len(message) > 1 else [*message, ""]
        if type(number) is not int or number < session.number:
            raise FrameError("the number of a request must grow")
        if number == session.number and session.reply:
            self._send(connection, session.reply)
            return
        if connection.wait is not None:
            raise FrameError("a connection must have one request at a time")
        if name in ("watch", "wait"):
            try:
                self._wait(connection, number, name, *arguments)
            except (TypeError, ValueError) as error:
                raise FrameError("a wait must have a time and keys") from error
            return
        self._table.expire(self._now())
        try:
            result = self._operations[name](*arguments)
            reply = encode([number, self._table.revision, result])
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, FrameError) as error:
            reply = encode([number, self._table.revision, None, f"{type(error).__name__}: {error}"[:500]])
        session.number = number
        session.reply = reply if name in REPEATED_FROM_MEMORY else b""
        self._send(connection, reply)
        self._answer_waits()

    def _build_operations(self) -> dict[str, Callable[..., Any]]:
        table = self._table

        def put(key: str, value: str, ttl_s: float | None) -> None:
            table.write(_text(key), _text(value), None if ttl_s is None else self._now() + _seconds(ttl_s))

        def delete(key: str) -> bool:
            exists = table.get(key) is not None
            table.write(_text(key), None)
            return exists

        def compare_and_set(expected: dict[str, str | None], values: dict[str, str | None]) -> dict[str, str | None] | None:
            for value in (*expected.values(), *values.values()):
                _ = value if value is None else _text(value)
            return table.compare_and_set(expected, values)

        return {
            "set": put,
            "get": lambda key: table.get(_text(key)),
            "get_many": lambda keys: table.get_many(_texts(keys)),
            "list": lambda prefix: table.list(_text(prefix)),
            "add": lambda key, amount: table.add(_text(key), _integer(amount)),
            "claim": lambda key, value: table.claim(_text(key), _text(value)),
            "compare_and_set": compare_and_set,
            "delete": delete,
        }

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(
        self, connection: StoreConnection, number: int, name: str, seconds: float, keys: Sequence[str], seen: int | None = None
    ) -> None:
        """Answer later. `watch`: when a key changes after revision `seen`; `wait`: when all keys exist."""
        table, keys = self._table, _texts(keys)
        revision = table.revision if seen is None else seen
        ready = (lambda: table.changed_since(keys, revision)) if name == "watch" else (lambda: table.has_all(keys))
        wait = Wait(connection, number, self._now() + _seconds(seconds), keys, ready)
        if ready():
            self._reply(wait, True)
            return
        connection.wait = wait
        self._waiting.add(wait)
        for key in keys:
            self._waits.setdefault(key, set()).add(wait)

    def _reply(self, wait: Wait, result: bool) -> None:
        session = wait.connection.session
        assert session is not None
        session.number, session.reply = wait.number, b""
        self._send(wait.connection, encode([wait.number, self._table.revision, result]))

    def _forget(self, wait: Wait) -> None:
        wait.connection.wait = None
        self._waiting.discard(wait)
        for key in wait.keys:
            if (others := self._waits.get(key)) is not None:
                others.discard(wait)
                if not others:
                    del self._waits[key]

    def _answer_waits(self) -> None:
        """Answer the waits for the keys that have changed."""
        written = self._table.written
        if not written:
            return
        if self._waits:
            for wait in {wait for key in written for wait in self._waits.get(key, ())}:
                if wait.ready():
                    self._forget(wait)
                    self._reply(wait, True)
        written.clear()

    def _end_waits(self, now: float) -> None:
        for wait in [wait for wait in self._waiting if wait.end <= now]:
            self._forget(wait)
            self._reply(wait, False)


REPEATED_FROM_MEMORY = ("set", "add", "claim", "compare_and_set", "delete")
"""Operations that must not run twice: their last reply is kept. Others run again when they are repeated."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("keys and values must be text")
    return value


def _texts(values: object) -> list[str]:
    if not isinstance(values, list):
        raise TypeError("keys must be a list")
    return [_text(value) for value in values]


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:  # JSON knows NaN and Infinity
        raise ValueError(f"a time must be between 0 and {MAX_SECONDS:.0f} s")
    return float(value)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError("an amount must be an integer")
    return value


def set_tcp_options(sock: socket.socket) -> None:
    """Send at once; give up a connection whose peer has vanished after 10 s, busy or idle."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def serve_store(host: str, port: int = 0) -> EmbeddedStore:
    """Start the store's server in this process, bound to `host` only. With port 0 the system chooses the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            where="bind_address, store_port",
            hint="choose another port with store_port=… (0 lets the system choose), or a bind_address=… of this machine",
        ) from error
    listener.listen(1024)
    return EmbeddedStore(listener)


def serve_store_locally(path: str) -> EmbeddedStore:
    """Start the store's server in this process on a Unix socket of mode 600. The folder must be private (mode 700)."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot create the socket of the store: {error}", where=path, hint="set TMPDIR to a short path on a local disk"
        ) from error
    listener.listen(1024)
    return EmbeddedStore(listener)
