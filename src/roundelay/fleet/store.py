"""The job's key-value store for coordination: counters, notes, failures. No vector passes through it.

`LocalStore` serves the threads of one process. `JobStore` is a client of the embedded store, which serves processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from roundelay.core.contracts import Store
from roundelay.core.wait import store_sleep, wait_until
from roundelay.errors import PeerLost
from roundelay.fleet.embedded_store import EmbeddedStore, serve_store, serve_store_locally
from roundelay.fleet.membership import EXPLAIN_S, FAILURES, StoreMembership
from roundelay.fleet.store_client import StoreClient, connect_store
from roundelay.fleet.table import Table

V = TypeVar("V")

KEY_POLL_S = 0.5
"""Longest time between two looks at a key that the store is watching."""

__all__ = [
    "EmbeddedStore",
    "JobStore",
    "LocalStore",
    "StoreClient",
    "connect_store",
    "serve_store",
    "serve_store_locally",
    "wait_for_key",
]


class LocalStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._table = Table()
        self._condition = threading.Condition()
        self._thread = threading.local()

    @contextmanager
    def _open(self) -> Iterator[Table]:
        """Return the table under the lock, without expired keys; wake waiting threads if it was changed."""
        with self._condition:
            self._table.expire(time.monotonic())
            yield self._table
            self._thread.revision = self._table.revision
            if self._table.written:
                self._table.written.clear()
                self._condition.notify_all()

    def set(self, key: str, value: str, ttl_s: float | None = None) -> None:
        with self._open() as table:
            table.write(key, value, None if ttl_s is None else time.monotonic() + ttl_s)

    def get(self, key: str) -> str | None:
        with self._open() as table:
            return table.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, str | None]:
        with self._open() as table:
            return table.get_many(keys)

    def list(self, prefix: str) -> dict[str, str]:
        with self._open() as table:
            return table.list(prefix)

    def add(self, key: str, amount: int) -> int:
        with self._open() as table:
            return table.add(key, amount)

    def compare_and_set(
        self, expected: Mapping[str, str | None], values: Mapping[str, str | None]
    ) -> dict[str, str | None] | None:
        with self._open() as table:
            return table.compare_and_set(expected, values)

    def claim(self, key: str, value: str) -> str:
        with self._open() as table:
            return table.claim(key, value)

    def pause(self, seconds: float, *keys: str) -> None:
        """Block for `seconds`, or until one of the keys has changed since this thread's last call."""
        if not keys:
            time.sleep(seconds)
            return
        end = time.monotonic() + seconds
        with self._condition:
            seen = getattr(self._thread, "revision", self._table.revision)
            while True:
                now = time.monotonic()
                self._table.expire(now)
                if self._table.changed_since(keys, seen) or now >= end:
                    break
                expiry = self._table.next_expiry()
                self._condition.wait(min(end, expiry or end) - now)
            self._thread.revision = self._table.revision


class JobStore:
    """A store for processes: a client of the embedded store with a prefix. Raises PeerLost if the server is lost.

    All methods are one round trip, but for `pause`, and may be called from any thread.
    """

    def __init__(self, client: StoreClient, prefix: str = "") -> None:
        self.client, self.prefix = client, prefix

    def set(self, key: str, value: str, ttl_s: float | None = None) -> None:
        self.client.call("set", self.prefix + key, value, ttl_s)

    def get(self, key: str) -> str | None:
        value: str | None = self.client.call("get", self.prefix + key)
        return value

    def get_many(self, keys: Sequence[str]) -> dict[str, str | None]:
        return self._without_prefix(self.client.call("get_many", [self.prefix + key for key in keys]))

    def list(self, prefix: str) -> dict[str, str]:
        return self._without_prefix(self.client.call("list", self.prefix + prefix))

    def add(self, key: str, amount: int) -> int:
        return int(self.client.call("add", self.prefix + key, amount))

    def compare_and_set(
        self, expected: Mapping[str, str | None], values: Mapping[str, str | None]
    ) -> dict[str, str | None] | None:
        current = self.client.call("compare_and_set", self._with_prefix(expected), self._with_prefix(values))
        return None if current is None else self._without_prefix(current)

    def claim(self, key: str, value: str) -> str:
        return str(self.client.call("claim", self.prefix + key, value))

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self.client.call("delete", self.prefix + key))

    def pause(self, seconds: float, *keys: str) -> None:
        """Block for `seconds`, or until one of the keys has changed since this thread's last call."""
        if keys:
            self.client.watch(seconds, [self.prefix + key for key in keys])
        else:
            time.sleep(seconds)

    def wait(self, seconds: float, *keys: str) -> bool:
        """Block until all keys exist, at most `seconds`; return whether they do."""
        return self.client.wait(seconds, [self.prefix + key for key in keys])

    def under(self, prefix: str) -> JobStore:
        """Return the same store with a longer prefix, for one of several jobs on one server."""
        return JobStore(self.client, self.prefix + prefix)

    def clone(self) -> JobStore:
        """Return the same store on connections of its own, for example for heartbeats. Close it after use."""
        return JobStore(self.client.clone(), self.prefix)

    def close(self) -> None:
        """Close the connections, which stores made with `under` share. Later calls open new ones."""
        self.client.close()

    @property
    def lost(self) -> bool:
        """Whether the server is known to be lost: every call raises PeerLost at once. No store call."""
        return self.client.lost

    def _with_prefix(self, values: Mapping[str, str | None]) -> dict[str, str | None]:
        return {self.prefix + key: value for key, value in values.items()}

    def _without_prefix(self, values: dict[str, V]) -> dict[str, V]:
        return {key[len(self.prefix) :]: value for key, value in values.items()}


def wait_for_key(
    store: Store,
    key: str,
    timeout_s: float,
    rank: int,
    accept: Callable[[str], bool] = bool,
    *,
    awaited: Collection[int] | None = None,
) -> str:
    """Block until the key has a value that `accept` accepts, and return it. Raises PeerLost after `timeout_s`.

    `awaited`: ranks of the job that must live for the key to be set; the failure of one of them ends the wait at once. Without
    it the wait ends EXPLAIN_S after the first failure of any rank is seen: the failed rank may be one that is not needed.
    """
    membership = StoreMembership(store)
    failed: dict[int, str] = {}
    limit: list[float] = []

    def value() -> str | None:
        texts = store.get_many([key, FAILURES])
        if texts[FAILURES] is not None:
            failed.update(membership.failed_ranks())
            limit[:] = limit or [time.monotonic() + min(EXPLAIN_S, timeout_s)]
        text = texts[key]
        return text if text is not None and accept(text) else None

    def failures() -> Collection[int]:
        return failed if awaited is not None or (limit and time.monotonic() > limit[0]) else ()

    def error() -> PeerLost:
        lost = {r: why for r, why in failed.items() if r != rank and (awaited is None or r in awaited)}
        listed = ", ".join(f"rank {r} ({why})" for r, why in sorted(lost.items()))
        return PeerLost(
            f"{listed} was lost" if lost else f"the other ranks did not set '{key}' in the store within {timeout_s:.0f} s",
            where=f"rank {rank}, waiting for '{key}'" if lost else f"rank {rank}",
            hint="look at the logs of the other ranks; raise timeout_s if they start slowly",
        )

    text = wait_until(
        value,
        timeout_s,
        error,
        failures=failures,
        awaited=awaited,
        poll_s=KEY_POLL_S,
        sleep=store_sleep(store, key, FAILURES),
    )
    assert text is not None
    return text
