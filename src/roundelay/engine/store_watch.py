"""Keys of the job's store that a training loop waits for, read without a store call in the loop's thread."""

from __future__ import annotations

import threading
from collections.abc import Collection

from roundelay.core.contracts import Store
from roundelay.errors import RoundelayError
from roundelay.fleet.store import JobStore

LONGEST_S = 0.5
"""Longest time until the thread asks for keys that were added while it waited for others."""


class StoreWatch:
    """Tells which keys have been set. For one thread; the keys must not change once they are set.

    A store in another process is read by a background thread, which runs only while keys are missing. Its calls return as soon
    as one of the keys is set, so it makes few of them. A store in this process is read directly: that is cheap, and
    deterministic in simulated time.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._remote = isinstance(store, JobStore)
        self._lock = threading.Lock()
        self._missing: set[str] = set()
        self._values: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._error: RoundelayError | None = None
        self._closed = False

    def read(self, keys: Collection[str], *, now: bool = False) -> dict[str, str]:
        """Return those of `keys` that are known to be set. Does not block, unless `now` demands one call to the store.

        Each value is returned once. Raises PeerLost if the store is lost.
        """
        if not keys:
            return {}
        if now or not self._remote:
            values = {key: value for key, value in self.store.get_many(sorted(keys)).items() if value is not None}
            self._forget(values)
            return values
        with self._lock:
            if self._error is not None:
                raise self._error
            values = {key: self._values.pop(key) for key in keys if key in self._values}
            self._missing.update(key for key in keys if key not in values)
            if self._missing and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
                self._thread.start()
        return values

    def _forget(self, keys: Collection[str]) -> None:
        with self._lock:
            self._missing.difference_update(keys)
            for key in keys:
                self._values.pop(key, None)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(2 * LONGEST_S)

    def _run(self) -> None:
        """Read the missing keys until none is missing."""
        try:
            while keys := self._next():
                values = {key: value for key, value in self.store.get_many(keys).items() if value is not None}
                with self._lock:
                    self._values.update({key: value for key, value in values.items() if key in self._missing})
                    self._missing.difference_update(values)
                if not values:
                    self.store.pause(LONGEST_S, *keys)
        except RoundelayError as error:  # raised by `read`
            with self._lock:
                self._error, self._thread = error, None

    def _next(self) -> list[str]:
        with self._lock:
            if self._closed or not self._missing:
                self._thread = None
                return []
            return sorted(self._missing)
