"""Who is taken for lost: a rank that is silent while the watchdog looks, not one that was only unobserved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roundelay.core.events import EventLog
from roundelay.train import watchdog
from roundelay.train.watchdog import LOST_S, Watchdog
from roundelay.wire.group import Roll
from roundelay.wire.store import LocalStore


class Clock:
    """Time that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def pair_of_dogs() -> tuple[list[Watchdog], Roll]:
    store = LocalStore()
    roll = Roll(store)
    worker = SimpleNamespace(phase="compute", k=3, phase_since=100.0)
    job = SimpleNamespace(store=store, roll=roll)
    places = [SimpleNamespace(rank=rank, size=2) for rank in range(2)]
    return [Watchdog(worker, job, place, EventLog(None, place.rank), 60.0) for place in places], roll  # type: ignore[arg-type]


def test_a_silent_rank_is_lost(clock: Clock) -> None:
    (first, second), roll = pair_of_dogs()
    second.beat()
    while clock.now < 100 + LOST_S + 1:
        first.beat()
        clock.now += 0.5
    assert list(roll.dead()) == [1]
    assert f"no sign of life for {LOST_S:.0f} s" in roll.dead()[1]


def test_learners_that_were_all_held_up_do_not_take_each_other_for_lost(clock: Clock) -> None:
    (first, second), roll = pair_of_dogs()
    for _ in range(3):
        for dog in (first, second):
            dog.beat()
        clock.now += 0.5
    clock.now += 10 * LOST_S  # the machine stood still; the first to wake sees only old signs
    first.beat()
    second.beat()
    assert not roll.dead()
    for _ in range(20):  # but a rank that stays silent from then on is lost, as before
        clock.now += 0.5
        first.beat()
    assert list(roll.dead()) == [1]
