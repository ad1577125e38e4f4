"""The job's store as a torch.distributed.Store, for the rendezvous of gloo, NCCL and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost
from roundelay.fleet.store import JobStore

WAIT_S = 0.5
"""Time between two calls of `check_members` during a wait."""
PAGE = 64
"""Keys of a rendezvous that are read in one store call; each holds about 60 bytes per rank."""


def _text(value: Any) -> str:
    """Return bytes as text, one character per byte."""
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


class TorchStore(dist.Store):
    """A torch store on a JobStore. Values are bytes, stored as latin-1.

    Keep a reference to it for as long as torch uses it: C++ code does not keep the Python part of the object alive.
    `check_members` is called during waits and may raise to end them.

    With `ranks` it is a store for the rendezvous of one gloo group of this size. gloo asks for the keys PREFIX/0, PREFIX/1, …
    of all ranks one after the other, and each is written once: they are awaited together and read PAGE at a time, so that
    the store calls of a group are linear in its ranks.
    """

    def __init__(
        self, store: JobStore, timeout_s: float, check_members: Callable[[], None] = lambda: None, ranks: int = 0
    ) -> None:
        super().__init__()
        self._store, self._timeout, self._check_members = store, timedelta(seconds=timeout_s), check_members
        self._ranks = ranks
        self._read: dict[str, str] = {}

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, _text(value))

    def get(self, key: str) -> bytes:
        """Return the value; block until the key exists."""
        value = self._read_one(key)
        while value is None:
            self.wait([key])
            value = self._read_one(key)
        return value.encode("latin-1")

    def _read_one(self, key: str) -> str | None:
        if not self._ranks:
            return self._store.get(key)
        if key not in self._read:
            keys = self._from(key)[:PAGE]
            self._read |= {k: value for k, value in self._store.get_many(keys).items() if value is not None}
        return self._read.get(key)

    def _from(self, key: str) -> list[str]:
        """Return this key and those of all higher ranks."""
        prefix, slash, rank = key.rpartition("/")
        if not (self._ranks and slash and rank.isdigit()):
            return [key]
        return [f"{prefix}/{r}" for r in range(int(rank), max(self._ranks, int(rank) + 1))]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._store.get_many(list(keys)).values()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist. Raises PeerLost after the time-out."""
        keys = [k for key in keys if key not in self._read for k in self._from(key)]
        if not keys:
            return
        seconds = (timeout or self._timeout).total_seconds()

        def all_exist() -> bool:
            if self._store.wait(min(seconds, WAIT_S), *keys):
                return True
            self._check_members()
            return False

        def error() -> PeerLost:
            return PeerLost(
                f"the other ranks did not set '{keys[0]}' in the store within {seconds:.0f} s",
                where="creation of a process group",
                hint="look at the logs of the other ranks; raise timeout_s if they start slowly",
            )

        wait_until(all_exist, seconds, error, sleep=lambda _: None)  # the store's `wait` blocks

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set the key if it has the expected value; an empty expected value also matches a missing key. Return its value."""
        old, new = _text(expected), _text(desired)
        if old == "":
            current: str | None = self._store.claim(key, new)
            if current != "":
                return (current or "").encode("latin-1")
        result = self._store.compare_and_set({key: old}, {key: new})
        current = new if result is None else result[key]
        return (old if current is None else current).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return self._store.delete(key)

    def num_keys(self) -> int:
        return len(self._store.list(""))

    # the names by which C++ calls these methods
    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        return False
