"""The benchmarks in virtual time: their arithmetic, and one small run of each."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.sim_probe import ResultCache
from command import Jobs, descendants
from paths import ROOT

from benchmarks import BENCHES, batches, ksteps, published_scaling, stragglers, theory
from roundelay import topology

IMPORT_CPU_S = 8.0
"""CPU time above that of imports: a process that has used more computes a cell, which takes half a minute."""
TINY = {"samples": 320, "held_out": 16, "hidden": 4, "frames": 4, "phones": 3, "features": 4}


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_is_a_command_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert status.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "example:" in text


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_agreement_played_is_agreement_in_closed_form() -> None:
    for row in published_scaling.agreement((16, 32)):
        assert abs(row["ring_played"] - row["ring_closed_form"]) <= 2
        assert row["random_played"] == pytest.approx(row["random_closed_form"], rel=0.25)
    assert published_scaling.agreement((16,))[0]["T1_closed_form"] == 89


def test_a_straggler_slows_synchronous_strategies_only() -> None:
    rows = {
        r["contestant"]: r["times"] for r in published_scaling.straggler(40, (1, 10))
    }  # on a ring it takes 16 until all feel it
    for waits in ("sync", "dpsgd", "delay_by_one", "kstep, K = 8"):
        assert rows[waits]["10"] > 4
    for name in ("adpsgd, ring", "adpsgd, random_ring"):
        assert rows[name]["10"] < 1.3


def test_one_gpu_takes_the_published_time() -> None:
    row = published_scaling.speedup(4, 1)[0]
    assert row["hours"] == pytest.approx(row["published_hours"], rel=0.05)


# -- theory ------------------------------------------------------------------------------------------------------------


def test_exponents_are_recovered() -> None:
    values = {(K, L): 3.0 * K**-0.5 * L**-0.4 for K in (10, 100, 1000) for L in (1, 2, 8)}
    assert theory.fit(values) == (pytest.approx(-0.5), pytest.approx(-0.4))


def test_the_engine_contracts_as_its_matrices_say() -> None:
    assert theory.contraction("adpsgd", "ring", 8) == pytest.approx(topology.contraction("ring", 8), rel=0.02)
    assert theory.contraction("dpsgd", "ring", 8) == pytest.approx(theory.predicted_contraction("dpsgd", "ring", 8), rel=0.02)


def test_the_whole_gradient_is_that_of_the_loss() -> None:
    task = theory.NonConvexRegression(samples=4)
    module = task.build()
    w = torch.from_numpy(np.random.default_rng(0).standard_normal(task.features))
    with torch.no_grad():
        module.weight.copy_(w[None])  # type: ignore[operator, union-attr]
    task.loss(module, theory.cached_data(task)).backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(module.weight.grad[0], task.gradient(w))  # type: ignore[index, union-attr]


def test_more_rounds_and_more_learners_bring_a_smaller_gradient() -> None:
    few, many = (theory.gradient_norm("sync", "ring", K, 1, 0) for K in (32, 512))
    assert many < few
    assert theory.gradient_norm("adpsgd", "ring", 128, 4, 0) < theory.gradient_norm("adpsgd", "ring", 128, 1, 0)


# -- with learning -----------------------------------------------------------------------------------------------------


def test_stragglers_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "TASK", replace(stragglers.TASK, **TINY))
    monkeypatch.setattr(stragglers, "CONTESTANTS", {k: stragglers.CONTESTANTS[k] for k in ("adpsgd, ring", "sync")})
    report = stragglers.table((1.0, 10.0), 1.0)
    rows = {(r["contestant"], r["slowdown"]): r for r in report["results"]}
    assert rows["sync", 10.0]["virtual_s"] > 5 * rows["sync", 1.0]["virtual_s"]
    assert rows["sync", 10.0]["loss"] == pytest.approx(rows["sync", 1.0]["loss"], rel=1e-5)  # only time differs
    assert rows["adpsgd, ring", 10.0]["virtual_s"] < rows["sync", 10.0]["virtual_s"]
    assert rows["adpsgd, ring", 10.0]["steps_of_the_slow_one"] < rows["adpsgd, ring", 1.0]["steps_of_the_slow_one"]
    assert stragglers.show(report).count("\n") == 5


def test_ksteps_counts_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ksteps, "TASK", replace(ksteps.TASK, **TINY))
    monkeypatch.setattr(ksteps, "ASGD_RATES", (0.5,))
    report = ksteps.table((4,), (1, 5), 2.0, 1)
    rows = {r["contestant"]: r for r in report["results"]}
    assert rows["K = 1"]["averages"] == 10
    assert rows["K = 5"]["averages"] == 2
    assert rows["K = 1"]["megabytes_per_learner"] > 3 * rows["K = 5"]["megabytes_per_learner"]
    assert all(math.isfinite(r["loss"]) for r in rows.values())
    verdict = report["verdicts"][0]
    assert verdict["best_fixed_loss"] == min(rows["K = 1"]["loss"], rows["K = 5"]["loss"])
    assert "4 learners" in ksteps.show(report)


def test_the_grid_is_resumed_and_keeps_diverged_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[batches.Cell] = []

    def run(cell: batches.Cell) -> dict[str, Any]:
        ran.append(cell)
        look = {"time_s": 0.0, "samples": 1, "loss": 1.0, "spread": 0.1, "effective": 0.9}
        return {"loss": None if cell.factor == 2.0 else 1.0 / cell.factor, "rate": 1.0, "spread": 0.1, "looks": [look]}

    monkeypatch.setattr(batches, "run", run)
    report = batches.Grid(ResultCache(tmp_path / "kept.jsonl"), 1, False).table()
    once = len(ran)
    assert {r["best_factor"] for r in report["results"]} == {1.0}
    assert all(r["by_factor"]["2.0"] is None for r in report["results"])
    assert len({cell.key for cell in ran}) == once
    again = batches.Grid(ResultCache(tmp_path / "kept.jsonl"), 1, False).table()
    assert len(ran) == once
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(report))
    assert max(c.batch for c in ran) * 16 * 500 <= batches.EPOCHS * batches.TASK.samples  # at least 500 updates


def test_a_cell_of_the_grid_learns_and_the_control_has_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "TASK", replace(batches.TASK, **TINY))
    cells = [
        batches.Cell("adpsgd, random_ring", 4, 0.5, epochs=1.0, samples=320),
        batches.Cell(batches.NOISY, 4, 0.5, noise=0.1, epochs=1.0, samples=320),
        batches.Cell(batches.NOISY, 4, 0.5, noise=0.0, epochs=1.0, samples=320),
        batches.Cell("sync", 4, 0.5, epochs=1.0, samples=320),
    ]
    report = [batches.run(cell) for cell in cells]
    losses = [one["loss"] for one in report]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[1] != losses[2]
    assert losses[2] == pytest.approx(losses[3], rel=1e-4)  # without noise it is sync
    assert report[0]["spread"] > 1e-3
    assert report[3]["spread"] < 1e-6  # looked at between rounds, never in the middle of one


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, or 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_grid_and_its_processes(number: int, jobs: Jobs) -> None:
    job = jobs.start(sys.executable, "-m", "benchmarks.batches", "--jobs", "2", "--keep", "kept.jsonl", PYTHONPATH=str(ROOT))
    job.until(lambda: sum(cpu_seconds(pid) > IMPORT_CPU_S for pid in descendants(job.process.pid)) >= 2, "two cells", 120.0)
    children = list(descendants(job.process.pid))
    job.signal(number)
    job.end(20.0).expect(130)  # a cell takes half a minute and more
    assert "interrupted" in job.err
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "a child outlived the command"
        time.sleep(0.05)
