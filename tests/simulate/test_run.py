"""The commands `roundelay simulate` and `roundelay list clusters`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from roundelay.cli import main
from roundelay.metrics.events import read_events

CLUSTER = """
[[machines]]
count = 2
learners = 2

[learner]
seconds_per_sample = 0.001
jitter = { kind = "gaussian", spread = 0.1 }

[link.between]
gbit_per_s = 10.0
latency_us = 50.0
"""
TASK = """
task = "tasks:Dots"
batch = 4
lr = 0.05
progress = "none"
epochs = 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(CLUSTER)
    (tmp_path / "dots.toml").write_text(TASK)
    return tmp_path


def run_command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main.main(list(args))
    out, err = capsys.readouterr()
    return code, out, err


def simulated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run_command(capsys, "simulate", *args, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def test_timing_only_mode_gives_metrics_and_a_run_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    required = {"hours", "samples_per_s", "efficiency", "staleness_mean", "bytes_per_step", "digest"}
    result = simulated(capsys, "small.toml", "strategy=adpsgd", "batch=16", "steps=20", "parameters=1000000", "run=r")
    assert required <= set(result)
    assert result["samples"] == 20 * 16 * 4
    assert 0 < result["efficiency"] <= 1.01
    again = simulated(capsys, "small.toml", "strategy=adpsgd", "batch=16", "steps=20", "parameters=1000000", "run=again")
    assert result["digest"] == again["digest"]
    events = list(read_events(here / "r" / "events.jsonl"))
    assert {e["rank"] for e in events if e["event"] == "steps"} == {0, 1, 2, 3}
    assert max(e["time"] for e in events) <= result["elapsed_s"] + 1e-3  # virtual time
    assert sum(e["samples"] for e in events if e["event"] == "steps") == result["samples"]
    assert tomllib.loads((here / "r" / "config.toml").read_text())["strategy"] == "adpsgd"


def test_events_say_how_often_weights_are_exchanged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rare = ("strategy=adpsgd", "batch=16", "steps=80", "parameters=1000000", "steps_per_exchange=8", "log_every_s=0.1", "run=r")
    simulated(capsys, "small.toml", *rare)
    events = list(read_events(here / "r" / "events.jsonl"))
    for rank in range(4):
        own = [e for e in events if e["event"] == "steps" and e["rank"] == rank and "exchange_gaps" in e]
        total = next(e for e in events if e["event"] == "summary" and e["rank"] == rank)
        longest = [max(map(int, e["exchange_gaps"])) for e in own]
        assert len(own) > 2
        assert [e["longest_gap"] for e in own] == [max(longest[: n + 1]) for n in range(len(own))], "since the start"
        assert total["longest_gap"] == max(longest) >= 2
        assert 0 < total["gap_p99"] <= total["longest_gap"]
        assert total["exchanges_per_gradient"] == pytest.approx(total["exchanges"] / total["steps"], abs=1e-4)
        assert 0 < total["exchanges_per_gradient"] < 0.5
    simulated(capsys, "small.toml", "strategy=sync", "batch=16", "steps=5", "parameters=1000000", "run=s")
    synchronous = list(read_events(here / "s" / "events.jsonl"))
    assert not any({"longest_gap", "gap_p99", "exchanges_per_gradient"} & set(e) for e in synchronous)


@pytest.mark.parametrize("strategy", ["sync", "adpsgd", "asgd"])
def test_an_unlimited_loader_is_equal_to_a_very_fast_one(strategy: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "fast.toml").write_text(CLUSTER + "[loader]\nsamples_per_s = 1e12\n")
    args = (f"strategy={strategy}", "batch=16", "steps=30", "parameters=1000000")
    without, fast = (simulated(capsys, cluster, *args, f"run={cluster}-run") for cluster in ("small.toml", "fast.toml"))
    ahead_s = 0.0 if strategy == "sync" else 2 * 16 * 0.001 * 1.5  # the two batches that a loader leases ahead
    assert without["elapsed_s"] == pytest.approx(fast["elapsed_s"], rel=1e-6, abs=ahead_s)
    assert without["samples"] == fast["samples"]


def test_a_thousand_learners_are_simulated_without_spectra(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "large.toml").write_text(CLUSTER.replace("count = 2", "count = 512"))
    args = ("strategy=adpsgd", "batch=16", "steps=3", "parameters=1000000", "run=r")
    result = simulated(capsys, "large.toml", *args)
    assert (result["learners"], result["samples"], result["steps"]) == (1024, 1024 * 3 * 16, 1024 * 3)
    mixing = next(e for e in read_events(here / "r" / "events.jsonl") if e["event"] == "start")["mixing"]
    assert len(mixing["weights"]) == 1024
    assert "gap" not in mixing  # computed for at most 256 learners, because it takes longer than the simulation


def test_the_text_output_draws_where_the_time_goes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(capsys, "simulate", "small.toml", "strategy=sync", "steps=10", "parameters=4000000", "run=r")
    assert code == 0
    for word in ("hours", "efficiency", "rank    3 |", "# gradient", "staleness", "compute"):
        assert word in out
    assert "#" in out.split("rank    0 |")[1].splitlines()[0]
    assert "~" in out.split("rank    0 |")[1].splitlines()[0]


def test_hours_are_for_the_whole_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, "small.toml", "strategy=sync", "steps=10", "samples=1000000", "epochs=16", "run=r")
    assert result["hours"] == pytest.approx(16e6 / result["samples_per_s"] / 3600, rel=1e-6)


