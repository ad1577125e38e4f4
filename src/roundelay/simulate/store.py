"""The job's store in virtual time: a dictionary whose keys wake those who wait for them."""

from __future__ import annotations

from roundelay.simulate.event_loop import EventLoop, SimulatedProcess


class _Pause:
    """One task's wait for any of several keys."""

    __slots__ = ("over", "task")

    def __init__(self, task: SimulatedProcess) -> None:
        self.task, self.over = task, False


class SimulatedStore:
    """Costs no time: the store is never on the path of a vector."""

    def __init__(self, world: EventLoop) -> None:
        self._world = world
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[_Pause]] = {}

    def _written(self, key: str) -> None:
        for pause in self._waiting.pop(key):
            if not pause.over:
                pause.over = True
                self._world.wake(pause.task, self._world.now)

    def set(self, key: str, value: str) -> None:
        self._values[key] = value
        if key in self._waiting:
            self._written(key)

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        value = int(self._values.get(key, "0")) + amount
        self._values[key] = str(value)
        if key in self._waiting:
            self._written(key)
        return value

    def claim(self, key: str, value: str) -> str:
        if key not in self._values:
            self.set(key, value)
        return self._values[key]

    def pause(self, seconds: float, *keys: str) -> None:
        task = self._world.current
        assert task is not None
        pause = _Pause(task)
        for key in keys:
            self._waiting.setdefault(key, []).append(pause)
        with self._world.looking():
            self._world.wait(lambda: f"the store's {', '.join(keys)}")
        pause.over = True
