"""Plans: metrics of every strategy, the recommendation, the cost of a slow rank, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from roundelay.cli.main import main
from roundelay.errors import UsageError
from roundelay.simulate.cluster import (
    Cluster,
    ComputeModel,
    LinkModel,
    LinkModels,
    MachineGroup,
    StragglerModel,
)
from roundelay.simulate.plan import Choice, PlannedJob, choices, evaluate_choice, learner_counts, mixing, plan, stable_rate

JOB = PlannedJob(parameters=1_000_000, samples=10_000, batch=16)


def cluster(machines: int, each: int, gbit: float, **options: Any) -> Cluster:
    return Cluster(
        machines=(MachineGroup(machines, each),), learner=ComputeModel(seconds_per_sample=1e-3),
        link=LinkModels(inside=LinkModel(200.0), between=LinkModel(gbit)), **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def slow_network() -> dict[str, Any]:
    return plan(cluster(4, 1, 0.5), JOB)


def test_every_strategy_has_metrics(slow_network: dict[str, Any]) -> None:
    rows = {r["name"]: r for r in slow_network["strategies"]}
    assert set(rows) == {c.name for c in choices(cluster(4, 1, 0.5))}
    assert rows["single"]["hours"] == pytest.approx(10_000 * 1e-3 / 3600, rel=0.01)
    assert rows["sync"]["bytes_per_step"] == pytest.approx(2 * 3 / 4 * 4e6, rel=0.05)
    assert rows["sync"]["gap"] == 1.0
    assert rows["dpsgd"]["stable_rate"] == pytest.approx(2 / 3, abs=0.01)
    assert rows["asgd"]["staleness"] > 1
    assert rows["sync"]["memory_gb"] + rows["sync"]["host_memory_gb"] > 4e6 * 3 / 1e9


def test_sync_is_not_recommended_on_a_slow_network(slow_network: dict[str, Any]) -> None:
    rows = {r["name"]: r for r in slow_network["strategies"]}
    recommended = slow_network["recommendation"]
    assert recommended["strategy"] != "sync"
    assert rows["sync"]["hours"] > 1.05 * min(r["hours"] for r in rows.values())
    assert recommended["reason"]
    assert recommended["learners"] in (1, 2, 4)
    assert recommended["batch"] >= JOB.batch


def test_sync_is_recommended_on_a_fast_network_of_equal_learners() -> None:
    recommended = plan(cluster(2, 1, 1e6), replace(JOB, parameters=1000))["recommendation"]
    assert (recommended["strategy"], recommended["learners"], recommended["batch"]) == ("sync", 2, 16)
    assert recommended["K"] == 1


def test_adpsgd_is_recommended_with_a_straggler() -> None:
    result = plan(cluster(4, 1, 1000.0, straggler=(StragglerModel(10.0, learner=1),)), JOB)
    assert result["recommendation"]["strategy"] == "adpsgd"


def test_mixing_and_stable_rates_are_those_of_the_matrices() -> None:
    gap, rounds = mixing(Choice("", "dpsgd"), 16)
    assert (gap, rounds) == (pytest.approx(0.0507, abs=1e-3), 89)
    assert mixing(Choice("", "hierarchical(adpsgd)", "random_ring"), 8)[1] < 20
    assert mixing(Choice("", "sync"), 16) == (1.0, 1)
    assert stable_rate(Choice("", "sync"), 16) == 2.0
    assert stable_rate(Choice("", "delay_by_one"), 16) == pytest.approx(1.0, abs=0.01)
    assert stable_rate(Choice("", "asgd"), 4) == pytest.approx(4 * 0.445, abs=0.01)
    assert learner_counts(cluster(6, 1, 1.0)) == [1, 2, 4, 6]


def test_a_model_that_fits_with_no_strategy_is_an_error() -> None:
    small = replace(cluster(2, 1, 10.0), learner=ComputeModel(seconds_per_sample=1e-3, memory_gb=0.013))
    assert evaluate_choice(small, JOB, Choice("single", "single"))["fits"]
    assert not evaluate_choice(small, JOB, Choice("sync", "sync"))["fits"]
    with pytest.raises(UsageError, match="GB per learner"):
        plan(replace(small, learner=replace(small.learner, memory_gb=16.0)), replace(JOB, parameters=10**11))


# -- the command -------------------------------------------------------------------------------------------------------


CLUSTER = """
[[machines]]
count = 2
learners = 1
[learner]
seconds_per_sample = 0.001
memory_gb = 1.0
[link.between]
gbit_per_s = 1.0
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "two.toml").write_text(CLUSTER)
    (tmp_path / "task.toml").write_text(
        'task = "roundelay.testing.tasks:SyntheticFrames"\nbatch = 8\nepochs = 2\n[task_options]\nsamples = 64\n'
    )
    return str(tmp_path / "task.toml"), f"cluster={tmp_path / 'two.toml'}"


def test_the_command_plans_a_task(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *files, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["job"]["samples"] == 64
    assert result["job"]["epochs"] == 2
    assert result["recommendation"]["strategy"]
    assert main(["plan", *files]) == 0
    assert "recommended: strategy=" in capsys.readouterr().out


def test_the_command_plans_a_recipe(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "src" / "roundelay" / "recipes" / "commands")
    assert main(["plan", recipe, files[1], "samples=1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["batch"] == 16
    assert main(["plan", recipe, files[1]]) == 2
    assert "samples=N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["parameters=100000000000"], "needs"),
        (["learners=99"], "(got 99)"),
        (["samples=0"], "samples must be >= 1 (got 0)"),
        (["model=nothing"], "unknown model preset 'nothing'"),
        (["strategi=sync"], "strategi"),
    ],
)
def test_wrong_settings_are_rejected(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], overrides: list[str], complaint: str
) -> None:
    assert main(["plan", *files, *overrides]) == 2
    assert complaint in capsys.readouterr().err


def test_a_plan_needs_a_known_cluster(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", files[0]]) == 2
    assert "cluster=NAME" in capsys.readouterr().err
    assert main(["plan", files[0], "cluster=v100-9x9"]) == 2
    assert "v100-8x8" in capsys.readouterr().err


# -- what if -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_run(tmp_path: Path) -> Path:
    """The events of a synchronous run of four ranks in which rank 2 takes three times as long."""
    (tmp_path / "config.toml").write_text('strategy = "sync"\nbatch = 10\n')
    lines = []
    for rank in range(4):
        own = 30.0 if rank == 2 else 10.0
        metrics = {"samples": 1000, "steps": 100, "own_s": own, "waiting_s": 31.0 - own, "elapsed_s": 31.0}
        lines.append(json.dumps({"event": "summary", "rank": rank, **metrics}))
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_what_if_a_rank_were_normal(slow_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--what-if", str(slow_run), "rank=2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["slowdown"] == pytest.approx(3.0)
    assert result["simulated_samples_per_s"] == pytest.approx(result["measured_samples_per_s"], rel=0.05)
    assert result["gain"] == pytest.approx(31 / 11, rel=0.1)
    assert main(["plan", "--what-if", str(slow_run), "rank=0"]) == 0
    assert "1.00 times as fast" in capsys.readouterr().out


def test_what_if_needs_a_run_and_a_rank(slow_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--what-if", str(slow_run)]) == 2
    assert main(["plan", "--what-if", str(slow_run), "rank=9"]) == 2
    assert main(["plan", "--what-if", str(tmp_path / "nowhere"), "rank=1"]) == 2
    (slow_run / "events.jsonl").write_text("")
    assert main(["plan", "--what-if", str(slow_run), "rank=1"]) == 3
    assert "(got 0)" in capsys.readouterr().err
