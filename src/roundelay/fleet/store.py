"""The job's store: a few bytes everybody can read. Counters, notes, membership-calls, deaths; never a vector."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from roundelay.errors import PeerLost, UsageError

LONG = timedelta(seconds=60)


class LocalStore:
    """A store for threads of one process."""

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
    """A store for processes, on torch's TCPStore. Nothing here blocks: a missing key is None."""

    def __init__(self, tcp: TCPStore, prefix: str = "") -> None:
        self.tcp, self.prefix = tcp, prefix

    def set(self, key: str, value: str) -> None:
        with answered():
            self.tcp.set(self.prefix + key, value)

    def get(self, key: str) -> str | None:
        key = self.prefix + key
        with answered():
            return self.tcp.get(key).decode() if self.tcp.check([key]) else None

    def add(self, key: str, amount: int) -> int:
        with answered():
            return self.tcp.add(self.prefix + key, amount)

    def claim(self, key: str, value: str) -> str:
        with answered():
            # compare_set with an empty expectation sets a missing key and returns what stands
            return self.tcp.compare_set(self.prefix + key, "", value).decode()

    def pause(self, seconds: float, *keys: str) -> None:
        time.sleep(seconds)

    def under(self, prefix: str) -> JobStore:
        """The same store, seen through a prefix: one job of several on one server."""
        return JobStore(self.tcp, self.prefix + prefix)


@contextmanager
def answered() -> Iterator[None]:
    """A store that no longer answers means that the process that served it is gone, and the job with it."""
    try:
        yield
    except DistError as error:
        raise PeerLost(
            "the job's store no longer answers",
            where=str(error).splitlines()[0],
            hint="the process that started the job has ended; start again with resume=auto",
        ) from error


def serve_store(host: str, port: int = 0) -> TCPStore:
    """Starts the store's server in this process, bound to `host` alone; port 0 lets the system choose."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            where="host, port",
            hint="choose another port=… (0 lets the system choose), or a host=… that is an address of this machine",
        ) from error
    listener.listen(1024)
    port = listener.getsockname()[1]
    # torch binds every interface by itself; handing over a bound socket is the way to bind one
    return TCPStore(host, port, None, is_master=True, wait_for_workers=False, timeout=LONG, master_listen_fd=listener.detach())


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store at host:port."""
    try:
        return TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(
            f"the job's store at {host}:{port} does not answer",
            where="MASTER_ADDR, MASTER_PORT",
            hint="check that the first machine's process runs, and that the address and port are open from here",
        ) from error
