"""The contents of a store: keys, values, times to live and revisions. No socket, thread or clock.

The threads of one process (LocalStore) and the server of a job (EmbeddedStore) share it. The caller passes the time and
holds the lock, if there is one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

KEPT_DELETIONS = 10_000
"""Deleted keys whose last change is remembered."""


class Table:
    """Keys with values. Every write of a key, its deletion and its expiry count as a change and raise `revision`."""

    def __init__(self) -> None:
        self.revision = 0
        self.written: set[str] = set()
        """Keys changed since the owner last cleared this set."""
        self._values: dict[str, str] = {}
        self._sorted: list[str] = []
        self._changed: dict[str, int] = {}
        self._deleted: dict[str, None] = {}
        """The deleted keys in `_changed`, in the order of their deletion."""
        self._forgotten = 0
        """Revision up to which deletions are forgotten."""
        self._expiry: dict[str, float] = {}
        self._ends: list[tuple[float, str]] = []

    # -- time to live ----------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Delete the keys whose time to live is over. Call it before every other method."""
        while self._ends and self._ends[0][0] <= now:
            end, key = heapq.heappop(self._ends)
            if self._expiry.get(key) == end:
                self.write(key, None)

    def next_expiry(self) -> float | None:
        """Return the time of the next possible expiry."""
        return self._ends[0][0] if self._ends else None

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, str | None]:
        return {key: self._values.get(key) for key in keys}

    def list(self, prefix: str) -> dict[str, str]:
        start = bisect_left(self._sorted, prefix)
        stop = start
        while stop < len(self._sorted) and self._sorted[stop].startswith(prefix):
            stop += 1
        return {key: self._values[key] for key in self._sorted[start:stop]}

    def has_all(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def changed_since(self, keys: Iterable[str], revision: int) -> bool:
        """Return whether one of the keys has changed after `revision`.

        Also true if a key that does not exist may have been deleted after it, and that is forgotten: the caller reads it again.
        """
        return any(self._changed.get(key, self._forgotten) > revision for key in keys)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, key: str, value: str | None, end: float | None = None) -> None:
        """Set a key, or delete it if the value is None. `end`: the time at which it expires."""
        self._expiry.pop(key, None)
        if value is None:
            if self._values.pop(key, None) is None:
                return
            del self._sorted[bisect_left(self._sorted, key)]
        else:
            if key not in self._values:
                insort(self._sorted, key)
            self._values[key] = value
            if end is not None:
                self._expiry[key] = end
                heapq.heappush(self._ends, (end, key))
        self._count_change(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and keep its expiry. Raises ValueError if the value is not a number."""
        total = int(self._values.get(key, "0")) + amount
        if key in self._values:
            self._values[key] = str(total)
            self._count_change(key)
        else:
            self.write(key, str(total))
        return total

    def claim(self, key: str, value: str) -> str:
        if key not in self._values:
            self.write(key, value)
        return self._values[key]

    def compare_and_set(
        self, expected: Mapping[str, str | None], values: Mapping[str, str | None]
    ) -> dict[str, str | None] | None:
        current = self.get_many(expected)
        if current != dict(expected):
            return current
        for key, value in values.items():
            self.write(key, value)
        return None

    def _count_change(self, key: str) -> None:
        self.revision += 1
        self._changed[key] = self.revision
        self.written.add(key)
        self._deleted.pop(key, None)
        if key not in self._values:
            self._deleted[key] = None
            if len(self._deleted) > KEPT_DELETIONS:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest]
                self._forgotten = self._changed.pop(oldest)
