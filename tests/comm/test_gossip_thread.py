"""The gossip thread by itself: how it enters and leaves rounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.shared_memory import CURRENT_ROUND, LocalVectors, SharedVector


class Pair:
    """Ranks 0 and 1 are partners in every round; `on_lookup` runs whenever a thread looks up its partner."""

    edges = frozenset({(0, 1)})

    def __init__(self) -> None:
        self.on_lookup = lambda: None

    def __call__(self, round: int) -> Sequence[int]:
        self.on_lookup()
        return (1, 0)


def two_vectors() -> LocalVectors:
    vectors = LocalVectors(range(2))
    for rank in range(2):
        vectors.publish(rank, torch.full((4,), float(rank)))
    return vectors


def thread_of(vectors: LocalVectors, rank: int) -> GossipThread:
    view = vectors.view(rank)
    return GossipThread(SharedVector(view, rank), view, 2, b"", None, lambda peer, reason: None)


def test_a_last_round_set_during_a_move_is_not_overrun() -> None:
    thread, pair = thread_of(two_vectors(), 0), Pair()
    thread._matching, thread._round, thread._current_round, thread._initiating = pair, 7, 6, False
    pair.on_lookup = lambda: setattr(thread, "_last_round", 6)  # what drain_to() does, from another thread
    assert not thread._advance()
    assert thread._current_round == 6
    assert not thread._advance()
    assert thread._drained.is_set()


def test_a_rank_without_steps_answers_but_never_initiates() -> None:
    vectors = two_vectors()
    thread = thread_of(vectors, 0)
    thread._matching, thread._initiating = Pair(), False
    assert not thread._advance()
    vectors.headers[1][CURRENT_ROUND] = 0  # rank 1 waits in round 0
    while thread._advance():
        pass
    assert thread.exchanges == 1
    assert vectors.vectors[0].tolist() == vectors.vectors[1].tolist() == [0.5] * 4


def test_an_error_of_the_thread_is_raised_in_the_caller() -> None:
    thread, pair = thread_of(two_vectors(), 0), Pair()
    pair.on_lookup = lambda: 1 / 0
    thread.start()
    thread.gossip(pair, 1.0)
    thread.drain_to(3)
    with pytest.raises(RuntimeError, match="the gossip thread of rank 0 failed: division by zero"):
        thread.raise_if_failed()
    thread.close()
