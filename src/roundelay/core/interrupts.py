"""Interrupts: SIGINT and SIGTERM in the parent, in child processes and in the training loop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from roundelay.errors import Interrupted, RoundelayError


class StopOnSignals:
    """The first SIGINT or SIGTERM asks for a stop at the next step; a second SIGINT stops at once."""

    def __init__(self, flag: threading.Event, say: Callable[[str], None]) -> None:
        self._flag, self._say = flag, say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self._flag.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._flag.set()
        self._say("roundelay: stopping after this step; a checkpoint is being written")

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


_came = threading.Event()
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def was_interrupted() -> bool:
    """Whether an interrupt has come since listening began."""
    return _came.is_set()


def raise_if_interrupted() -> None:
    """Raises what a library may have swallowed."""
    if _came.is_set():
        raise KeyboardInterrupt


@contextmanager
def install_handlers() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt and are written down. Only in the main thread; elsewhere nothing."""

    def hear(number: int, frame: Any) -> None:
        _came.set()
        raise KeyboardInterrupt

    _came.clear()
    with _handled(hear):
        yield


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Runs a command to its exit code; a user's mistake and an interrupt become a sentence."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see run(): from here on an interrupt can be answered
        return int(command() or 0)
    except RoundelayError as error:
        print(f"roundelay: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("roundelay: interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        return 0
    except Exception:
        if not was_interrupted():
            raise
        print("roundelay: interrupted", file=sys.stderr)  # a library made an error of its own out of it
        return Interrupted.exit_code


@contextmanager
def as_interrupted(where: str, again: str) -> Iterator[None]:
    """An interrupt inside, or an error that is its echo, ends in a sentence that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped; what is done is kept", where=where, hint=again) from None
    except Exception:
        if not was_interrupted():
            raise
        raise Interrupted("stopped; what is done is kept", where=where, hint=again) from None


@contextmanager
def block_sigint() -> Iterator[None]:
    """Processes started inside do not hear Ctrl-C, from their first instruction on; one that comes meanwhile is heard after."""
    with _blocked({signal.SIGINT}):
        yield


def run_command(command: Sequence[str]) -> int:
    """Runs a command of ours to its end, its output on standard error; an interrupt is its business, and heard once by it.

    It gets a session of its own: a terminal would send Ctrl-C to it and to us, and the second one means: at once."""
    child: subprocess.Popen[bytes] | None = None
    waiting: list[int] = []

    def forward(number: int, frame: Any) -> None:
        _came.set()
        if child is None:
            waiting.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    with _handled(forward):
        with _blocked(SIGNALS):  # for the child: an interpreter that is still starting answers Ctrl-C with a traceback
            child = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
        for number in waiting:
            child.send_signal(number)
        return child.wait()


@contextmanager
def _blocked(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Inside, these signals wait; a process started inside keeps them waiting until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
