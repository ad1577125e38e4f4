"""Failed ranks in the job's store: one atomic report, one call to read, and calls that do not wait for failed ranks."""

from __future__ import annotations

import json
import threading
import time

import pytest

from roundelay.errors import PeerLost
from roundelay.fleet import store as store_module
from roundelay.fleet.membership import FAILURES, StoreMembership, failed_key
from roundelay.fleet.store import LocalStore, wait_for_key


class CountedStore(LocalStore):
    """A store that counts its calls, and can die in the middle of a caller's sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in ("set", "get", "get_many", "list", "add", "compare_and_set", "claim"):
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


def test_the_first_report_of_a_rank_is_kept_and_seen_by_all() -> None:
    store = LocalStore()
    first, second = StoreMembership(store), StoreMembership(store)
    assert second.failed_ranks() == {}
    assert first.report(3, "killed", by=0)
    assert second.report(3, "no heartbeat")
    assert second.report(1, "no heartbeat")
    assert first.failed_ranks() == second.failed_ranks() == {3: "killed", 1: "no heartbeat"}
    assert json.loads(store.get(failed_key(3)) or "") == {"incarnation": 1, "reason": "killed", "by": 0}


def test_a_report_is_one_operation_that_also_writes_the_wake_key() -> None:
    store = CountedStore()
    StoreMembership(store).report(2, "killed")
    assert store.calls == ["compare_and_set"], "a reporter that dies between two operations would leave half a report"
    assert store.get(FAILURES) == "2.1"


def test_failures_are_read_by_one_call_and_the_cache_by_none() -> None:
    store = CountedStore()
    job, group = StoreMembership(store), StoreMembership(store)
    job.report(2, "killed")
    assert group.cached == {}
    store.calls.clear()
    assert job.failed_ranks() == {2: "killed"}
    assert store.calls == ["list"]
    assert group.cached == job.cached == {2: "killed"}, "the groups of one rank share what was read"
    assert store.calls == ["list"]


def test_a_later_incarnation_can_fail_again() -> None:
    membership = StoreMembership(LocalStore())
    membership.report(2, "killed")
    membership.report(2, "killed again", incarnation=2)
    membership.report(2, "late report of the first", incarnation=1)
    assert membership.failed_ranks() == {2: "killed again"}
    assert membership.failure_of(2, 2) == "killed again"
    assert membership.failure_of(2, 3) is None


def test_a_rank_whose_heartbeat_is_back_is_not_reported() -> None:
    store = LocalStore()
    membership = StoreMembership(store)
    store.set("heartbeat/1", "{}", 10.0)
    assert not membership.report(1, "no heartbeat", if_missing="heartbeat/1")
    assert membership.failed_ranks() == {}


def test_an_explanation_names_the_failed_members_of_the_group() -> None:
    membership = StoreMembership(LocalStore())
    membership.report(7, "not of this group")
    timer = threading.Timer(0.05, membership.report, (2, "killed"))
    timer.start()
    error = membership.explain(RuntimeError("connection reset"), [0, 1, 2], 0, timeout_s=10.0)
    timer.join()
    assert error.message == "rank 2 (killed) was lost"
    assert error.where.startswith("rank 0")


def test_without_a_report_the_cause_is_in_the_explanation() -> None:
    error = StoreMembership(LocalStore()).explain(RuntimeError("reset\nby peer"), [0, 1], 1, timeout_s=0.0)
    assert error.message == "a collective failed and no rank has been reported as failed"
    assert error.where == "rank 1: reset"


def test_reports_are_read_again_only_after_a_new_one() -> None:
    store = CountedStore()
    membership, other = StoreMembership(store), StoreMembership(LocalStore())
    assert other.refresh() == membership.refresh() == {}
    for rank in (3, 1):
        membership.report(rank, f"killed {rank}")
        store.calls.clear()
        assert membership.refresh()[rank] == f"killed {rank}"
        assert store.calls == ["get_many", "list"]
        store.calls.clear()
        assert set(membership.refresh()) >= {rank}
        assert store.calls == ["get_many"]
    assert membership.cached == {3: "killed 3", 1: "killed 1"}
    assert membership.abort == ""
    store.set("abort", "bad data")
    membership.refresh()
    assert membership.abort == "bad data"


def test_a_reply_that_arrives_late_removes_no_failure() -> None:
    class LateStore(LocalStore):
        """A store whose reply to one `list` arrives only after other calls."""

        def list(self, prefix: str) -> dict[str, str]:
            reply = super().list(prefix)
            if threading.current_thread() is slow:
                asked.set()
                assert go_on.wait(20)
            return reply

    store, asked, go_on = LateStore(), threading.Event(), threading.Event()
    membership = StoreMembership(store)
    slow = threading.Thread(target=membership.failed_ranks, daemon=True)
    slow.start()
    assert asked.wait(20)
    membership.report(2, "killed")
    membership.report(2, "killed again", incarnation=2)
    assert membership.refresh() == {2: "killed again"}
    go_on.set()
    slow.join(20)
    assert membership.cached == membership.refresh() == {2: "killed again"}
    assert membership.failure_of(2, 2) == "killed again"


def test_a_wait_for_a_key_ends_when_an_awaited_rank_fails() -> None:
    store = LocalStore()
    timer = threading.Timer(0.1, StoreMembership(store).report, (2, "killed"))
    timer.start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 2 \(killed\) was lost"):
        wait_for_key(store, "key", 60.0, 0, awaited=[1, 2])
    assert time.monotonic() - began < 20
    timer.join()


def test_a_wait_for_a_key_ends_some_time_after_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EXPLAIN_S", 0.5)
    store = LocalStore()
    StoreMembership(store).report(2, "killed")
    timer = threading.Timer(0.1, store.set, ("key", "5"))
    timer.start()
    assert wait_for_key(store, "key", 60.0, 0) == "5", "the failed rank was not needed"
    timer.join()
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 2 \(killed\) was lost"):
        wait_for_key(store, "other", 60.0, 0)
    assert 0.5 < time.monotonic() - began < 20
    with pytest.raises(PeerLost, match="did not set 'other' in the store within 0 s"):
        wait_for_key(store, "other", 0.01, 0, awaited=[1])
