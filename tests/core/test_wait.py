"""Polling with a deadline."""

from __future__ import annotations

import pytest

from roundelay.core.wait import wait_until


class Clock:
    """Virtual seconds that pass only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_first_true_value_is_returned() -> None:
    clock = Clock()
    value = wait_until(lambda: clock.now >= 0.5 and f"at {clock.now}", 1.0, poll_s=0.25, clock=clock, sleep=clock.sleep)
    assert value == "at 0.5"


def test_a_value_that_is_ready_needs_no_time() -> None:
    assert wait_until(lambda: 7, 0.0, lambda: TimeoutError("too late")) == 7


def test_the_error_is_raised_after_the_deadline_only() -> None:
    clock = Clock()
    with pytest.raises(TimeoutError, match=r"after 1\.25"):
        wait_until(lambda: False, 1.0, lambda: TimeoutError(f"after {clock.now}"), poll_s=0.25, clock=clock, sleep=clock.sleep)


def test_without_an_error_the_last_value_is_returned() -> None:
    clock = Clock()
    assert wait_until(lambda: None, 1.0, clock=clock, sleep=clock.sleep) is None
    assert 1.0 <= clock.now < 1.1


def test_an_exception_of_the_predicate_ends_the_wait() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 / 0, 60.0)
