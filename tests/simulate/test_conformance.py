"""Strategies in virtual time: conformance checks, equality with real backends, and determinism."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from roundelay.simulate.cluster import Cluster, ComputeModel, LinkModel, LinkModels, SpeedModel
from roundelay.simulate.simulated_cluster import run_simulated
from roundelay.strategies import STRATEGIES, build
from roundelay.testing.check_jobs import RunSpec, ToyTask, run_toy_task
from roundelay.testing.conformance import StrategyCheckError, check_strategy

FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in STRATEGIES},
    "hierarchical(kstep)": {},
    "hierarchical(sync)": {},
    "hierarchical(delay_by_one)": {},
    "adaptive_kstep often": {"K": 2, "calibrate": 2},
    "kstep dynamic": {"sharding": "dynamic", "K": 2},
    "bmuf dynamic": {"sharding": "dynamic", "K": 2},
}
UNEVEN = Cluster(
    learner=ComputeModel(seconds_per_sample=1e-3, jitter=SpeedModel("heavy_tail", 1.0, 1.5)),
    link=LinkModels(inside=LinkModel(0.1, 100.0, "half", True), between=LinkModel(0.01, 500.0, "half", True)),
)
"""Steps of very different duration, and links that take longer than steps."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", FORMS)
def test_conformance_in_virtual_time(form: str, tmp_path: Path) -> None:
    sizes = (1, 2, 3, 4) if form in STRATEGIES else (3,)
    checked = check_strategy(form.split()[0], run_simulated, sizes, tmp_path, **FORMS[form])
    if build(form.split()[0], FORMS[form]).traits.deterministic and form != "single":
        # this check compares with threads, which are equal to processes to the bit
        assert f"deterministic/{sizes[-1]}" in checked
    assert any(name.startswith("every_sample_once") for name in checked)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "single"])
def test_a_simulation_is_deterministic(form: str) -> None:
    """Also for asynchronous strategies, on an uneven cluster."""
    name = form.split()[0]
    machines = 2 if "hierarchical" in name else 0
    case = RunSpec(
        name,
        tuple(FORMS[form].items()),
        task=ToyTask(samples=48, dropout=0.2),
        epochs=1.0,
        deterministic_reduce=False,
        simulate_nodes=machines,
    )
    first, second = (
        run_simulated(run_toy_task, case, size=4, simulate_nodes=machines, cluster=UNEVEN)[0]["w"] for _ in range(2)
    )
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", ["sync", "kstep", "bmuf", "dpsgd", "delay_by_one"])
def test_deterministic_strategies_do_not_depend_on_timing(name: str) -> None:
    """Two clusters give the same weights."""
    case = RunSpec(name, task=ToyTask(samples=48), epochs=1.0)
    plain, uneven = (run_simulated(run_toy_task, case, size=4, **c)[0]["w"] for c in ({}, {"cluster": UNEVEN}))
    assert np.array_equal(plain, uneven)


def test_asynchronous_strategies_depend_on_timing() -> None:
    case = RunSpec("adpsgd", task=ToyTask(samples=48), epochs=1.0)
    plain, uneven = (run_simulated(run_toy_task, case, size=4, **c)[0]["w"] for c in ({}, {"cluster": UNEVEN}))
    assert not np.array_equal(plain, uneven)


def test_user_strategies_pass_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deterministic/3" in check_strategy("own_strategies:HalfWay", run_simulated, (2, 3), tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert "resume_is_exact/3" in check_strategy("my_strategy:Elastic", run_simulated, (3,), tmp_path)
    sys.modules.pop("my_strategy", None)


def test_a_wrong_strategy_fails_the_checks(tmp_path: Path) -> None:
    with pytest.raises(StrategyCheckError, match="got a second call"):
        check_strategy("own_strategies:TwoGradients", run_simulated, (2,), tmp_path)
    with pytest.raises(StrategyCheckError, match="the mean moved by"):
        check_strategy("own_strategies:LosesTheMean", run_simulated, (2,), tmp_path)
