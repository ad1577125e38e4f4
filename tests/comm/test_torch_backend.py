"""Processes on torch.distributed: one-sided operations and deterministic means, with and without shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from crew import Crew
from mpi_jobs import one_sided

from roundelay.comm.base import weighted_mean
from roundelay.launch.context import DistributedContext

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", ["shm", "torch", "auto"])
def test_one_sided_operations_lose_nothing(backend: str, crew: Crew) -> None:
    results = crew.on(backend)(one_sided, 1000, 5, size=3)
    for result in results:
        assert result["reads"] == [(15, 15.0, 15.0)] * 3
    for peer in range(3):
        assert sorted(v for r in results for v in r["versions"][peer::3]) == list(range(15))


def vector_of(rank: int) -> torch.Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(rank))


def deterministic_means(context: DistributedContext) -> dict[str, Any]:
    x = vector_of(context.rank)
    plain = context.comm.all_reduce_mean(x, deterministic_reduce=True).wait()
    weighted = context.comm.all_reduce_mean(x, weight=1.0 + context.rank, deterministic_reduce=True).wait()
    return {"plain": plain.numpy(), "weighted": weighted.numpy()}


@pytest.mark.parametrize("backend", ["threads", "torch", "mpi"])
def test_deterministic_means_have_equal_bits_on_all_backends(backend: str, crew: Crew) -> None:
    results = crew.on(backend)(deterministic_means, size=3)
    plain = weighted_mean({r: (vector_of(r), None) for r in range(3)}).numpy()
    weighted = weighted_mean({r: (vector_of(r), 1.0 + r) for r in range(3)}).numpy()
    assert all(np.array_equal(result["plain"], plain) for result in results)
    assert all(np.array_equal(result["weighted"], weighted) for result in results)
