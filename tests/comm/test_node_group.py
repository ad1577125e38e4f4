"""The learners of one machine around their first: sums and hand-outs through shared memory."""

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
    """The job on every member, each in its thread; a hang is a failure."""
    store, results, errors = LocalStore(), [None] * size, []

    def member(rank: int) -> None:
        try:
            huddle = ShmNodeGroup(rank, size, torch.zeros(numel), store, "test", 5.0, lambda wait: wait())
            try:
                results[rank] = job(huddle)
            finally:
                huddle.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    if errors:
        raise errors[0]
    return results


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.lists(st.integers(1, 900), min_size=1, max_size=5), st.integers(1, 6), st.booleans())
def test_everybody_has_the_first_ones_vector_and_the_first_has_the_sum(
    size: int, buckets: list[int], rounds: int, in_slots: bool
) -> None:
    numel = sum(buckets)

    def job(huddle: ShmNodeGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for number in range(rounds):
            weights = torch.full((numel,), float(100 * number + huddle.rank))
            huddle.broadcast(weights)
            g = torch.arange(numel, dtype=torch.float32) + 1000 * huddle.rank + number
            if in_slots and huddle.rank:
                g = huddle.slot.copy_(g)
            under_way, at = [], 0
            for bucket in buckets:
                under_way.append(huddle.reduce(g[at : at + bucket]))
                at += bucket
            for pending in under_way:
                pending.wait()
            found.append((weights, g.clone()))
        return found

    results = together(size, numel, job)
    for number in range(rounds):
        brought = [torch.arange(numel, dtype=torch.float32) + 1000 * rank + number for rank in range(size)]
        assert all(torch.equal(results[rank][number][0], torch.full((numel,), 100.0 * number)) for rank in range(size))
        assert torch.equal(results[0][number][1], torch.stack(brought).sum(0))


def test_who_hangs_up_is_noticed_at_once() -> None:
    def job(huddle: ShmNodeGroup) -> None:
        x = torch.zeros(10)
        huddle.broadcast(x)
        if huddle.rank == 0:
            huddle.reduce(x).wait()

    with pytest.raises(ConnectionError, match="member 1 of this machine hung up"):
        together(2, 10, job)
