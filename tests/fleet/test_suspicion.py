"""Suspicion: without progress for 3 s a peer is passed over, and retried with a back-off."""

from __future__ import annotations

from roundelay.fleet.suspicion import MAX_RETRY_S, RETRY_S, SUSPECT_S, Suspicion


def test_an_open_exchange_without_progress_makes_its_partner_suspected() -> None:
    suspicion = Suspicion()
    suspicion.open(1, 10.0)
    suspicion.open(2, 10.0)
    assert suspicion.suspected(10.0 + SUSPECT_S - 0.01) == set()
    assert suspicion.next_change(11.0) == 10.0 + SUSPECT_S
    suspicion.progress(2, 12.0)
    assert suspicion.suspected(10.0 + SUSPECT_S) == {1}
    suspicion.progress(1, 14.0)
    assert suspicion.suspected(14.0) == set()
    assert suspicion.suspected(12.0 + SUSPECT_S) == {2}


def test_peers_without_an_open_exchange_are_not_suspected() -> None:
    suspicion = Suspicion()
    suspicion.progress(1, 0.0)
    suspicion.open(2, 0.0)
    suspicion.close(2)
    assert suspicion.suspected(1000.0) == set()
    assert suspicion.next_change(1000.0) is None
    assert suspicion.may_retry(1, 1000.0)


def test_the_time_of_an_exchange_counts_from_its_first_opening() -> None:
    suspicion = Suspicion()
    for now in (0.0, 1.0, 2.0):
        suspicion.open(1, now)
    assert suspicion.suspected(SUSPECT_S) == {1}


def test_attempts_follow_a_back_off_that_progress_resets() -> None:
    suspicion, now, waits = Suspicion(), 0.0, []
    for _ in range(7):
        suspicion.disconnected(1, now)
        assert suspicion.suspected(now) == {1}, "a broken connection is suspected at once"
        assert not suspicion.may_retry(1, now)
        change = suspicion.next_change(now)
        assert change is not None
        waits.append(change - now)
        now = change
        assert suspicion.may_retry(1, now)
    assert waits == [RETRY_S, 1.0, 2.0, 4.0, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]
    suspicion.progress(1, now)
    suspicion.disconnected(1, now)
    assert suspicion.next_change(now) == now + RETRY_S


def test_a_removed_peer_leaves_nothing() -> None:
    suspicion = Suspicion()
    suspicion.open(1, 0.0)
    suspicion.disconnected(1, 0.0)
    suspicion.remove(1)
    assert suspicion.suspected(100.0) == set()
    assert suspicion.next_change(0.0) is None
