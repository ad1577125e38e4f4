"""The fault benchmarks on a small scale: deaths at store calls of leases, failure reports and finishing."""

from __future__ import annotations

import sys

import pytest
from command import Jobs
from paths import ROOT


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [("--first", "80", "--step", "50", "--most", "130"), ("--first", "20", "--step", "70", "--most", "90", "--second")],
)
def test_a_death_at_any_store_call_loses_nothing(options: tuple[str, ...], jobs: Jobs) -> None:
    command = [sys.executable, "-m", "benchmarks.kill_calls", "--ranks", "0", *options, "--json"]
    job = jobs.start(*command, PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    totals = job.end(280.0).expect(0).json["totals"]
    assert totals["kills"] == totals["runs"] == totals["exit_0"] == totals["exit_0_verified"] == 2, totals
