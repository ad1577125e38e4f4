"""Calls that wait for the job's store or the disk, on a thread of their own, so that a training loop waits for neither."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from roundelay.core.contracts import Store
from roundelay.fleet.store import JobStore


class BackgroundCalls:
    """Runs calls one after the other, in the order of `submit`. For one thread.

    With a store in this process `submit` runs the call at once: that is cheap, and deterministic in simulated time.
    """

    def __init__(self, store: Store) -> None:
        self._executor = ThreadPoolExecutor(1, "background") if isinstance(store, JobStore) else None
        self._pending: deque[Future[object]] = deque()

    def submit(self, call: Callable[..., object], *arguments: object) -> None:
        """Run a call after the earlier ones. Does not block. Raises what an earlier call has raised."""
        if self._executor is None:
            call(*arguments)
            return
        self.raise_if_failed()
        self._pending.append(self._executor.submit(call, *arguments))

    def raise_if_failed(self) -> None:
        """Raise what a call has raised. Does not block."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def wait(self) -> None:
        """Block until all calls are done, and raise what one of them has raised."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Drop the calls that have not begun and block until the one under way is done. Raises nothing."""
        self._pending.clear()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
