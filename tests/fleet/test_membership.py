"""Failed ranks in the job's store."""

from __future__ import annotations

import threading

from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore


def test_the_first_report_of_a_rank_is_kept_and_seen_by_all() -> None:
    store = LocalStore()
    first, second = StoreMembership(store), StoreMembership(store)
    assert second.failed_ranks() == {}
    first.report(3, "killed")
    second.report(3, "no heartbeat")
    second.report(1, "no heartbeat")
    assert first.failed_ranks() == second.failed_ranks() == {3: "killed", 1: "no heartbeat"}


def test_a_failure_that_is_counted_but_not_written_is_read_later() -> None:
    store = LocalStore()
    membership = StoreMembership(store)
    store.add("failures", 1)
    assert membership.failed_ranks() == {}
    store.set("failure/1", '{"rank": 2, "reason": "killed"}')
    assert membership.failed_ranks() == {2: "killed"}


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
