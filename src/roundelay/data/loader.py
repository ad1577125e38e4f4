"""Prefetching loader: leases and prepares the next batches in background threads while the current one trains.

One thread iterates over the leases, in order and at most `depth` ahead. `workers` threads prepare them, and the items come out
in the order of the leases. The depth starts at `min_depth`. It grows when the learner had to wait, up to `max_depth`, and
shrinks after a long time without waiting, so that a slow learner does not hold leases that faster ranks could use. Memory is
bounded by `max_depth` batches.

An error in the background is raised where its item would have come out; file system errors are retried first. If all threads
have exited unexpectedly, the loader raises instead of blocking forever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from roundelay.errors import DataError, RoundelayError

Lease = TypeVar("Lease")

MIN_DEPTH, MAX_DEPTH = 2, 8
WAIT_FRACTION = 0.01
"""Waiting counts if it takes at least this fraction of the time since the previous item."""
SHRINK_AFTER = 256
"""Items without waiting after which the depth shrinks by one."""
TRIES, RETRY_S = 3, 0.2
JOIN_S = 2.0
CHECK_S = 1.0
"""Seconds between two checks whether the threads are alive."""


class _Item(Generic[Lease]):
    def __init__(self, lease: Lease) -> None:
        self.lease, self.leased_at = lease, time.perf_counter()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False


class PrefetchLoader(Generic[Lease]):
    """Iterate over (lease, prepare(lease)). With workers=0, prepare in the calling thread.

    waited_s    seconds spent waiting for items that were leased but not ready
    last_s      the same for the latest item
    """

    def __init__(
        self,
        leases: Iterable[Lease],
        prepare: Callable[[Lease], Any],
        *,
        workers: int = 1,
        min_depth: int = MIN_DEPTH,
        max_depth: int = MAX_DEPTH,
    ) -> None:
        self._leases, self._prepare, self._workers = leases, prepare, workers
        self._min_depth, self._max_depth = min(min_depth, max_depth), max_depth
        self.depth = self._min_depth
        self.waited_s = self.last_s = 0.0
        self._items: deque[_Item[Lease]] = deque()
        self._unprepared: deque[_Item[Lease]] = deque()
        self._change = threading.Condition()
        self._stopped = self._ended = False
        self._failure: BaseException | None = None
        self._without_wait = 0
        self._threads: list[threading.Thread] = []

    # -- background threads ----------------------------------------------------------------------------------------

    def _lease_all(self) -> None:
        try:
            leases = iter(self._leases)
            while self._wait_for_room():
                try:
                    item = _Item(next(leases))
                except StopIteration:
                    break
                with self._change:
                    self._items.append(item)
                    self._unprepared.append(item)
                    self._change.notify_all()
        except BaseException as error:  # raised in the learner's thread
            self._failure = error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _wait_for_room(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._stopped or len(self._items) < self.depth)
            return not self._stopped

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stopped or self._unprepared or self._ended)
                if self._stopped or not self._unprepared:
                    return
                item = self._unprepared.popleft()
            try:
                item.result = self._prepare_with_retries(item.lease)
            except BaseException as error:
                item.error = error
            with self._change:
                item.done = True
                self._change.notify_all()

    def _prepare_with_retries(self, lease: Lease) -> Any:
        """Call prepare, and retry file system errors: those of network file systems are often temporary."""
        for retries in reversed(range(TRIES)):
            try:
                return self._prepare(lease)
            except OSError as error:
                if not retries or self._stopped:
                    raise DataError(
                        f"reading training data failed {TRIES} times: {error.strerror or error}",
                        where=str(error.filename or lease),
                        hint="check the disk or its network; continue from the last checkpoint with resume=auto",
                    ) from error
                time.sleep(RETRY_S)
        raise AssertionError("unreachable")

    # -- learner's thread -----------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[tuple[Lease, Any], None, None]:
        if self._workers == 0:
            yield from self._without_threads()
            return
        self._threads = [threading.Thread(target=self._lease_all, name="leases", daemon=True)]
        self._threads += [threading.Thread(target=self._work, name=f"loader-{n}", daemon=True) for n in range(self._workers)]
        for thread in self._threads:
            thread.start()
        yielded_at = time.perf_counter()
        try:
            while (item := self._next(yielded_at)) is not None:
                if item.error is not None:
                    raise item.error
                yielded_at = time.perf_counter()
                yield item.lease, item.result
                item.result = None
            if self._failure is not None:
                raise self._failure
        finally:
            self.close()

    def _without_threads(self) -> Iterator[tuple[Lease, Any]]:
        for lease in self._leases:
            began = time.perf_counter()
            result = self._prepare_with_retries(lease)
            self.last_s = time.perf_counter() - began
            self.waited_s += self.last_s
            yield lease, result

    def _next(self, yielded_at: float) -> _Item[Lease] | None:
        """Wait for the next item; return None at the end."""
        began = time.perf_counter()
        with self._change:
            while not (self._items and self._items[0].done):
                if self._ended and not self._items:
                    self.last_s = 0.0
                    return None
                self._check_alive()
                self._change.wait(CHECK_S)
            item = self._items.popleft()
            now = time.perf_counter()
            # waiting for a lease does not count: it may depend on other ranks
            self.last_s = max(0.0, now - max(began, item.leased_at)) if now - began > 1e-4 else 0.0
            self.waited_s += self.last_s
            self._adapt(self.last_s, now - yielded_at)
            self._change.notify_all()
        return item

    def _adapt(self, waited: float, elapsed: float) -> None:
        if waited > WAIT_FRACTION * elapsed:
            self.depth, self._without_wait = min(self.depth + 1, self._max_depth), 0
            return
        self._without_wait += 1
        if self._without_wait >= SHRINK_AFTER and self.depth > self._min_depth:
            self.depth, self._without_wait = self.depth - 1, 0

    def _check_alive(self) -> None:
        waiting = bool(self._items)
        threads = self._threads[1:] if waiting else self._threads[:1]
        if not any(thread.is_alive() for thread in threads) and not (self._ended and not waiting):
            raise RoundelayError(
                "all data-loader threads exited unexpectedly",
                where=f"{len(self._items)} items were leased",
                hint="continue from the last checkpoint with resume=auto",
            )

    def close(self) -> None:
        """Stop and join the threads: one that runs while the interpreter exits would abort the process."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)
        close = getattr(self._prepare, "close", None)
        if close is not None:
            close()
