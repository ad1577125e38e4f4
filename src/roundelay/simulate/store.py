"""The job's key-value store in virtual time: a dictionary whose writes wake waiting processes."""

from __future__ import annotations

from roundelay.simulate.event_loop import EventLoop, SimulatedProcess


class _KeyWait:
    """The wait of one process for any of several keys."""

    __slots__ = ("over", "process")

    def __init__(self, process: SimulatedProcess) -> None:
        self.process, self.over = process, False


class SimulatedStore:
    """A Store whose operations cost no virtual time: no vector passes through it."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[_KeyWait]] = {}

    def _wake_waiting(self, key: str) -> None:
        for wait in self._waiting.pop(key):
            if not wait.over:
                wait.over = True
                self._loop.wake(wait.process, self._loop.now)

    def set(self, key: str, value: str) -> None:
        self._values[key] = value
        if key in self._waiting:
            self._wake_waiting(key)

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        value = int(self._values.get(key, "0")) + amount
        self._values[key] = str(value)
        if key in self._waiting:
            self._wake_waiting(key)
        return value

    def claim(self, key: str, value: str) -> str:
        if key not in self._values:
            self.set(key, value)
        return self._values[key]

    def pause(self, seconds: float, *keys: str) -> None:
        """Suspend the running process until one of the keys is written; `seconds` is ignored."""
        process = self._loop.current
        assert process is not None
        wait = _KeyWait(process)
        for key in keys:
            self._waiting.setdefault(key, []).append(wait)
        with self._loop.polling():
            self._loop.wait(lambda: f"store key {', '.join(keys)}")
        wait.over = True
