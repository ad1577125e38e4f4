"""The mean around broken links: which tree, which mean, and what a rank sees that no other rank reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.comm import tree_average
from roundelay.comm.gossip.transport import connect
from roundelay.comm.tree_average import TreeAverage, Unreachable, spanning_tree
from roundelay.errors import PeerLost
from roundelay.fleet.store import LocalStore

TOKEN = b"token"


@given(st.integers(1, 9), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_the_tree_spans_the_largest_connected_part(size: int, pairs: set[tuple[int, int]]) -> None:
    pairs = {(a, b) for a, b in pairs if a < b < size}
    parents = spanning_tree(range(size), pairs)
    assert next(iter(parents.values())) is None
    for rank, parent in list(parents.items())[1:]:
        assert parent is not None
        assert (min(rank, parent), max(rank, parent)) in pairs
        assert list(parents).index(parent) < list(parents).index(rank)
    for a, b in pairs:
        assert (a in parents) == (b in parents)
    rest = [rank for rank in range(size) if rank not in parents]
    if rest:
        others = spanning_tree(rest, [pair for pair in pairs if pair[0] in rest])
        assert len(others) <= len(parents)


def average(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    broken: set[tuple[int, int]],
    vectors: Callable[[int], list[torch.Tensor]],
    failed: Callable[[], set[int]] = set,
    absent: int = -1,
) -> dict[int, Any]:
    """Return the result or the error of every rank; `broken` are pairs whose connections are refused."""
    store = LocalStore()
    results: dict[int, Any] = {}

    def refusing(address: str, rank: int, token: bytes, timeout_s: float) -> Any:
        peers = {store.get(f"mean/address/{peer}"): peer for peer in range(size)}
        if (rank, peers[address]) in broken:
            raise ConnectionRefusedError
        return connect(address, rank, token, timeout_s)

    monkeypatch.setattr(tree_average, "connect", refusing)

    def run(rank: int) -> None:
        tree = TreeAverage(store, "mean", range(size), rank, "127.0.0.1", TOKEN, 5.0, failed)
        try:
            results[rank] = tree.mean(vectors(rank))
        except PeerLost as error:
            results[rank] = error
        finally:
            tree.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size) if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("broken", [set(), {(1, 2)}, {(0, 1), (0, 2), (1, 2)}, {(0, 1), (1, 2), (2, 3)}])
def test_all_ranks_get_the_mean_of_all(monkeypatch: pytest.MonkeyPatch, broken: set[tuple[int, int]]) -> None:
    size = 4

    def vectors(rank: int) -> list[torch.Tensor]:
        return [torch.full((300_001,), float(rank)), torch.empty(0), torch.tensor([float(rank), 1.0], dtype=torch.float64)]

    results = average(monkeypatch, size, broken, vectors)
    for rank in range(size):
        big, empty, small = results[rank]
        assert torch.equal(big, torch.full((300_001,), 1.5))
        assert empty.numel() == 0
        assert torch.equal(small, torch.tensor([1.5, 1.0], dtype=torch.float64))


def test_a_rank_that_reaches_no_other_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {(0, 2), (1, 2), (2, 3)}
    results = average(monkeypatch, 4, broken, lambda rank: [torch.tensor([float(rank)])])
    assert isinstance(results[2], Unreachable)
    for rank in (0, 1, 3):
        assert results[rank][0].item() == pytest.approx(4 / 3)


def test_a_failed_rank_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    results = average(monkeypatch, 3, set(), lambda rank: [torch.zeros(1)], failed=lambda: {1}, absent=1)
    assert all(isinstance(results[rank], PeerLost) for rank in (0, 2))
