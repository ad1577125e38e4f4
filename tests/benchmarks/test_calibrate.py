"""Predictions of calibrated clusters, and the errors of `benchmarks.calibrate`."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import calibrate
from roundelay.errors import UsageError
from roundelay.simulate import cluster as clusters
from roundelay.simulate.run import simulate_timing

MACHINE = {
    "parameters": 1_000_000.0, "seconds_per_sample": 0.004, "seconds_per_step": 0.002, "step_s": 0.034, "exchange_s": 0.001,
    "gbit_per_s": 16.0, "latency_us": 40.0, "cpu_s_per_gb": 0.5,
}  # fmt: skip
LINK = {"gbit_per_s": 0.95, "latency_us": 150.0, "cpu_s_per_gb": 0.7, "mbit": 1000.0}


def test_predictions_depend_on_the_link() -> None:
    def rate(strategy: str, gbit: float) -> float:
        on = clusters.from_tree({"name": "here", **calibrate.cluster_tree(MACHINE, {**LINK, "gbit_per_s": gbit})})
        return calibrate.predicted_rate(on, strategy, MACHINE, 8, 60)

    assert rate("sync", 1.0) > 1.5 * rate("sync", 0.2)
    assert rate("adpsgd", 0.2) > 0.85 * rate("adpsgd", 1.0)
    assert rate("adpsgd", 0.2) > 2 * rate("sync", 0.2)


def test_transfers_during_computation_cost_cpu() -> None:
    def rate(cost: float) -> float:
        tree: dict[str, Any] = calibrate.cluster_tree(MACHINE, LINK)
        tree["link"]["between"]["cpu_s_per_gb"] = cost
        return simulate_timing(
            clusters.from_tree(tree), parameters=1_000_000, strategy="delay_by_one", batch=8, steps=60
        ).samples_per_s

    # 4 MB at 2 s per GB: 8 ms of a step of 34 ms, of which the transfer itself hides 33.7
    assert rate(0.0) / rate(2.0) == pytest.approx((0.034 + 0.008) / 0.034, rel=0.05)


@pytest.mark.parametrize("args", [["--links", "fast"], ["--links", "0"], ["--batch", "0"], ["--repeats", "0"]])
def test_wrong_options_raise_usage_errors(args: list[str]) -> None:
    with pytest.raises(UsageError):
        calibrate.main(args)


def test_a_run_is_predicted_at_the_pace_measured_before_it() -> None:
    """While the machine is half as fast, both the measured and the predicted rate are half as large."""
    on = clusters.from_tree({"name": "here", **calibrate.cluster_tree(MACHINE)})
    args = argparse.Namespace(batch=8, seconds=2.0, repeats=2)
    paces = iter([0.034] * len(calibrate.STRATEGIES) + [0.068] * len(calibrate.STRATEGIES))
    pace = 0.0

    def look() -> float:
        nonlocal pace
        pace = next(paces)
        return pace

    def run(strategy: str, steps: int) -> calibrate.Runs:
        cluster = calibrate.at_pace(on, pace / MACHINE["step_s"])
        rate = calibrate.predicted_rate(cluster, strategy, MACHINE, 8, steps)
        samples = 8.0 * (steps + 1)  # the first step of each learner is not counted
        return [{"first": 0.0, "ended": 2 * 8.0 * steps / rate / 1.1, "samples": samples} for _ in range(2)]

    rows = calibrate.compare("drifting", on, MACHINE, args, look, run)
    assert [row["strategy"] for row in rows] == list(calibrate.STRATEGIES)
    for row in rows:
        assert row["range"][1] > 1.5 * row["range"][0]
        assert row["errors"] == pytest.approx([1 / 1.1 - 1] * 2, abs=1e-3)
