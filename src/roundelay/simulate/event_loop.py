"""Virtual time: a heap of events, and one greenlet per learner that runs until it has to wait.

Exactly one thing runs at a time, events at the same moment in the order in which they were planned: a run is repeatable to
the bit. When the heap is empty and somebody still waits, nobody will ever come: that is a deadlock, and it is reported at
once, with what each of them waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

import greenlet

from roundelay.errors import RoundelayError

MAX_POLLS = 1000
"""How often those who look at the store are let look again when nothing else happens: their time limits must run out."""
POLL_S = 1.0
MASK = (1 << 64) - 1


class SimulationDeadlock(RoundelayError):
    """Everybody who is left waits for somebody who will not come."""


class SimulatedProcess:
    """Something that runs in virtual time: a learner, or its loader."""

    __slots__ = ("dead", "green", "name", "scheduled", "waits_for")

    def __init__(self, name: str, body: Callable[[], None], hub: greenlet.greenlet) -> None:
        self.name, self.dead, self.scheduled = name, False, False
        self.waits_for: Callable[[], str] | None = None
        self.green = greenlet.greenlet(body, hub)


class EventLoop:
    """The clock and the order of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.tasks: list[SimulatedProcess] = []
        self.current: SimulatedProcess | None = None
        self._heap: list[tuple[float, int, Callable[..., Any], SimulatedProcess | None]] = []
        self._planned = 0
        self._looking: dict[SimulatedProcess, None] = {}
        self._looks = 0
        self._order = 0
        self.running = False

    # -- planning --------------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], Any]) -> None:
        """Something happens then, outside of any task; it must not wait."""
        self._planned += 1
        heappush(self._heap, (time, self._planned, action, None))

    def spawn(self, name: str, body: Callable[[], None]) -> SimulatedProcess:
        """A task that begins now, when its turn comes."""
        task = SimulatedProcess(name, body, greenlet.getcurrent() if not self.running else self._hub)
        self.tasks.append(task)
        self.wake(task, self.now)
        return task

    def wake(self, task: SimulatedProcess, time: float) -> None:
        """A waiting task goes on then; one that is to go on anyway is left alone."""
        if task.scheduled:
            return
        task.scheduled = True
        self._planned += 1
        heappush(self._heap, (time, self._planned, task.green.switch, task))

    # -- for the task that runs --------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """The running task goes on so much later."""
        if seconds > 0.0:
            self.sleep_until(self.now + seconds)

    def sleep_until(self, time: float) -> None:
        if time <= self.now:
            return
        heap = self._heap
        if not heap or heap[0][0] > time:
            self.now = time  # nothing happens before: no need to step aside
            return
        task = self.current
        assert task is not None, "only a task can sleep"
        task.scheduled = True
        self._planned += 1
        heappush(heap, (time, self._planned, task.green.switch, task))
        self._hub.switch()
        if task.dead:
            raise greenlet.GreenletExit

    def wait(self, why: Callable[[], str]) -> None:
        """The running task stops until somebody wakes it; `why` is asked for only where nobody does."""
        task = self.current
        assert task is not None, "only a task can wait"
        task.waits_for = why
        self._hub.switch()
        task.waits_for = None
        if task.dead:
            raise greenlet.GreenletExit

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, the running task waits for news that may have been overtaken: it looks again before this is a deadlock."""
        task = self.current
        assert task is not None
        self._looking[task] = None
        try:
            yield
        finally:
            self._looking.pop(task, None)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until nothing is left to happen. Errors inside tasks are theirs to catch."""
        self._hub = greenlet.getcurrent()
        for begun in self.tasks:
            begun.green.parent = self._hub
        self.running = True
        heap = self._heap
        try:
            while True:
                while heap:
                    self.now, number, go, task = heappop(heap)
                    self.current = task
                    if task is not None:
                        task.scheduled = False
                    self._order = (self._order * 1000003 + hash((self.now, number))) & MASK
                    self.events += 1
                    go()
                self.current = None
                if not self._look_again():
                    break
        finally:
            self.running = False
        stuck = [task for task in self.tasks if not task.green.dead and not task.dead]
        if stuck:
            raise self._deadlock(stuck)

    def _look_again(self) -> bool:
        if not self._looking or self._looks >= MAX_POLLS:
            return False
        self._looks += 1
        for task in list(self._looking):
            self.wake(task, self.now + POLL_S)
        return True

    def _deadlock(self, stuck: list[SimulatedProcess]) -> SimulationDeadlock:
        said = [f"{task.name} waits for {task.waits_for() if task.waits_for else 'nothing'}" for task in stuck]
        more = f"; and {len(said) - 8} more" if len(said) > 8 else ""
        for task in stuck:
            self.kill(task)
        return SimulationDeadlock(
            f"deadlock at {self.now:.6g} s of virtual time: {len(stuck)} wait, and nobody will come",
            where="; ".join(said[:8]) + more,
            hint="make every learner call the same rendezvous equally often, also when it has no batch",
        )

    def kill(self, task: SimulatedProcess) -> None:
        """The task ends where it stands."""
        if task.dead or task.green.dead:
            task.dead = True
            return
        task.dead = True
        self._looking.pop(task, None)
        before, self.current = self.current, task
        if task.green:  # has begun
            hub, self._hub = getattr(self, "_hub", None) or greenlet.getcurrent(), greenlet.getcurrent()
            task.green.parent = greenlet.getcurrent()
            try:
                task.green.throw(greenlet.GreenletExit)
            finally:
                self._hub = hub
        self.current = before

    @property
    def digest(self) -> str:
        """A fingerprint of what happened when, in which order."""
        return f"{self._order:016x}"
