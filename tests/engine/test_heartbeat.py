"""Who is taken for dead: a silent learner, but not one that looks silent because the watcher itself was asleep."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.engine import heartbeat
from roundelay.engine.heartbeat import HeartbeatMonitor
from roundelay.fleet.store import LocalStore
from roundelay.metrics.events import EventLog


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[HeartbeatMonitor, list[float], dict[int, str]]:
    """Rank 0 of two, its clock, and whom it has reported."""
    now, reported = [0.0], dict[int, str]()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    membership = SimpleNamespace(report=lambda rank, why: reported.setdefault(rank, why), dead=dict)
    worker: Any = SimpleNamespace(phase="compute", phase_since=0.0, k=3)
    context: Any = SimpleNamespace(rank=0, size=2)
    dog = HeartbeatMonitor(
        worker,
        SimpleNamespace(store=LocalStore(), membership=membership),
        context,
        EventLog(None, 0),
        60.0,
        lambda: {"steps": 2},
    )
    dog.job.store.set("beat/1", json.dumps({"phase": "comm", "step": 3, "beat": 1.0, "last": {"steps": 7}}))
    dog.beat()
    return dog, now, reported


def test_a_learner_without_a_sign_of_life_is_reported(watched: tuple[HeartbeatMonitor, list[float], dict[int, str]]) -> None:
    dog, now, reported = watched
    while now[0] < heartbeat.LOST_S + 1:
        assert not reported or now[0] > heartbeat.LOST_S
        now[0] += heartbeat.HEARTBEAT_S
        dog.beat()
    assert "comm in step 3" in reported[1]


def test_who_was_asleep_reports_nobody(watched: tuple[HeartbeatMonitor, list[float], dict[int, str]]) -> None:
    dog, now, reported = watched
    now[0] += 3600.0
    dog.beat()
    assert reported == {}


def test_figures_come_with_signs_of_life(watched: tuple[HeartbeatMonitor, list[float], dict[int, str]]) -> None:
    dog, _, _ = watched
    assert dog.metrics() == [{"rank": 1, "steps": 7}]
    assert json.loads(dog.job.store.get("beat/0"))["last"] == {"steps": 2}