def test_a_task_is_trained_in_virtual_time(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("small.toml", "task=dots.toml", "strategy=adpsgd", "epochs=4")
    result = simulated(capsys, *args, "run=r")
    again = simulated(capsys, *args, "run=again")
    assert result["digest"] == again["digest"]
    assert (here / "r" / "model.safetensors").read_bytes() == (here / "again" / "model.safetensors").read_bytes()
    evaluations = [e for e in read_events(here / "r" / "events.jsonl") if e["event"] == "evaluation"]
    assert len(evaluations) >= 4
    assert evaluations[-1]["metrics"]["loss"] < evaluations[0]["metrics"]["loss"]
    assert [e["time"] for e in evaluations] == sorted(e["time"] for e in evaluations)
    assert evaluations[-1]["time"] <= result["elapsed_s"] + 1e-3
    assert any((here / "r" / "ckpt").glob("samples-*"))


def test_a_task_can_be_resumed_in_virtual_time(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("small.toml", "task=dots.toml", "strategy=sync", "deterministic_reduce=true")
    whole = simulated(capsys, *args, "epochs=2", "run=whole")
    simulated(capsys, *args, "epochs=1", "run=half")
    rest = simulated(capsys, *args, "epochs=2", "run=half", "resume=auto")
    assert rest["digest"] == whole["digest"]


def test_a_user_strategy_is_simulated(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, "small.toml", "strategy=own_strategies:HalfWay", "strategy_options.times=2", "steps=5", "run=r")
    assert result["bytes_per_step"] > 0


def test_clusters_are_listed_with_the_source_of_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(capsys, "list", "clusters", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["v100-8x8"]["learners"] == 64
    assert "100 Gbit/s" in result["v100-8x8"]["sources"]["link.between.gbit_per_s"]
    code, plain, _ = run_command(capsys, "list", "clusters")
    assert all(name in plain for name in result)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("nowhere",), "unknown cluster 'nowhere'"),
        (("v100-8x9",), "did you mean 'v100-8x8'"),
        (("small.toml", "learners=5"), "learners must be 1 to 4 on cluster 'small' (got 5)"),
        (("small.toml", "batch=0"), "batch must be >= 1 (got 0)"),
        (("small.toml", "steps=-3"), "steps must be >= 0 (got -3)"),
        (("small.toml", "stepps=3"), "did you mean 'steps'"),
        (("small.toml", "batch=many"), "batch must be an integer (got 'many')"),
        (("small.toml", "strategy=adspgd"), "did you mean 'adpsgd'"),
        (("small.toml", "model=swb"), "unknown model 'swb'"),
        (("small.toml", "strategy=single"), "must run on one rank"),
        (("small.toml", "strategy"), "'strategy' is not of the form key=value"),
        (("v100-8x8", "parameters=5000000000"), "GB per learner"),
        (("small.toml", "task=none.toml"), "cannot read none.toml"),
    ],
)
def test_mistakes_are_named(here: Path, args: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_command(capsys, "simulate", *args, "--json")
    assert code == 2, err
    assert complaint in err
    assert "Traceback" not in err
