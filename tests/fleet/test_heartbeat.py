"""Heartbeats: expiry in the store declares a failure, and nothing else does."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest

from roundelay.errors import DataError, Interrupted, PeerLost
from roundelay.fleet import store as store_module
from roundelay.fleet.heartbeat import HEARTBEAT_S, READERS, Heartbeats
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore, LocalStore, connect_store, serve_store

TTL = 12.0
MESSAGE = {"phase": "compute", "step": 3}


class Fleet:
    """The heartbeats of several ranks on one store, with a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.now = 100.0
        monkeypatch.setattr(store_module.time, "monotonic", lambda: self.now)
        self.store = LocalStore()
        self.ranks = [Heartbeats(self.store, rank, size, TTL, clock=lambda: self.now) for rank in range(size)]

    def run(self, seconds: float, *ranks: int) -> None:
        """Let time pass; only `ranks` beat meanwhile."""
        for _ in range(round(seconds / HEARTBEAT_S)):
            self.now += HEARTBEAT_S
            for rank in ranks:
                self.ranks[rank].beat(MESSAGE)

    @property
    def failed(self) -> dict[int, str]:
        return StoreMembership(self.store).failed_ranks()


def test_an_expired_heartbeat_declares_its_rank_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 3)
    fleet.run(20, 0, 1, 2)
    fleet.run(TTL - 1, 0, 1)
    assert fleet.failed == {}, "the key has not expired yet"
    fleet.run(2, 0, 1)
    assert list(fleet.failed) == [2]
    assert fleet.failed[2] == "no heartbeat for 12 s; last seen in phase compute of step 3"
    assert fleet.ranks[0].membership.cached == fleet.failed


def test_a_rank_that_never_published_is_not_declared_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 3)
    fleet.run(60, 0, 1)
    assert fleet.failed == {}


def test_a_rank_that_has_left_is_not_declared_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 4)
    fleet.run(20, 0, 1, 2, 3)
    fleet.ranks[1].leave()
    fleet.ranks[2].leave(Interrupted("stopped"))
    fleet.run(60, 0, 1, 2, 3)
    assert fleet.failed == {}


def test_an_interrupt_at_any_moment_is_a_failure_because_other_ranks_may_wait_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, 2)
    fleet.run(20, 0, 1)
    fleet.ranks[1].leave(KeyboardInterrupt())
    fleet.run(HEARTBEAT_S, 0)
    assert fleet.failed == fleet.ranks[0].membership.cached == {1: "interrupted"}
    assert "left" not in (fleet.store.get("heartbeat/1") or "")


def test_bad_data_of_one_rank_ends_the_job_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 3)
    fleet.run(20, 0, 1, 2)
    fleet.ranks[1].leave(DataError("the loss must be finite (got nan)", where="rank 1, step 3"))
    for rank in (0, 2):
        fleet.ranks[rank].raise_if_fenced()  # without a store call: known at the next beat
    fleet.run(HEARTBEAT_S, 0, 2)
    for rank in (0, 2):
        with pytest.raises(PeerLost, match=r"another rank stopped the run: the loss must be finite .got nan.") as caught:
            fleet.ranks[rank].raise_if_fenced()
        assert caught.value.where == f"rank {rank}"


def test_an_error_is_reported_at_once_and_a_lost_peer_by_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 3)
    fleet.run(20, 0, 1, 2)
    fleet.ranks[1].leave(DataError("the loss must be finite"))
    fleet.ranks[2].leave(PeerLost("rank 1 was lost"))
    assert fleet.failed == {1: "ended with DataError: the loss must be finite"}
    fleet.run(TTL + 1, 0)
    assert set(fleet.failed) == {1, 2}


def test_a_suspended_process_declares_no_failures_until_heartbeats_had_time_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, 3)
    fleet.run(20, 0, 1, 2)
    fleet.now += 3600  # the whole machine, or the store's: every key has expired
    fleet.ranks[0].beat(MESSAGE)
    assert fleet.failed == {}
    fleet.run(TTL - 1, 0, 1)
    assert fleet.failed == {}
    fleet.run(2, 0, 1)
    assert list(fleet.failed) == [2], "rank 2 has had one more time to live"


def test_a_silent_store_declares_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 2)
    fleet.run(20, 0, 1)
    listed = fleet.store.list

    def late(prefix: str) -> dict[str, str]:
        fleet.now += 30.0  # the answer takes 30 s, in which keys expire
        return listed(prefix)

    monkeypatch.setattr(fleet.store, "list", late)
    fleet.ranks[0].beat(MESSAGE)
    monkeypatch.setattr(fleet.store, "list", listed)
    fleet.run(TTL - 1, 0, 1)
    assert fleet.failed == {}


