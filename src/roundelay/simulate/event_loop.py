"""Discrete-event simulation: a heap of events, and one greenlet per process that runs until it has to wait.

Exactly one process runs at a time. Events with the same time run in the order in which they were scheduled, so a simulation
is deterministic to the bit. If the heap is empty while a process still waits, the simulation is deadlocked; the error names
what each process waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

import greenlet

from roundelay.errors import RoundelayError

MAX_POLLS = 1000
"""How often processes that poll the store are resumed although no event is left, so that their timeouts can expire."""
POLL_S = 1.0
MASK = (1 << 64) - 1
MAX_LISTED = 8
"""Waiting processes that the message of a deadlock lists."""


class SimulationDeadlock(RoundelayError):
    """All remaining processes wait, and no event is left that could resume one."""


class SimulatedProcess:
    """A process in virtual time: a learner, or its data loader."""

    __slots__ = ("green", "killed", "name", "scheduled", "waits_for")

    def __init__(self, name: str, body: Callable[[], None], hub: greenlet.greenlet) -> None:
        self.name, self.killed, self.scheduled = name, False, False
        self.waits_for: Callable[[], str] | None = None
        self.green = greenlet.greenlet(body, hub)


class EventLoop:
    """The virtual clock and the queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.processes: list[SimulatedProcess] = []
        self.current: SimulatedProcess | None = None
        self._heap: list[tuple[float, int, Callable[..., Any], SimulatedProcess | None]] = []
        self._scheduled = 0
        self._polling: dict[SimulatedProcess, None] = {}
        self._polls = 0
        self._order = 0
        self.running = False

    # -- scheduling ------------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], Any]) -> None:
        """Call `action` at `time`, outside of any process. The action must not wait."""
        self._scheduled += 1
        heappush(self._heap, (time, self._scheduled, action, None))

    def spawn(self, name: str, body: Callable[[], None]) -> SimulatedProcess:
        """Create a process that starts at the current time, after the events that are already due."""
        process = SimulatedProcess(name, body, greenlet.getcurrent() if not self.running else self._hub)
        self.processes.append(process)
        self.wake(process, self.now)
        return process

    def wake(self, process: SimulatedProcess, time: float) -> None:
        """Resume a waiting process at `time`. Does nothing if the process is already scheduled."""
        if process.scheduled:
            return
        process.scheduled = True
        self._scheduled += 1
        heappush(self._heap, (time, self._scheduled, process.green.switch, process))

    # -- called by the running process -----------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Suspend the running process for `seconds`."""
        if seconds > 0.0:
            self.sleep_until(self.now + seconds)

    def sleep_until(self, time: float) -> None:
        """Suspend the running process until `time`."""
        if time <= self.now:
            return
        heap = self._heap
        if not heap or heap[0][0] > time:
            self.now = time  # no event before that: no need to switch
            return
        process = self.current
        assert process is not None, "only a process can sleep"
        process.scheduled = True
        self._scheduled += 1
        heappush(heap, (time, self._scheduled, process.green.switch, process))
        self._hub.switch()
        if process.killed:
            raise greenlet.GreenletExit

    def wait(self, reason: Callable[[], str]) -> None:
        """Suspend the running process until `wake` is called on it. `reason` is called only to describe a deadlock."""
        process = self.current
        assert process is not None, "only a process can wait"
        process.waits_for = reason
        self._hub.switch()
        process.waits_for = None
        if process.killed:
            raise greenlet.GreenletExit

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Mark the running process as polling: inside, it is resumed up to MAX_POLLS times before a deadlock is declared."""
        process = self.current
        assert process is not None
        self._polling[process] = None
        try:
            yield
        finally:
            self._polling.pop(process, None)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until no event is left. Processes must catch their own errors.

        Raises:
            SimulationDeadlock: processes wait and no event can resume them.
        """
        self._hub = greenlet.getcurrent()
        for process in self.processes:
            process.green.parent = self._hub
        self.running = True
        heap = self._heap
        try:
            while True:
                while heap:
                    self.now, number, resume, current = heappop(heap)
                    self.current = current
                    if current is not None:
                        current.scheduled = False
                    self._order = (self._order * 1000003 + hash((self.now, number))) & MASK
                    self.events += 1
                    resume()
                self.current = None
                if not self._poll_again():
                    break
        finally:
            self.running = False
        waiting = [process for process in self.processes if not process.green.dead and not process.killed]
        if waiting:
            raise self._deadlock(waiting)

    def _poll_again(self) -> bool:
        if not self._polling or self._polls >= MAX_POLLS:
            return False
        self._polls += 1
        for process in list(self._polling):
            self.wake(process, self.now + POLL_S)
        return True

    def _deadlock(self, waiting: list[SimulatedProcess]) -> SimulationDeadlock:
        lines = [f"{process.name} waits for {process.waits_for() if process.waits_for else 'nothing'}" for process in waiting]
        more = f"; and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
        for process in waiting:
            self.kill(process)
        return SimulationDeadlock(
            f"deadlock at {self.now:.6g} s of virtual time: {len(waiting)} processes wait and no event is left",
            where="; ".join(lines[:MAX_LISTED]) + more,
            hint="make every learner call the same collectives equally often, also when it has no batch",
        )

    def kill(self, process: SimulatedProcess) -> None:
        """End a process at the point where it waits, by raising GreenletExit in it."""
        if process.killed or process.green.dead:
            process.killed = True
            return
        process.killed = True
        self._polling.pop(process, None)
        before, self.current = self.current, process
        if process.green:  # has started
            hub, self._hub = getattr(self, "_hub", None) or greenlet.getcurrent(), greenlet.getcurrent()
            process.green.parent = greenlet.getcurrent()
            try:
                process.green.throw(greenlet.GreenletExit)
            finally:
                self._hub = hub
        self.current = before

    @property
    def digest(self) -> str:
        """Return a hash of the times and the order of all events."""
        return f"{self._order:016x}"
