"""The gossip thread by itself: who averages, what happens with a locked or silent partner, and errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.vectors import GOSSIPS, LocalVectors, SharedVector
from roundelay.core.wait import wait_until


class Pair:
    """Ranks 0 and 1 are partners in every round; `on_lookup` runs whenever a thread looks up its partner."""

    edges = frozenset({(0, 1)})

    def __init__(self) -> None:
        self.on_lookup = lambda: None

    def __call__(self, round: int) -> Sequence[int]:
        self.on_lookup()
        return (1, 0)


@pytest.fixture
def vectors() -> LocalVectors:
    vectors = LocalVectors(range(2))
    for rank in range(2):
        vectors.publish(rank, torch.full((4,), float(rank)))
    return vectors


def thread_of(vectors: LocalVectors, rank: int) -> GossipThread:
    view = vectors.view(rank)
    return GossipThread(SharedVector(view, rank), view, 2, b"", None, lambda peer, reason: None)


def test_an_exchange_needs_one_side_only(vectors: LocalVectors) -> None:
    thread = thread_of(vectors, 0)
    vectors.headers[1][GOSSIPS] = 1  # rank 1 gossips, but its thread never runs
    thread.gossip(Pair(), 1.0)
    thread.notify_step()
    assert vectors.vectors[0].tolist() == vectors.vectors[1].tolist() == [0.5] * 4
    assert thread.exchanges == 1
    thread.close()


def test_a_partner_that_does_not_gossip_yet_is_left_alone(vectors: LocalVectors) -> None:
    thread = thread_of(vectors, 0)
    thread.gossip(Pair(), 1.0)
    thread.notify_step()
    assert vectors.vectors[1].tolist() == [1.0] * 4
    thread.close()


def test_exchanges_by_the_partner_count_and_give_limited_credit(vectors: LocalVectors) -> None:
    threads = [thread_of(vectors, rank) for rank in range(2)]
    for thread in threads:
        thread.gossip(Pair(), 1.0)
    for _ in range(10):
        threads[0].notify_step()
    assert [thread.exchanges for thread in threads] == [10, 10]
    for _ in range(10):
        threads[1].notify_step()
    assert threads[1].exchanges >= 18  # its own, although its partner's were ten ahead
    for thread in threads:
        thread.close()


def test_a_step_does_not_wait_for_a_partner_that_holds_its_lock(vectors: LocalVectors) -> None:
    thread = thread_of(vectors, 0)
    vectors.headers[1][GOSSIPS] = 1
    thread.start()
    thread.gossip(Pair(), 1.0)
    done = threading.Event()
    with vectors.locks[1]:

        def steps() -> None:
            for _ in range(20):
                thread.notify_step()
            done.set()

        threading.Thread(target=steps, daemon=True).start()
        assert done.wait(5.0)
        assert thread.exchanges == 0
    wait_until(lambda: thread.notify_step() or thread.exchanges, 10.0, lambda: TimeoutError("no exchange"), poll_s=0.05)
    thread.close()


def test_an_error_of_the_thread_is_raised_in_the_caller(vectors: LocalVectors) -> None:
    thread, pair = thread_of(vectors, 0), Pair()
    thread._inline = False
    thread.start()
    thread.gossip(pair, 1.0)
    pair.on_lookup = lambda: 1 / 0
    thread.notify_step()
    wait_until(lambda: thread.error, 10.0, lambda: TimeoutError("no error"))
    with pytest.raises(RuntimeError, match="the gossip thread of rank 0 failed: division by zero"):
        thread.raise_if_failed()
    thread.close()
