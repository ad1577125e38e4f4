"""Votes: all ranks start or none, and all raise the same error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import pytest

from roundelay.errors import PeerLost, RoundelayError, UsageError
from roundelay.fleet import vote as vote_module
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore
from roundelay.fleet.vote import OK, gather, refuse, vote


def together(calls: Mapping[int, Callable[[], object]]) -> dict[int, object]:
    """Make the calls in threads; return the result or the error of each."""
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except RoundelayError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def ballot(
    store: LocalStore, size: int, errors: Mapping[int, RoundelayError | None], timeout_s: float = 20.0
) -> dict[int, object]:
    def voter(rank: int) -> Callable[[], object]:
        return lambda: vote(store, "test", rank, size, errors[rank], StoreMembership(store), timeout_s)

    return together({rank: voter(rank) for rank in errors})


def test_all_votes_for_let_all_ranks_start() -> None:
    assert ballot(LocalStore(), 4, dict.fromkeys(range(4))) == dict.fromkeys(range(4))


def test_one_vote_against_stops_all_ranks_with_the_same_error() -> None:
    no = UsageError("the disk is not shared", where="rank 2, run=x", hint="share it")
    results = ballot(LocalStore(), 4, {0: None, 1: None, 2: no, 3: None})
    assert [str(results[rank]) for rank in range(4)] == [str(no)] * 4
    assert all(isinstance(error, UsageError) for error in results.values())


def test_different_votes_against_are_merged_and_usage_wins() -> None:
    errors = {
        0: PeerLost("rank 0 cannot connect"),
        1: UsageError("a is wrong", where="a"),
        2: UsageError("b is wrong", where="b"),
    }
    results = ballot(LocalStore(), 3, errors)
    assert {str(error) for error in results.values()} == {str(UsageError("a is wrong; b is wrong", where="a; b"))}


def test_a_vote_against_does_not_wait_long_for_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote_module, "GRACE_S", 0.1)
    store, began = LocalStore(), time.monotonic()
    results = ballot(store, 3, {0: None, 1: UsageError("no")})
    assert [error.message for error in results.values() if isinstance(error, UsageError)] == ["no", "no"]
    assert time.monotonic() - began < 10
    late = ballot(store, 3, {2: None})
    assert isinstance(late[2], UsageError), "a late rank obeys the decision"


def test_a_rank_that_fails_or_stays_away_is_named_on_all_ranks() -> None:
    store = LocalStore()
    StoreMembership(store).report(2, "killed by signal SIGKILL")
    results = ballot(store, 3, {0: None, 1: None})
    assert {type(error) for error in results.values()} == {PeerLost}
    assert "rank 2 (killed by signal SIGKILL) was lost" in str(results[0])
    assert str(results[0]) == str(results[1])
    store = LocalStore()
    results = ballot(store, 3, {0: None, 1: None}, timeout_s=0.1)
    assert str(results[0]) == str(results[1])
    assert "rank 2 did not vote on 'test' within" in str(results[0])
    assert str(ballot(store, 3, {2: None})[2]) == str(results[0]), "all ranks start or none"


def test_values_are_gathered_from_all_ranks() -> None:
    store = LocalStore()
    for rank in range(3):
        store.set(f"info/{rank}", f"value {rank}")
    arrived: list[int] = []
    values = gather(
        store,
        "info/",
        range(3),
        0,
        StoreMembership(store),
        5.0,
        doing="a test",
        on_arrival=lambda rank, _: arrived.append(rank),
    )
    assert values == {rank: f"value {rank}" for rank in range(3)}
    assert arrived == [0, 1, 2]


def test_a_gathering_ends_when_an_awaited_rank_fails_or_the_vote_is_decided() -> None:
    store = LocalStore()
    membership = StoreMembership(store)
    timer = threading.Timer(0.1, membership.report, (1, "killed"))
    timer.start()
    with pytest.raises(PeerLost, match=r"rank 1 \(killed\) was lost"):
        gather(store, "info/", [1], 0, membership, 20.0, doing="a test")
    error = refuse(store, "start", UsageError("two processes have rank 3"))
    assert error.message == "two processes have rank 3"
    assert refuse(store, "start", PeerLost("later")).message == error.message, "the first decision holds"
    with pytest.raises(UsageError, match="two processes"):
        gather(store, "info/", [2], 0, membership, 20.0, doing="a test", vote_name="start")
    with pytest.raises(PeerLost, match="rank 2 did not connect within"):
        gather(store, "info/", [2], 0, membership, 0.05, doing="a test")
    timer.join()


def test_a_vote_that_was_decided_for_cannot_be_refused_later() -> None:
    store = LocalStore()
    ballot(store, 2, {0: None, 1: None})
    assert store.get("vote/test/result") == OK
    assert refuse(store, "test", PeerLost("late")).message == "late"
    assert store.get("vote/test/result") == OK
