"""The agent by itself: how it enters and leaves rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.shared_memory import LocalVectors, SharedVector


class Pair:
    """Two members who meet in every round; something may happen while an agent looks up its partner."""

    edges = frozenset({(0, 1)})

    def __init__(self) -> None:
        self.meanwhile = lambda: None

    def __call__(self, round: int) -> Sequence[int]:
        self.meanwhile()
        return (1, 0)


def test_an_agent_told_where_to_stop_in_the_middle_of_a_move_enters_no_round_beyond() -> None:
    board = LocalVectors(range(2))
    for rank in range(2):
        board.publish(rank, torch.zeros(4))
    agent = GossipThread(SharedVector(board.seen_by(0), 0), board.seen_by(0), 2, b"", None, lambda peer, why: None)
    pair = Pair()
    agent._matching, agent.round, agent.entered, agent._asking = pair, 7, 6, False
    pair.meanwhile = lambda: setattr(agent, "_play_to", 6)  # what play_to() does, from the learner's thread
    assert not agent._advance()
    assert agent.entered == 6
    assert not agent._advance()
    assert agent._at_rest.is_set()
