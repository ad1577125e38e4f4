"""Being asked to stop, by a key or by a scheduler."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any


class StopOnSignals:
    """The first SIGINT or SIGTERM asks for a stop at the next step; a second SIGINT stops at once."""

    def __init__(self, flag: threading.Event) -> None:
        self._flag = flag
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self._flag.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._flag.set()
        print("roundelay: stopping after this step; a checkpoint is being written", file=sys.stderr, flush=True)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
