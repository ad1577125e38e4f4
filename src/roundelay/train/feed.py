"""The next piece of work, claimed and prepared while the current one is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

END = object()
T = TypeVar("T")


class Feed(Generic[T]):
    """Runs through items in a thread of its own, one ahead: neither the store nor the disk is waited for twice."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._ahead: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def _run(self) -> None:
        try:
            for item in self._items:
                self._put(item)
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

    def __iter__(self) -> Iterator[T]:
        self._thread.start()
        try:
            while (item := self._ahead.get()) is not END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._stop.set()
