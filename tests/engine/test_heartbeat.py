"""Heartbeats: a rank without heartbeats is reported, unless the monitor itself was suspended."""

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
def monitored(monkeypatch: pytest.MonkeyPatch) -> tuple[HeartbeatMonitor, list[float], dict[int, str]]:
    """The monitor of rank 0 of two, its clock, and the ranks it has reported."""
    now, reported = [0.0], dict[int, str]()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    membership = SimpleNamespace(report=lambda rank, reason: reported.setdefault(rank, reason), failed_ranks=dict)
    worker: Any = SimpleNamespace(phase="compute", phase_since=0.0, k=3)
    context: Any = SimpleNamespace(rank=0, size=2)
    monitor = HeartbeatMonitor(
        worker,
        SimpleNamespace(store=LocalStore(), membership=membership),
        context,
        EventLog(None, 0),
        60.0,
        lambda: {"steps": 2},
    )
    monitor.job.store.set("heartbeat/1", json.dumps({"phase": "comm", "step": 3, "time": 1.0, "latest": {"steps": 7}}))
    monitor.heartbeat()
    return monitor, now, reported


def test_a_rank_without_heartbeats_is_reported(monitored: tuple[HeartbeatMonitor, list[float], dict[int, str]]) -> None:
    monitor, now, reported = monitored
    while now[0] < heartbeat.LOST_S + 1:
        assert not reported or now[0] > heartbeat.LOST_S
        now[0] += heartbeat.HEARTBEAT_S
        monitor.heartbeat()
    assert "phase comm of step 3" in reported[1]


def test_a_suspended_monitor_reports_no_rank(monitored: tuple[HeartbeatMonitor, list[float], dict[int, str]]) -> None:
    monitor, now, reported = monitored
    now[0] += 3600.0
    monitor.heartbeat()
    assert reported == {}


def test_heartbeats_carry_metrics(monitored: tuple[HeartbeatMonitor, list[float], dict[int, str]]) -> None:
    monitor, _, _ = monitored
    assert monitor.metrics() == [{"rank": 1, "steps": 7}]
    assert json.loads(monitor.job.store.get("heartbeat/0"))["latest"] == {"steps": 2}
