"""The job's key-value store for coordination: counters, notes, failures. No vector passes through it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost, UsageError

SERVER_TIMEOUT = timedelta(seconds=60)


class LocalStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> str | None:
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            value = int(self._values.get(key, "0")) + amount
            self._values[key] = str(value)
            return value

    def claim(self, key: str, value: str) -> str:
        with self._lock:
            return self._values.setdefault(key, value)

    def pause(self, seconds: float, *keys: str) -> None:
        time.sleep(seconds)


class JobStore:
    """A store for processes, on torch's TCPStore. All methods raise PeerLost if the server is gone."""

    def __init__(self, tcp: TCPStore, prefix: str = "") -> None:
        self.tcp, self.prefix = tcp, prefix

    def set(self, key: str, value: str) -> None:
        with lost_server_as_peer_lost():
            self.tcp.set(self.prefix + key, value)

    def get(self, key: str) -> str | None:
        key = self.prefix + key
        with lost_server_as_peer_lost():
            return self.tcp.get(key).decode() if self.tcp.check([key]) else None

    def add(self, key: str, amount: int) -> int:
        with lost_server_as_peer_lost():
            return self.tcp.add(self.prefix + key, amount)

    def claim(self, key: str, value: str) -> str:
        with lost_server_as_peer_lost():
            # compare_set with an empty expected value sets a missing key and returns the current value
            return self.tcp.compare_set(self.prefix + key, "", value).decode()

    def pause(self, seconds: float, *keys: str) -> None:
        time.sleep(seconds)

    def under(self, prefix: str) -> JobStore:
        """Return the same store with a longer prefix, for one of several jobs on one server."""
        return JobStore(self.tcp, self.prefix + prefix)


@contextmanager
def lost_server_as_peer_lost() -> Iterator[None]:
    """Turn connection errors of the TCPStore into PeerLost: the process that serves the store has ended."""
    try:
        yield
    except DistError as error:
        raise PeerLost(
            "the job's store no longer answers",
            where=str(error).splitlines()[0],
            hint="the process that started the job has ended; start again with resume=auto",
        ) from error


def wait_for_key(store: Store, key: str, timeout_s: float, rank: int, accept: Callable[[str], bool] = bool) -> str:
    """Block until the key has a value that `accept` accepts, and return it. Raises PeerLost after `timeout_s`."""

    def value() -> str | None:
        text = store.get(key)
        return text if text is not None and accept(text) else None

    text = wait_until(
        value,
        timeout_s,
        lambda: PeerLost(
            f"the other ranks did not set '{key}' in the store within {timeout_s:.0f} s",
            where=f"rank {rank}",
            hint="look at the logs of the other ranks; raise timeout_s if they start slowly",
        ),
    )
    assert text is not None
    return text


def serve_store(host: str, port: int = 0) -> TCPStore:
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
    port = listener.getsockname()[1]
    # torch binds all interfaces by default; passing a bound socket is the only way to bind one
    return TCPStore(
        host, port, None, is_master=True, wait_for_workers=False, timeout=SERVER_TIMEOUT, master_listen_fd=listener.detach()
    )


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store at host:port. Raises PeerLost after `timeout_s`."""
    try:
        return TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(
            f"the job's store at {host}:{port} does not answer",
            where="MASTER_ADDR, MASTER_PORT",
            hint="check that the process of the first machine runs, and that the address and port are reachable from here",
        ) from error
