"""Polling with a deadline and with knowledge of failed ranks, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

from roundelay.core.contracts import Store

Value = TypeVar("Value")

POLL_S = 0.005


def wait_until(
    predicate: Callable[[], Value],
    timeout_s: float,
    error: Callable[[], BaseException] | None = None,
    *,
    failures: Callable[[], Collection[int]] | None = None,
    awaited: Collection[int] | None = None,
    poll_s: float = POLL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Value:
    """Block until predicate() is true and return its value; an exception of the predicate ends the wait.

    After `timeout_s`, or once a rank of `awaited` is among failures(), raise error(), or return the last value if `error` is
    None. Without `awaited` any failed rank ends the wait. The predicate is called at least once, and once more after a failure
    was seen: what a rank published before it failed counts. `clock` and `sleep` let simulated time replace real time.
    """
    deadline = clock() + timeout_s
    while not (value := predicate()):
        ended = clock() > deadline
        if not ended and failures is not None:
            failed = failures()
            ended = bool(failed) if awaited is None else any(rank in failed for rank in awaited)
            if ended and (value := predicate()):
                return value
        if ended:
            if error is None:
                return value
            raise error()
        sleep(poll_s)
    return value


def store_sleep(store: Store, *keys: str) -> Callable[[float], None]:
    """Return a `sleep` for `wait_until` that polls `keys`: in simulated time it ends when one of them is written."""
    return lambda seconds: store.pause(seconds, *keys)


def role_holder(store: Store, name: str, candidate: int, failed: Callable[[], Collection[int]]) -> int:
    """Return the rank that holds a role of the job; `candidate`, a live rank, gets it if it is free or its holder has failed.

    The n-th holder is the value of the key `name/n`, claimed once, so all callers agree. At most one store call per holder that
    has failed, and one more.
    """
    number = 0
    while True:
        holder = int(store.claim(f"{name}/{number}", str(candidate)))
        if holder == candidate or holder not in failed():
            return holder
        number += 1
