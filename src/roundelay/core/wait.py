"""Polling with a deadline, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

POLL_S = 0.005


def wait_until(
    predicate: Callable[[], Value],
    timeout_s: float,
    error: Callable[[], BaseException] | None = None,
    *,
    poll_s: float = POLL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Value:
    """Block until predicate() is true and return its value; an exception of the predicate ends the wait.

    After `timeout_s` raise error(), or return the last value if `error` is None. The predicate is called at least once.
    `clock` and `sleep` let simulated time replace real time.
    """
    deadline = clock() + timeout_s
    while not (value := predicate()):
        if clock() > deadline:
            if error is None:
                return value
            raise error()
        sleep(poll_s)
    return value
