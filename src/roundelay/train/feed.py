"""The next piece of work, claimed and prepared while the current one is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from roundelay.train.claims import Claim

END = object()


class Feed:
    """Runs through claims in a thread of its own, one piece ahead: neither the store nor the disk is waited for twice."""

    def __init__(self, claims: Iterable[Claim], prepare: Callable[[Claim], Any]) -> None:
        self._claims, self._prepare = claims, prepare
        self._ahead: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def _run(self) -> None:
        try:
            for claim in self._claims:
                self._put((claim, self._prepare(claim) if claim.stop > claim.start else None))
                if self._stop.is_set():
                    return
            self._put(END)
        except BaseException as error:  # handed to the learner, which raises it
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                self._ahead.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[tuple[Claim, Any]]:
        self._thread.start()
        try:
            while (item := self._ahead.get()) is not END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._stop.set()
