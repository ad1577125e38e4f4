"""Broadcast and reduce among the ranks of one node, through shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.comm.node_group import ShmNodeGroup
from roundelay.fleet.store import LocalStore


def together(size: int, numel: int, job: Callable[[ShmNodeGroup], Any]) -> list[Any]:
    """Run the job on every rank, each on its own thread; return the results. A rank that hangs is a failure."""
    store, results, errors = LocalStore(), [None] * size, []

    def member(rank: int) -> None:
        try:
            group = ShmNodeGroup(rank, size, torch.zeros(numel), store, "test", 5.0, lambda wait: wait())
            try:
                results[rank] = job(group)
            finally:
                group.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.lists(st.integers(1, 900), min_size=1, max_size=5), st.integers(1, 6), st.booleans())
def test_all_ranks_get_the_leaders_vector_and_the_leader_gets_the_sum(
    size: int, buckets: list[int], rounds: int, in_slots: bool
) -> None:
    numel = sum(buckets)

    def job(group: ShmNodeGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rounds_seen = []
        for number in range(rounds):
            weights = torch.full((numel,), float(100 * number + group.rank))
            group.broadcast(weights)
            g = torch.arange(numel, dtype=torch.float32) + 1000 * group.rank + number
            if in_slots and group.rank:
                g = group.slot.copy_(g)
            works, at = [], 0
            for bucket in buckets:
                works.append(group.reduce(g[at : at + bucket]))
                at += bucket
            for work in works:
                work.wait()
            rounds_seen.append((weights, g.clone()))
        return rounds_seen

    results = together(size, numel, job)
    for number in range(rounds):
        gradients = [torch.arange(numel, dtype=torch.float32) + 1000 * rank + number for rank in range(size)]
        assert all(torch.equal(results[rank][number][0], torch.full((numel,), 100.0 * number)) for rank in range(size))
        assert torch.equal(results[0][number][1], torch.stack(gradients).sum(0))


def test_a_rank_that_closes_is_noticed_at_once() -> None:
    def job(group: ShmNodeGroup) -> None:
        x = torch.zeros(10)
        group.broadcast(x)
        if group.rank == 0:
            group.reduce(x).wait()

    with pytest.raises(ConnectionError, match="member 1 of this node closed its connection"):
        together(2, 10, job)
