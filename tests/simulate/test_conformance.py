"""Every strategy keeps its laws in virtual time, gives the bits of the real backends where it promises bits, and repeats itself
to the bit in any case."""

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
from roundelay.testing.conformance import check_strategy

FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in STRATEGIES},
    "hierarchical(kstep)": {},
    "hierarchical(sync)": {},
    "hierarchical(delay_by_one)": {},
    "adaptive_kstep often": {"K": 2, "calibrate": 2},
    "kaldi_averaging often": {"K": 2, "best_first": 2, "combine": 3},
    "kstep dynamic": {"sharding": "dynamic", "K": 2},
    "bmuf dynamic": {"sharding": "dynamic", "K": 2},
    "bmuf without momentum": {"eta": 0.0, "K": 2},
}
RESTLESS = Cluster(
    learner=ComputeModel(seconds_per_sample=1e-3, jitter=SpeedModel("heavy_tail", 1.0, 1.5)),
    link=LinkModels(inside=LinkModel(0.1, 100.0, "half", True), between=LinkModel(0.01, 500.0, "half", True)),
)
"""Steps of very different length, and links that take longer than they do."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", FORMS)
def test_laws_in_virtual_time(form: str, tmp_path: Path) -> None:
    sizes = (1, 2, 3, 4) if form in STRATEGIES else (3,)
    checked = check_strategy(form.split()[0], run_simulated, sizes, tmp_path, **FORMS[form])
    if build(form.split()[0], FORMS[form]).traits.deterministic and form != "single":
        # compares with threads, which give the bits of processes
        assert f"deterministic/{sizes[-1]}" in checked
    assert any(law.startswith("every_sample_once") for law in checked)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "single"])
def test_twice_in_virtual_time_gives_the_same_bits(form: str) -> None:
    """Also of strategies for which time decides, and whatever the cluster does to them."""
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
        run_simulated(run_toy_task, case, size=4, simulate_nodes=machines, cluster=RESTLESS)[0]["w"] for _ in range(2)
    )
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", ["sync", "kstep", "bmuf", "dpsgd", "delay_by_one"])
def test_time_decides_nothing_where_a_strategy_promises_so(name: str) -> None:
    """Another cluster, the same bits."""
    case = RunSpec(name, task=ToyTask(samples=48), epochs=1.0)
    calm, restless = (run_simulated(run_toy_task, case, size=4, **c)[0]["w"] for c in ({}, {"cluster": RESTLESS}))
    assert np.array_equal(calm, restless)


def test_time_decides_what_asynchronous_learners_end_with() -> None:
    case = RunSpec("adpsgd", task=ToyTask(samples=48), epochs=1.0)
    calm, restless = (run_simulated(run_toy_task, case, size=4, **c)[0]["w"] for c in ({}, {"cluster": RESTLESS}))
    assert not np.array_equal(calm, restless)


def test_strategies_from_outside_the_tree_run_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deterministic/3" in check_strategy("own_strategies:HalfWay", run_simulated, (2, 3), tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert "resume_is_exact/3" in check_strategy("my_strategy:Elastic", run_simulated, (3,), tmp_path)
    sys.modules.pop("my_strategy", None)


def test_a_strategy_that_breaks_a_law_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="got a second call"):
        check_strategy("own_strategies:TwoGradients", run_simulated, (2,), tmp_path)
    with pytest.raises(AssertionError, match="the mean moved"):
        check_strategy("own_strategies:LosesTheMean", run_simulated, (2,), tmp_path)
