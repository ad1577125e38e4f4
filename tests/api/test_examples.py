"""Run the examples in one process, and the first two under torchrun, with a time limit."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from command import TORCHRUN, Jobs
from paths import ROOT

EXAMPLES = ROOT / "examples"
LIMIT_S = 90.0
LINE = re.compile(r"rank (\d+) of (\d+): (?:(\d+) batches, )?(\d+) steps, accuracy ([\d.]+)")


def results(text: str) -> dict[int, tuple[int, int, float]]:
    """Parse the output of all ranks: rank -> (size, steps, accuracy)."""
    return {int(r): (int(size), int(steps), float(accuracy)) for r, size, _, steps, accuracy in LINE.findall(text)}


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs an example as a script in this process, where torch is already imported."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


# 3000 samples in batches of 16 are 188 batches per epoch.


def test_join_any_module_in_one_process(run_example) -> None:
    size, steps, accuracy = results(run_example("join_any_module"))[0]
    assert (size, steps) == (1, 12 * 188)
    assert accuracy > 0.9


@pytest.mark.dist
def test_two_ranks_share_the_batches_of_join_any_module(jobs: Jobs) -> None:
    script = str(EXAMPLES / "join_any_module.py")
    metrics = results(jobs.start(TORCHRUN, "--standalone", "--nproc-per-node", "2", script).end(LIMIT_S).expect(0).out)
    assert set(metrics) == {0, 1}
    assert sum(steps for _, steps, _ in metrics.values()) == 12 * 188
    assert metrics[0][2] == metrics[1][2] > 0.9, "both ranks hold the same average model"


def test_own_loader_in_one_process(run_example) -> None:
    size, steps, accuracy = results(run_example("own_loader"))[0]
    assert (size, steps) == (1, 8 * 188)
    assert accuracy > 0.9


@pytest.mark.dist
def test_own_loader_on_two_ranks_with_uneven_shards(jobs: Jobs) -> None:
    script = str(EXAMPLES / "own_loader.py")
    metrics = results(jobs.start(TORCHRUN, "--standalone", "--nproc-per-node", "2", script).end(LIMIT_S).expect(0).out)
    # 2000 samples on rank 0 and 1000 on rank 1: both take 125 steps per epoch, rank 1 the last 62 without a batch
    assert {rank: steps for rank, (_, steps, _) in metrics.items()} == {0: 8 * 125, 1: 8 * 125}
    assert metrics[0][2] == metrics[1][2] > 0.9


def test_fit_a_task_in_one_process(run_example) -> None:
    match = re.search(r"'accuracy': ([\d.]+)", run_example("fit_a_task"))
    assert match is not None
    assert float(match[1]) > 0.9


def test_my_strategy_passes_its_checks(run_example) -> None:
    passed = set(re.findall(r"passed: (\S+)", run_example("my_strategy")))
    assert any("single" in name for name in passed), passed
    assert any("deterministic" in name or "twice" in name for name in passed), passed
    assert any("resum" in name for name in passed), passed


@pytest.mark.dist
def test_my_strategy_by_name_on_the_command_line(jobs: Jobs) -> None:
    """Task and strategy are imported from the folder of the TOML file, in any current folder."""
    folder = jobs.folder / "settings"
    folder.mkdir()
    for name in ("join_any_module.py", "fit_a_task.py", "my_strategy.py"):
        (folder / name).write_text((EXAMPLES / name).read_text())
    (folder / "spirals.toml").write_text('task = "fit_a_task:Spirals"\nbatch = 16\nepochs = 2\n')
    result = jobs.run(
        "train", "settings/spirals.toml", "strategy=my_strategy:Elastic", "strategy_options.tau=2", "learners=2", "run=run",
        "--json", timeout_s=LIMIT_S,
    ).expect(0)  # fmt: skip
    assert result.json["metrics"]["accuracy"] > 0.8
    assert {e["rank"] for e in jobs.events(kind="summary") if e["steps"] == 188} == {0, 1}