def test_errors_of_the_store_are_raised_after_one_time_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 2)
    fleet.run(20, 0, 1)

    def lost(*_: Any) -> Any:
        raise PeerLost("the job's store no longer answers")

    for name in ("list", "set"):
        monkeypatch.setattr(fleet.store, name, lost)
    fleet.run(TTL - 1, 0)
    fleet.ranks[0].raise_if_fenced()
    fleet.run(2, 0)
    with pytest.raises(PeerLost, match="no longer answers"):
        fleet.ranks[0].raise_if_fenced()
    fleet.ranks[0].leave()


def test_a_rank_that_wakes_up_is_fenced_before_it_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 3)
    reasons: list[str] = []
    fleet.ranks[2].on_fenced = reasons.append
    fleet.run(20, 0, 1, 2)
    fleet.ranks[2].raise_if_fenced()
    fleet.run(TTL + 2, 0, 1)
    # the learner's thread wakes up before the heartbeat thread does
    with pytest.raises(PeerLost, match=r"this rank was declared failed by the other ranks .no heartbeat for 12 s") as caught:
        fleet.ranks[2].raise_if_fenced()
    assert caught.value.exit_code == 4
    assert len(reasons) == 1
    fleet.run(5, 0, 1, 2)
    assert "heartbeat/2" not in fleet.store.list("heartbeat/"), "a fenced rank publishes nothing"
    assert len(reasons) == 1


def test_the_heartbeat_thread_finds_the_fence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 2)
    fleet.run(20, 0, 1)
    fleet.ranks[0].membership.report(1, "killed by signal SIGKILL")
    fleet.run(HEARTBEAT_S, 0, 1)
    assert fleet.ranks[1].fenced == "killed by signal SIGKILL"
    assert not fleet.ranks[0].fenced


def counted(call: Any, count: list[int]) -> Any:
    """Wrap a store call: count[0] counts calls, count[1] the values in their answers."""

    def wrapped(*args: Any, **options: Any) -> Any:
        answer = call(*args, **options)
        count[0] += 1
        count[1] += len(answer) if isinstance(answer, dict) else 1
        return answer

    return wrapped


def test_a_beat_makes_a_constant_number_of_store_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    beats, calls = 8, {}
    for size in (2, 32, 128):
        fleet = Fleet(monkeypatch, size)
        count = [0, 0]
        for name in ("set", "get", "get_many", "list", "add", "compare_and_set", "claim"):
            monkeypatch.setattr(fleet.store, name, counted(getattr(fleet.store, name), count))
        fleet.run(beats * HEARTBEAT_S, *range(size))
        calls[size] = count[0] / beats / size
        assert calls[size] <= 3
        assert count[1] <= beats * size * (2 + READERS + 1), "values read are linear in the ranks, too"
    assert calls[128] <= calls[2]


def test_expiry_with_real_threads_and_clocks() -> None:
    store, stop = LocalStore(), threading.Event()
    ranks = [Heartbeats(store, rank, 3, 1.5) for rank in range(3)]

    def beat(heartbeats: Heartbeats) -> None:
        while not stop.wait(0.1) and not (heartbeats.rank == 2 and dead.is_set()):
            heartbeats.beat(MESSAGE)

    dead = threading.Event()
    threads = [threading.Thread(target=beat, args=(heartbeats,)) for heartbeats in ranks]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    dead.set()
    deadline = time.monotonic() + 20
    while not ranks[0].membership.cached and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(5)
    assert list(ranks[0].membership.cached) == [2]
    time.sleep(1.6)  # longer than the time to live: rank 2 must look before it takes work
    with pytest.raises(PeerLost):
        ranks[2].raise_if_fenced()
    assert json.loads(store.get("failed/2") or "")["by"] in (0, 1)


def open_sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in open_descriptors())


def open_descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_heartbeats_close_their_connections() -> None:
    server = serve_store("127.0.0.1")
    store = JobStore(connect_store("127.0.0.1", server.port, 10.0))
    store.set("key", "1")
    time.sleep(0.2)
    before = open_sockets()
    for rank in range(10):
        heartbeats = Heartbeats(store, rank, 10)
        heartbeats.beat(MESSAGE)
        heartbeats.leave()
    deadline = time.monotonic() + 10
    while open_sockets() > before and time.monotonic() < deadline:
        time.sleep(0.05)  # the server closes its ends
    assert open_sockets() <= before
    assert store.get("heartbeat/9") == json.dumps({"left": True})
    store.close()
    server.close()


def test_a_store_known_to_be_lost_ends_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, 2)
    fleet.run(20, 0, 1)

    def lost(*_: Any) -> Any:
        raise PeerLost("the job's store no longer answers")

    for name in ("get_many", "list", "set"):
        monkeypatch.setattr(fleet.store, name, lost)
    fleet.store.lost = True  # type: ignore[attr-defined]
    fleet.run(HEARTBEAT_S, 0)
    with pytest.raises(PeerLost, match="no longer answers"):
        fleet.ranks[0].raise_if_fenced()
