"""The job-per-iteration baseline: the arithmetic of `kstep` and the rules of Kaldi's scripts, called as functions."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.averaging import AveragingCase, draw, gains, summed, table
from packed import corpus, packed
from paths import ROOT
from safetensors.torch import load_file, save_file

from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.recipes.packed_task import PackedTask

SCRIPT = ROOT / "benchmarks" / "job_per_iteration.py"
JOBS, STEPS, BATCH, RATE = 2, 4, 4, 0.2


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("job_per_iteration", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def in_this_process(what: str, folder: Path, orders: list[dict[str, Any]]) -> None:
        for order in orders:
            assert getattr(module, what)(json.loads(json.dumps(order))) == 0

    module.launch = in_this_process  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> PackedTask:
    folder = tmp_path_factory.mktemp("jobs")
    paths = corpus(folder)
    archive = packed(folder / "archive", paths, context=2)
    return PackedTask(archive=str(archive), window=21, context=2, model="tiny", hidden=5, bottleneck=4, **paths)


def arguments(task: PackedTask, folder: Path, **changes: Any) -> argparse.Namespace:
    torch.manual_seed(0)
    task.build().save(folder / "first")  # type: ignore[operator]
    settings = {
        "archive": str(task.examples.archive.folder), "model": str(folder / "first"), "out": str(folder / "out"),
        "steps": STEPS, "batch": BATCH,
        "epochs": 1.0, "jobs_initial": JOBS, "jobs_final": JOBS, "rate": RATE / JOBS, "rate_final": 0.0,
        "schedule": "cosine", "warmup_epochs": 0.2, "momentum": 0.5, "clip": 1.0, "optimizer": "sgd", "best_first": 0,
        "reject": 1.0, "seed": 0,
    }  # fmt: skip
    return argparse.Namespace(**{**settings, **changes})


@pytest.mark.parametrize("optimizer", ["sgd", "ngsgd"])
def test_jobs_end_where_persistent_learners_end(script: Any, task: PackedTask, tmp_path: Path, optimizer: str) -> None:
    results = script.run(arguments(task, tmp_path, optimizer=optimizer))
    assert results["iterations"] == -(-task.samples // (JOBS * BATCH * STEPS))
    # `ngsgd` keeps its factors over an average where a job forgets them: forgotten here, too, for this comparison
    config = TrainConfig(
        strategy="kstep", strategy_options={"K": STEPS, "state": "reset"}, deterministic_reduce=True, schedule="cosine",
        warmup_epochs=0.2, max_grad_norm=1.0, epochs=1.0, batch=BATCH, lr=RATE, momentum=0.5, optimizer=optimizer,
        run=str(tmp_path / "run"), eval_at_checkpoint=False, progress="none", checkpoint_every_epochs=100,
    )  # fmt: skip

    def learn(context: DistributedContext) -> None:
        train(task, context, config)

    run_threads(learn, size=JOBS)
    jobs, learners = (load_file(str(tmp_path / p / "model.safetensors")) for p in ("out/final", "run"))
    first = load_file(str(tmp_path / "first" / "model.safetensors"))
    for name in first:
        assert torch.allclose(jobs[name], learners[name], atol=2e-5), name
        assert not torch.allclose(jobs[name], first[name], atol=1e-4), name


def test_jobs_ramp_up_and_see_every_example_once(script: Any, task: PackedTask, tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    work = script.job

    def noted(order: dict[str, Any]) -> int:
        seen.append((order["position"], order["jobs"], order["job"]))
        return int(work(order))

    script.job = noted
    try:
        script.run(arguments(task, tmp_path, jobs_initial=1, jobs_final=3, steps=2, rate_final=RATE / 20))
    finally:
        script.job = work
    jobs = [count for _, count, number in seen if number == 0]
    assert jobs[0] == 1
    assert jobs[-1] == 3
    assert jobs == sorted(jobs)
    starts = [position for position, _, number in seen if number == 0]
    assert all(b - a == 2 * BATCH * count for a, b, count in zip(starts, starts[1:], jobs, strict=False))


def test_rates_are_multiplied_with_the_jobs_and_decay(script: Any) -> None:
    order = {"rate": 0.1, "rate_final": 0.001, "jobs": 4, "position": 50, "total": 100}
    assert script.rate_at(order, 50, 1.0) == pytest.approx(4 * 0.1 * 0.1)
    assert script.rate_at({**order, "rate_final": 0.0}, 50, 0.7) == pytest.approx(4 * 0.1 * 0.7)


@pytest.mark.parametrize(
    ("objectives", "best", "expected"),
    [([1.0, 1.5, 3.0], False, 1.5), ([1.0, 1.5, 3.0], True, 1.0), ([1.0, float("nan"), 1.2], False, 2.0)],
)
def test_diverged_jobs_are_rejected(script: Any, tmp_path: Path, objectives: list[float], best: bool, expected: float) -> None:
    for number, objective in enumerate(objectives):
        (tmp_path / str(number)).mkdir()
        save_file({"w": torch.tensor([float(number + 1)])}, str(tmp_path / str(number) / "model.safetensors"))
        (tmp_path / str(number) / "model.json").write_text("{}")
        (tmp_path / str(number) / "note.json").write_text(json.dumps({"objective": objective, "steps": 3}))
    inputs = [str(tmp_path / str(n)) for n in range(3)]
    script.average({"inputs": inputs, "out": str(tmp_path / "out"), "best": best, "reject": 1.0, "iteration": 0})
    assert float(load_file(str(tmp_path / "out" / "model.safetensors"))["w"]) == expected


# ------------------------------------------------------------------------------------------------------- the report


def row(system: str, frames: int, seconds: float, repeat: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "system": system, "frames_per_averaging": frames, "optimizer": "sgd", "seed": 0, "repeat": repeat, "seconds": seconds,
        "training_share": 10 / seconds, "startup_s": 1.0, "logprob": -1.0, "wer": None, **more,
    }  # fmt: skip


def test_gains_are_computed_and_charts_are_drawn(tmp_path: Path) -> None:
    rows = []
    for frames, seconds in ((1000, 50.0), (10_000, 22.0), (100_000, 14.0)):
        spent = {"imports_s": (seconds - 10) / 2, "files_s": 0.5, "data_s": 0.5, "rest_s": 0.0}
        rows += [row("job", frames, seconds + r, r, **spent) for r in (-1, 0, 1)]
        rows.append(row("overlap", frames, 11.0))
    results = gains(rows)
    assert [g["gain"] for g in results] == [pytest.approx(1 - 11 / s, abs=1e-4) for s in (50, 22, 14)]
    assert results[1]["gain_without_imports"] == pytest.approx(1 - 11 / 16, abs=1e-4)
    assert [bool(g.get("nearest_to_the_paper")) for g in results] == [False, True, False]
    report = {"results": summed(rows), "gains": results, "learners": 2, "batch": 4, "epochs": 1.0, "lr": 0.1}
    draw(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count('<path class="line') == 6  # seconds, shares and log-probabilities of two systems, no word error rates
    assert "http" not in page
    assert "| 10,000 | job | sgd | 22.0 |" in table(report)
    assert AveragingCase("job", 1000).name == "job-1000-sgd-seed0-0"
