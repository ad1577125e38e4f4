"""The average of two vectors in shared memory: which locks it holds while it waits, and when it is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from roundelay.comm.gossip.pair_average import OVERTAKEN, PairAverager
from roundelay.comm.vectors import AVERAGED, FENCED, GOSSIPS, ROUNDS, LocalVectors, LocalVectorsView, VectorSegment


class WatchedView(LocalVectorsView):
    """A view that notes how long its user is ready to wait for a lock while it holds another one."""

    def __init__(self, owner: LocalVectors, rank: int) -> None:
        super().__init__(owner, rank)
        self.waits_holding: list[float | None] = []
        self.attempts = threading.Semaphore(0)
        self._held = 0

    @contextmanager
    def lock(self, rank: int, timeout_s: float | None = None) -> Iterator[VectorSegment]:
        if self._held:
            self.waits_holding.append(timeout_s)
        self.attempts.release()
        with super().lock(rank, timeout_s) as segment:
            self._held += 1
            try:
                yield segment
            finally:
                self._held -= 1


@pytest.fixture
def vectors() -> LocalVectors:
    vectors = LocalVectors(range(2))
    for rank in range(2):
        vectors.publish(rank, torch.full((4,), float(rank)))
        vectors.headers[rank][GOSSIPS] = 1
    return vectors


@pytest.mark.parametrize("busy", [0, 1])
def test_no_lock_is_held_while_the_average_waits_for_the_other_one(vectors: LocalVectors, busy: int) -> None:
    view, results = WatchedView(vectors, 0), []
    thread = threading.Thread(target=lambda: results.append(PairAverager(view).average(1, 0, 60.0)), daemon=True)
    with vectors.locks[busy]:
        thread.start()
        for _ in range(1 + 2 * (busy == 0)):  # own lock taken: the partner's, its own, and its own again
            assert view.attempts.acquire(timeout=30)
        assert vectors.locks[1 - busy].acquire(timeout=30)  # as a gradient would
        vectors.locks[1 - busy].release()
    thread.join(30)
    assert results == [1]
    assert vectors.vectors[0].tolist() == vectors.vectors[1].tolist() == [0.5] * 4
    assert set(view.waits_holding) == {0.0}


@pytest.mark.parametrize("busy", [0, 1])
def test_an_average_is_given_up_if_a_lock_is_not_free_in_time(vectors: LocalVectors, busy: int) -> None:
    with vectors.locks[busy]:
        assert PairAverager(vectors.view(0)).average(1, 0, 0.01) is None
    assert not vectors.locks[1 - busy].locked()
    assert vectors.vectors[1].tolist() == [1.0] * 4


def test_an_average_advances_the_clocks_of_both_sides(vectors: LocalVectors) -> None:
    vectors.headers[1][ROUNDS] = 7
    assert PairAverager(vectors.view(0)).average(1, 3, 10.0) == 8
    assert [int(vectors.headers[rank][ROUNDS]) for rank in range(2)] == [8, 8]
    assert [int(vectors.headers[rank][AVERAGED]) for rank in range(2)] == [0, 1]


def overtaken(vectors: LocalVectors) -> None:
    vectors.headers[0][ROUNDS] = 5


def fenced(vectors: LocalVectors) -> None:
    vectors.headers[1][FENCED] = 1


def not_gossiping(vectors: LocalVectors) -> None:
    vectors.headers[1][GOSSIPS] = 0


@pytest.mark.parametrize(("reason", "result"), [(overtaken, OVERTAKEN), (fenced, None), (not_gossiping, None)])
def test_an_average_is_left_out(vectors: LocalVectors, reason: Callable[[LocalVectors], None], result: int | None) -> None:
    reason(vectors)
    assert PairAverager(vectors.view(0)).average(1, 3, 10.0) == result
    assert [vectors.vectors[rank].tolist() for rank in range(2)] == [[0.0] * 4, [1.0] * 4]
