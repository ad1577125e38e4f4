"""Interrupts: SIGINT, SIGTERM and SIGHUP in the parent, in child processes and in the training loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from roundelay.errors import Interrupted, RoundelayError
from roundelay.log.console import print_error

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_interrupted = threading.Event()


class StopOnSignals:
    """Context in which the first SIGINT, SIGTERM or SIGHUP sets `flag` and a second SIGINT raises KeyboardInterrupt.

    Does nothing outside the main thread. `write_line` prints the notice to the user.
    """

    def __init__(self, flag: threading.Event, write_line: Callable[[str], None]) -> None:
        self._flag, self._write_line = flag, write_line
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        self._before = set_handlers(self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self._flag.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._flag.set()
        with suppress(OSError, RuntimeError):  # no reader is left; or the signal has interrupted a write to the same stream
            self._write_line("roundelay: stopping after this step; a checkpoint is being written")

    def __exit__(self, *_: Any) -> None:
        restore_handlers(self._before)


def set_handlers(handler: Callable[[int, Any], None], numbers: Iterable[signal.Signals] = SIGNALS) -> dict[int, Any]:
    """Set the handler of signals and return the previous ones. Does nothing outside the main thread.

    SIGHUP stays ignored if it is: nohup starts processes that way.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number in numbers if number not in ignored}


def restore_handlers(before: Mapping[int, Any]) -> None:
    """Set the handlers that `set_handlers` has returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


def was_interrupted() -> bool:
    """Return whether a signal has arrived since `install_handlers`."""
    return _interrupted.is_set()


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if a signal has arrived, even if a library has swallowed the first exception."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def install_handlers() -> Iterator[None]:
    """Make SIGNALS raise KeyboardInterrupt and remember them. Does nothing outside the main thread."""

    def handle(number: int, frame: Any) -> None:
        _interrupted.set()
        raise KeyboardInterrupt

    _interrupted.clear()
    before = set_handlers(handle)
    try:
        yield
    finally:
        restore_handlers(before)


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; print a RoundelayError or an interrupt as a message without a traceback."""
    try:
        return int(command() or 0)
    except RoundelayError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return Interrupted.exit_code
    except Exception:
        if not was_interrupted():
            raise
        print_error("interrupted")  # a library turned the KeyboardInterrupt into an exception of its own
        return Interrupted.exit_code


@contextmanager
def as_interrupted(where: str, hint: str) -> Iterator[None]:
    """Turn an interrupt, or an exception caused by one, into `Interrupted` with a hint on how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped; completed work is kept", where=where, hint=hint) from None
    except Exception:
        if not was_interrupted():
            raise
        raise Interrupted("stopped; completed work is kept", where=where, hint=hint) from None


@contextmanager
def block_sigint() -> Iterator[None]:
    """Start processes inside this context to make them ignore Ctrl-C from their first instruction on.

    A SIGINT that arrives inside is delivered to this thread on exit.
    """
    with block_signals({signal.SIGINT}):
        yield


@contextmanager
def block_signals(numbers: Iterable[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Block signals for this thread until exit; processes started inside inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def discard_pending_signals(numbers: Sequence[signal.Signals] = SIGNALS) -> None:
    """Drop signals that arrived while they were blocked, then unblock them. For a forked child whose parent got them too."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    for number, handler in before.items():
        signal.signal(number, handler)
