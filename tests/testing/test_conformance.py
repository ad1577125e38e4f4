"""Every strategy keeps the laws it promises, on every backend, with 1, 2, 3 and 4 learners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew

from roundelay.errors import PeerLost
from roundelay.strategies import STRATEGIES, build
from roundelay.testing.conformance import (
    CHECKS,
    RunSpec,
    check_strategy,
    check_zero_gradient_conserves_mean,
    in_threads,
)
from roundelay.topology import TOPOLOGIES

FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in STRATEGIES},
    "hierarchical(kstep)": {},
    "hierarchical(sync)": {},
    "kstep adaptive": {"adaptive": True, "K": 2, "calibrate": 2},
    "kstep race": {"sharding": "dynamic", "K": 2},
    "bmuf race": {"sharding": "dynamic", "K": 2},
    "delay_by_one gradient": {"form": "gradient"},
}
"""Every strategy as it comes, and settings that make another algorithm of it."""
SHORT_SIZES = (2, 3)
"""For settings that differ in arithmetic and not in how they use the backend."""


def promised(form: str, sizes: tuple[int, ...]) -> set[str]:
    """The laws that a strategy's traits hold it to."""
    traits = build(form.split()[0], FORMS[form]).traits
    found = set()
    for size in sizes if form != "single" else [s for s in sizes if s == 1]:
        for law in CHECKS:
            applies = {
                "alone_it_is_single": size == 1,
                "twice_the_same_bits": traits.deterministic,
                "still_water": size > 1 and traits.conserves_mean and traits.contracts,
                "stragglers_drain": size > 1,
            }
            if applies.get(law.__name__, True):
                found.add(f"{law.__name__}/{size}")
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", FORMS)
def test_laws_in_threads(form: str, tmp_path: Path) -> None:
    sizes = (1, 2, 3, 4)
    checked = check_strategy(form.split()[0], in_threads, sizes, tmp_path, **FORMS[form])
    assert set(checked) == promised(form, sizes)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["shm", "torch", "mpi"])
def test_laws_between_processes(form: str, backend: str, crew: Crew, tmp_path: Path) -> None:
    as_it_comes = form in STRATEGIES
    if not as_it_comes and backend != "shm" and not form.startswith("hierarchical"):
        pytest.skip("uses the backend as its plain form does")
    sizes = (1, 2, 3, 4) if as_it_comes else SHORT_SIZES
    checked = check_strategy(form.split()[0], crew.on(backend), sizes, tmp_path, **FORMS[form])
    assert set(checked) == promised(form, sizes)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("form", [name for name in STRATEGIES if name != "single"] + ["hierarchical(kstep)"])
def test_laws_between_machines(form: str, crew: Crew, tmp_path: Path) -> None:
    sizes = (3, 4)  # with two learners each machine would have one, which is what torch does
    assert set(check_strategy(form, crew.on("auto"), sizes, tmp_path)) == promised(form, sizes)


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("backend", ["threads", "shm", "torch", "mpi", "auto"])
def test_gossip_gives_what_the_matrices_of_its_topology_give(topology: str, backend: str, crew: Crew, tmp_path: Path) -> None:
    traits = build("adpsgd").traits
    for size in (2, 3, 4):
        assert check_zero_gradient_conserves_mean(
            RunSpec("adpsgd", topology=topology, seed=5), traits, crew.on(backend), size, tmp_path
        )


# ------------------------------------------------------------------------------------------------ out of the tree


def test_a_strategy_out_of_the_tree_keeps_the_laws(tmp_path: Path) -> None:
    checked = check_strategy("own_strategies:HalfWay", in_threads, (1, 2, 3, 4), tmp_path)
    assert "twice_the_same_bits/4" in checked
    assert "still_water/3" in checked


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("TwoGradients", "a second gradient in one step"),
        ("NoGradient", "did not call grad"),
    ],
)
def test_a_step_takes_exactly_one_gradient(strategy: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=complaint):
        check_strategy(f"own_strategies:{strategy}", in_threads, (2,), tmp_path)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("LosesTheMean", "the mean has moved"),
        ("Unrepeatable", "two runs differ"),
    ],
)
def test_broken_promises_are_found_out(strategy: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_strategy(f"own_strategies:{strategy}", in_threads, (2,), tmp_path)
