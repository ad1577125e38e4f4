"""The job's key-value store in virtual time: a dictionary whose writes wake waiting processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

    def set(self, key: str, value: str, ttl_s: float | None = None) -> None:
        """Set a key. A time to live is ignored: in virtual time failures are injected, not detected."""
        self._values[key] = value
        if key in self._waiting:
            self._wake_waiting(key)

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, str | None]:
        return {key: self._values.get(key) for key in keys}

    def list(self, prefix: str) -> dict[str, str]:
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def compare_and_set(
        self, expected: Mapping[str, str | None], values: Mapping[str, str | None]
    ) -> dict[str, str | None] | None:
        current = self.get_many(list(expected))
        if current != dict(expected):
            return current
        for key, value in values.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self.set(key, value)
        return None

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
