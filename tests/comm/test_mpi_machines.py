"""The conformance checks under one mpirun over two machines with two ranks each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.namespaces import NetnsMachines
from crew import TIMEOUT_S, warm_up
from mpi_jobs import where
from two_machines import NAMES, two_machines

from roundelay.errors import UsageError
from roundelay.strategies import STRATEGIES
from roundelay.testing.conformance import check_strategy
from roundelay.testing.mpi_pool import MpiPool

pytest.importorskip("mpi4py")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a runner of jobs on four ranks."""
    try:
        with NetnsMachines(2, 1000):
            pass
    except UsageError as error:
        pytest.skip(f"no network namespaces here: {error.message}")
    with (
        two_machines(tmp_path_factory.mktemp("machines"), learners=2) as (options, within),
        MpiPool(4, options, within, bind_address="auto") as pool,
    ):
        pool.run(warm_up, timeout_s=4 * TIMEOUT_S)
        yield lambda job, *args, size, simulate_nodes=0: pool.run(
            job, *args, size=size, simulate_nodes=simulate_nodes, timeout_s=TIMEOUT_S
        )


def test_the_ranks_are_on_two_machines(run: Any) -> None:
    assert run(where, size=4) == [NAMES[0]] * 2 + [NAMES[1]] * 2


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
def test_checks_hold_between_machines(name: str, run: Any, tmp_path: Path) -> None:
    assert "final_models_equal/4" in check_strategy(name, run, (4,), tmp_path)
