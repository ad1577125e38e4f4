"""Signals of the launcher: what it forwards to the learners, and how it suspends the whole job."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from roundelay.core.interrupts import SIGNALS, restore_handlers, set_handlers

PR_SET_PDEATHSIG = 1


class Child(Protocol):
    """The process of a learner: a ForkedProcess or a Popen."""

    returncode: Any

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


def signal_all(children: Sequence[Child], number: int) -> None:
    """Send a signal to all learners that run."""
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


class SignalQueue:
    """Context in which SIGINT, SIGTERM, SIGHUP, SIGTSTP and SIGCONT wait until `forward` is called. For the main thread.

    The handlers only append to a list: one that used the children could run in the middle of a call of the same child.
    """

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._before: dict[int, Any] = {}
        self.stopping = False
        """Whether a signal that ends the job has arrived."""

    def __enter__(self) -> SignalQueue:
        self._before = set_handlers(self._append, (*SIGNALS, signal.SIGTSTP, signal.SIGCONT))
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._before)

    def _append(self, number: int, frame: Any) -> None:
        self._pending.append(number)
        self.stopping = self.stopping or number in SIGNALS

    def forward(self, children: Sequence[Child]) -> None:
        """Send the waiting signals to the learners. After SIGTSTP stop them and this process until SIGCONT.

        The learners have sessions of their own, so that Ctrl-Z does not reach them; the system ignores SIGTSTP for a session
        without a terminal, hence SIGSTOP.
        """
        while self._pending:
            number = self._pending.pop(0)
            if number != signal.SIGTSTP:
                signal_all(children, number)
            elif signal.SIGCONT not in self._pending:
                signal_all(children, signal.SIGSTOP)
                signal.raise_signal(signal.SIGSTOP)  # returns after SIGCONT, which is then in the queue


def continue_after_parent() -> None:
    """Make the system send SIGCONT to this process when its parent ends: a suspended learner finds the store lost and exits."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT))
