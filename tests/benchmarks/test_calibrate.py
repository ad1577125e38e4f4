"""What `roundelay bench calibrate` writes is a cluster, and what it cannot do it says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate
from roundelay.errors import UsageError
from roundelay.simulate import cluster as clusters
from roundelay.simulate.run import simulate_timing

HERE = {
    "parameters": 1_000_000.0, "seconds_per_sample": 0.004, "seconds_per_step": 0.002, "step_s": 0.034, "meet_s": 0.001,
    "gbit_per_s": 16.0, "latency_us": 40.0, "cpu_s_per_gb": 0.5,
}  # fmt: skip
CABLE = {"gbit_per_s": 0.95, "latency_us": 150.0, "cpu_s_per_gb": 0.7, "mbit": 1000.0}


@pytest.mark.parametrize("link", [None, CABLE])
def test_a_written_file_reads_as_the_cluster_that_was_measured(link: dict[str, float] | None, tmp_path: Path) -> None:
    tree, found = calibrate.cluster_tree(HERE, link), {"files": {}}
    calibrate._write(tmp_path / "here.toml", tree, found, "here")
    made = clusters.load(tmp_path / "here.toml")
    assert found["files"] == {"here": str(tmp_path / "here.toml")}
    assert made.learners == 2
    assert len(set(made.machine_names())) == (1 if link is None else 2)
    assert made.learner.seconds_per_sample == pytest.approx(0.004)
    assert made.memory.exchange_gb_per_s == pytest.approx(8.0)  # 2 x 4 MB in 1 ms
    if link is not None:
        assert made.link.between.gbit_per_s == pytest.approx(0.95)


def test_predictions_follow_the_link() -> None:
    def rate(strategy: str, gbit: float) -> float:
        on = clusters.from_tree({"name": "here", **calibrate.cluster_tree(HERE, {**CABLE, "gbit_per_s": gbit})})
        return calibrate.predicted(on, strategy, HERE, 8, 60)

    assert rate("sync", 1.0) > 1.5 * rate("sync", 0.2)
    assert rate("adpsgd", 0.2) > 0.85 * rate("adpsgd", 1.0)
    assert rate("adpsgd", 0.2) > 2 * rate("sync", 0.2)


def test_what_travels_while_a_core_computes_costs_that_core() -> None:
    def rate(cost: float) -> float:
        tree: dict[str, Any] = calibrate.cluster_tree(HERE, CABLE)
        tree["link"]["between"]["cpu_s_per_gb"] = cost
        return simulate_timing(
            clusters.from_tree(tree), parameters=1_000_000, strategy="delay_by_one", batch=8, steps=60
        ).samples_per_s

    # 4 MB at 2 s per GB: 8 ms of a step of 34 ms, of which the transfer itself hides 33.7
    assert rate(0.0) / rate(2.0) == pytest.approx((0.034 + 0.008) / 0.034, rel=0.05)


@pytest.mark.parametrize("args", [["--links", "fast"], ["--links", "0"], ["--batch", "0"], ["--repeats", "0"]])
def test_mistakes_are_named(args: list[str]) -> None:
    with pytest.raises(UsageError):
        calibrate.main(args)


def test_a_turn_is_predicted_at_the_pace_that_was_measured_beside_it() -> None:
    """A machine that computes half as fast for a while: the measurement of that turn is half as large, and so is the guess."""
    on = clusters.from_tree({"name": "here", **calibrate.cluster_tree(HERE)})
    args = argparse.Namespace(batch=8, seconds=2.0, repeats=2)
    paces = iter([0.034] * len(calibrate.STRATEGIES) + [0.068] * len(calibrate.STRATEGIES))
    pace = 0.0

    def look() -> float:
        nonlocal pace
        pace = next(paces)
        return pace

    def run(strategy: str, steps: int) -> calibrate.Runs:
        cluster = calibrate.at_pace(on, pace / HERE["step_s"])
        rate = calibrate.predicted(cluster, strategy, HERE, 8, steps)
        samples = 8.0 * (steps + 1)  # the first step of each learner is not counted
        return [{"first": 0.0, "ended": 2 * 8.0 * steps / rate / 1.1, "samples": samples} for _ in range(2)]

    rows = calibrate.compare("drifting", on, HERE, args, look, run)
    assert [row["strategy"] for row in rows] == list(calibrate.STRATEGIES)
    for row in rows:
        assert row["range"][1] > 1.5 * row["range"][0]
        assert row["errors"] == pytest.approx([1 / 1.1 - 1] * 2, abs=1e-3)
