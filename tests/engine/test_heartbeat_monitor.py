"""The learner's heartbeat monitor: metrics, failures as events, and the fence."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.engine.heartbeat import HeartbeatMonitor
from roundelay.errors import DataError, PeerLost
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore


class MemoryEvents:
    """An event log in memory."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def now(self) -> float:
        return 0.0

    def write(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def close(self) -> None: ...


class Steered:
    """A runtime whose periodic calls the test makes."""

    def __init__(self) -> None:
        self.poll = lambda: None

    def start_periodic(self, poll: Any, on_failure: Any, every_s: float) -> Any:
        self.poll = poll
        return lambda: None

    def clock(self) -> float:
        return 0.0


def monitor(store: LocalStore, rank: int) -> tuple[HeartbeatMonitor, MemoryEvents]:
    comm = SimpleNamespace(ranks=[0, 1], silent_peers=list)
    worker: Any = SimpleNamespace(phase="compute", phase_since=0.0, k=3, comm=comm)
    context: Any = SimpleNamespace(rank=rank, size=2, heartbeats=None, stop_heartbeats=lambda: None, runtime=Steered())
    job = SimpleNamespace(store=store, membership=StoreMembership(store))
    events = MemoryEvents()
    return HeartbeatMonitor(worker, job, context, events, lambda: {"steps": 2, "loss": 0.5, "secret": 1}), events


def test_heartbeats_carry_metrics() -> None:
    store = LocalStore()
    (first, _), (second, _) = monitor(store, 0), monitor(store, 1)
    second.heartbeat()
    first.heartbeat()
    assert first.metrics() == [{"rank": 1, "steps": 2, "loss": 0.5}]
    assert json.loads(store.get("heartbeat/0") or "")["latest"] == {"steps": 2, "loss": 0.5}


def test_heartbeats_carry_what_the_dashboard_shows_of_exchanges() -> None:
    first, _ = monitor(store := LocalStore(), 0)
    second, _ = monitor(store, 1)
    second.latest = lambda: {"steps": 2, "exchanges": 3, "longest_gap": 5, "exchange_gaps": {str(n): 1 for n in range(6)}}
    second.heartbeat()
    first.heartbeat()
    assert first.metrics() == [{"rank": 1, "steps": 2, "exchanges": 3, "longest_gap": 5}], "without the whole distribution"


def test_failures_become_events_once() -> None:
    store = LocalStore()
    first, events = monitor(store, 0)
    StoreMembership(store).report(1, "killed")
    for _ in range(3):
        first.heartbeat()
    assert first.failed == {1: "killed"}
    assert events.events == [("lost", {"lost": 1, "why": "killed"})]


def test_a_rank_declared_failed_raises_at_its_next_step() -> None:
    store = LocalStore()
    first, events = monitor(store, 0)
    first.start()
    first.raise_if_fenced()
    StoreMembership(store).report(0, "no heartbeat for 12 s")
    first.heartbeat()
    with pytest.raises(PeerLost, match=r"this rank was declared failed by the other ranks .no heartbeat for 12 s"):
        first.raise_if_fenced()
    assert "watchdog" in [event for event, _ in events.events]


def test_a_job_that_another_rank_has_aborted_ends_at_the_next_step() -> None:
    store = LocalStore()
    (first, _), (second, _) = monitor(store, 0), monitor(store, 1)
    for each in (first, second):
        each.start()
        each.heartbeat()
    second.stop(DataError("the loss must be finite (got nan)", where="rank 1"))
    first.heartbeat()
    with pytest.raises(PeerLost, match=r"another rank stopped the run: the loss must be finite .got nan."):
        first.raise_if_fenced()


def test_leaving_publishes_that_the_rank_has_left_or_its_error() -> None:
    store = LocalStore()
    (first, _), (second, _) = monitor(store, 0), monitor(store, 1)
    for each in (first, second):
        each.start()
        each.heartbeat()
    try:
        raise RuntimeError("of the caller, who handles it by training here")
    except RuntimeError:
        first.stop()
    assert json.loads(store.get("heartbeat/0") or "") == {"left": True}
    second.stop(ValueError("broken"))
    assert StoreMembership(store).failed_ranks() == {1: "ended with ValueError: broken"}
