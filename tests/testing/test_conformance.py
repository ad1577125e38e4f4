"""Every strategy keeps the laws it promises, on every backend, with 1, 2, 3 and 4 ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crew import Crew

from roundelay.strategies import STRATEGIES, build
from roundelay.testing.conformance import (
    CHECKS,
    StrategyCheck,
    StrategyCheckError,
    check_strategy,
    in_threads,
    parametrize_with_checks,
    strategy_checks,
)
from roundelay.topology import TOPOLOGIES

FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in STRATEGIES},
    "hierarchical(kstep)": {},
    "hierarchical(sync)": {},
    "adaptive_kstep often": {"K": 2, "calibrate": 2},
    "kaldi_averaging often": {"K": 2, "best_first": 2, "combine": 3},
    "kstep dynamic": {"sharding": "dynamic", "K": 2},
    "bmuf dynamic": {"sharding": "dynamic", "K": 2},
    "bmuf without momentum": {"eta": 0.0, "K": 2},
}
"""Every strategy with its defaults, and settings that make another algorithm of it."""
SHORT_SIZES = (2, 3)
"""For settings that change the arithmetic but not the use of the backend."""


def promised(form: str, sizes: tuple[int, ...]) -> set[str]:
    """Return the laws that the traits of a strategy promise."""
    traits = build(form.split()[0], FORMS[form]).traits
    applies = {
        "single_worker_equals_sgd": lambda size: size == 1,
        "ranks_influence_each_other": lambda size: size > 1,
        "deterministic": lambda size: traits.deterministic,
        "zero_gradient_conserves_mean": lambda size: size > 1 and traits.conserves_mean and traits.contracts,
        "no_hang_with_stragglers": lambda size: size > 1,
    }
    return {
        f"{law.name}/{size}"
        for size in (sizes if form != "single" else (1,))
        for law in CHECKS
        if applies.get(law.name, lambda size: True)(size)
    }


def check_of(law: str, name: str, size: int, **options: Any) -> StrategyCheck:
    return next(check for check in strategy_checks(name, (size,), **options) if check.law.name == law)


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
    default = form in STRATEGIES
    if not default and backend != "shm" and not form.startswith("hierarchical"):
        pytest.skip("uses the backend as the default form does")
    sizes = (1, 2, 3, 4) if default else SHORT_SIZES
    checked = check_strategy(form.split()[0], crew.on(backend), sizes, tmp_path, **FORMS[form])
    assert set(checked) == promised(form, sizes)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("form", [name for name in STRATEGIES if name != "single"] + ["hierarchical(kstep)"])
def test_laws_between_machines(form: str, crew: Crew, tmp_path: Path) -> None:
    sizes = (3, 4)  # with two ranks each machine would have one, which is what backend torch does
    assert set(check_strategy(form, crew.on("auto"), sizes, tmp_path)) == promised(form, sizes)


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("backend", ["threads", "shm", "torch", "mpi", "auto"])
def test_gossip_multiplies_by_the_matrices_of_its_topology(topology: str, backend: str, crew: Crew) -> None:
    for size in (2, 3, 4):
        check = check_of("zero_gradient_conserves_mean", "adpsgd", size)
        replace(check, spec=replace(check.spec, topology=topology, seed=5))(crew.on(backend))


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
@pytest.mark.parametrize("backend", ["shm", "torch", "mpi"])
def test_ranks_influence_each_other_between_processes(name: str, backend: str, crew: Crew) -> None:
    for size in (2, 4):
        check_of("ranks_influence_each_other", name, size)(crew.on(backend))


# ------------------------------------------------------------------------------- strategies from outside the package


@parametrize_with_checks("own_strategies:HalfWay", sizes=(1, 2, 3))
def test_a_strategy_from_outside_keeps_the_laws(check: StrategyCheck, tmp_path: Path) -> None:
    check(in_threads, tmp_path)


def test_checks_are_named_after_laws_and_sizes() -> None:
    names = [str(check) for check in strategy_checks("own_strategies:HalfWay", (1, 4))]
    assert "single_worker_equals_sgd/1" in names
    assert "zero_gradient_conserves_mean/4" in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("strategy", "law", "problem"),
    [
        ("TwoGradients", "every sample once", "got a second call"),
        ("NoGradient", "every sample once", "got no call"),
        ("LosesTheMean", "zero gradient conserves mean", "the mean moved by"),
        ("Unrepeatable", "deterministic", "two runs differ by"),
        ("OneWay", "ranks influence each other", r"ranks \[1\] never reached the weights of rank 0"),
        ("NeverCommunicates", "ranks influence each other", r"ranks \[1\] never reached the weights of rank 0"),
    ],
)
def test_a_violation_names_the_law(strategy: str, law: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyCheckError, match=problem) as caught:
        check_strategy(f"own_strategies:{strategy}", in_threads, (2,), tmp_path)
    assert str(caught.value).startswith(f"law '{law}' violated by 'own_strategies:{strategy}' with 2 ranks: ")
    assert (caught.value.law, caught.value.size) == (law, 2)


def violated_laws(name: str, size: int, run: Any) -> list[str]:
    laws = []
    for check in strategy_checks(name, (size,)):
        try:
            check(run)
        except StrategyCheckError as error:
            laws.append(error.law)
    return laws


@pytest.mark.parametrize("size", [2, 3])
def test_a_strategy_that_never_communicates_violates_one_law(size: int) -> None:
    assert violated_laws("own_strategies:NeverCommunicates", size, in_threads) == ["ranks influence each other"]


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["shm", "torch", "mpi"])
def test_no_backend_hides_that_ranks_never_communicate(backend: str, crew: Crew) -> None:
    with pytest.raises(StrategyCheckError, match="never reached"):
        check_of("ranks_influence_each_other", "own_strategies:NeverCommunicates", 2)(crew.on(backend))


@pytest.mark.slow
def test_laws_are_checked_under_python_O() -> None:
    program = (
        "from roundelay.testing.conformance import *\n"
        "try:\n    check_strategy('own_strategies:NeverCommunicates', in_threads, (2,))\n"
        "except StrategyCheckError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-O", "-c", program],
        cwd=Path(__file__).parents[1] / "support",
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("law 'ranks influence each other' violated by")
