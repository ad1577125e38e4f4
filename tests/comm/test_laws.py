"""Laws of all backends: exchanges lose no update, no gradient waits for a neighbor, sums are sums."""

from __future__ import annotations

import numpy as np
import pytest
from crew import Crew
from laws import batch_norm, gradient_in_buckets, stuck_neighbor, updates_during_exchanges

from roundelay.testing.conformance import in_threads


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["threads", "shm", "torch", "mpi"])
def test_no_update_is_lost_or_halved_by_an_exchange(backend: str, size: int, crew: Crew) -> None:
    results = crew.on(backend)(updates_during_exchanges, 40, size=size)
    expected = sum(r["start"] + r["applied"] for r in results)
    assert np.allclose(sum(r["end"] for r in results), expected, atol=2e-4)
    assert all(r["exchanges"] > 0 for r in results)
    assert all(r["steps"] == 40 for r in results)


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["threads", "shm", "torch", "mpi"])
def test_a_gradient_never_waits_for_a_slow_neighbor(backend: str, crew: Crew) -> None:
    results = crew.on(backend)(stuck_neighbor, 12, size=2)
    assert [r["steps"] for r in results] == [1, 12]
    # The gossip thread of the stuck rank still answers, so its partner keeps exchanging.
    assert results[1]["exchanges"] >= 11


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("samples", [[4, 4, 4], [5, 1, 3], [2, 0, 6]])
@pytest.mark.parametrize("backend", ["threads", "torch", "mpi"])
def test_gradients_in_buckets_are_the_mean_of_the_gradients(
    backend: str, samples: list[int], bucket_bytes: int, crew: Crew
) -> None:
    results = crew.on(backend)(gradient_in_buckets, bucket_bytes, samples, size=3)
    expected = sum(n * r["own"].astype(np.float64) for n, r in zip(samples, results, strict=True)) / sum(samples)
    for result in results:
        for mean in result["means"]:
            assert np.allclose(mean, expected, atol=1e-6)
        assert np.array_equal(result["means"][0], results[0]["means"][0]), "the same bits on all ranks"


@pytest.mark.parametrize("strategy", ["sync", "adpsgd", "hierarchical(adpsgd)"])
def test_statistics_of_batch_normalization_are_averaged_at_the_end(strategy: str) -> None:
    simulate_nodes = 2 if "(" in strategy else 0
    results = in_threads(batch_norm, strategy, size=3, simulate_nodes=simulate_nodes)
    leaders = [r["before"] for r in results if r["is_leader"]]
    assert len(leaders) == (simulate_nodes or 3)
    assert not np.allclose(leaders[0], leaders[1])
    for result in results:
        assert np.allclose(result["after"], np.mean(leaders, axis=0), atol=1e-6)
