"""Polling with a deadline."""

from __future__ import annotations

import pytest

from roundelay.core.wait import role_holder, wait_until
from roundelay.fleet.store import LocalStore


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


def test_the_failure_of_an_awaited_rank_ends_the_wait() -> None:
    clock = Clock()
    with pytest.raises(TimeoutError, match=r"after 0\.5"):
        wait_until(
            lambda: False,
            60.0,
            lambda: TimeoutError(f"after {clock.now}"),
            failures=lambda: {3} if clock.now >= 0.5 else {1},
            awaited=[2, 3],
            poll_s=0.25,
            clock=clock,
            sleep=clock.sleep,
        )


def test_what_a_rank_published_before_it_failed_counts() -> None:
    published: list[str] = []

    def failures() -> set[int]:
        published.append("value")
        return {0}

    assert wait_until(lambda: list(published), 60.0, failures=failures) == ["value"]


def test_a_role_passes_to_a_live_rank_when_its_holder_fails() -> None:
    store, failed = LocalStore(), set[int]()
    assert role_holder(store, "writer", 0, lambda: failed) == 0
    assert role_holder(store, "writer", 1, lambda: failed) == 0
    failed.add(0)
    assert role_holder(store, "writer", 1, lambda: failed) == 1
    assert role_holder(store, "writer", 2, lambda: failed) == 1
    failed.add(1)
    assert role_holder(store, "writer", 2, lambda: failed) == 2
