"""Signals of the launcher: what it forwards to the learners, how it suspends the whole job, and what its end does to them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from roundelay.core.interrupts import SIGNALS, restore_handlers, set_handlers
from roundelay.errors import PeerLost
from roundelay.log.console import print_error

PR_SET_PDEATHSIG = 1
EXIT_S = 5.0
"""Time in which a learner without its parent can write what went wrong."""


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


def exit_after_parent(alive: int) -> None:
    """End this process at most EXIT_S after its parent, whatever it is doing. Only the parent holds the other end of `alive`.

    Without its parent a learner has no store and ends by itself, but not before a collective that it waits in has timed out.
    """

    def watch() -> None:
        os.read(alive, 1)  # returns when the write end is closed
        time.sleep(EXIT_S)
        print_error("the process that started the learners has ended; start again with resume=auto")
        os._exit(PeerLost.exit_code)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def continue_after_parent() -> None:
    """Make the system send SIGCONT to this process when its parent ends: a suspended learner finds the store lost and exits."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT))
