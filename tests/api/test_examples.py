"""The examples run as they are printed: alone, and the first two under torchrun. Everything has a time limit."""

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


def said(text: str) -> dict[int, tuple[int, int, float]]:
    """What every rank has printed: rank -> (size, steps, accuracy)."""
    return {int(r): (int(size), int(steps), float(right)) for r, size, _, steps, right in LINE.findall(text)}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs an example as a script in this process, which saves the seconds that torch takes to load."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


# 3000 samples in batches of 16 are 188 batches per epoch.


def test_join_any_module_alone(alone) -> None:
    size, steps, right = said(alone("join_any_module"))[0]
    assert (size, steps) == (1, 12 * 188)
    assert right > 0.9


@pytest.mark.dist
def test_join_any_module_on_two_learners_shares_the_batches(jobs: Jobs) -> None:
    script = str(EXAMPLES / "join_any_module.py")
    metrics = said(jobs.start(TORCHRUN, "--standalone", "--nproc-per-node", "2", script).end(LIMIT_S).expect(0).out)
    assert set(metrics) == {0, 1}
    assert sum(steps for _, steps, _ in metrics.values()) == 12 * 188
    assert metrics[0][2] == metrics[1][2] > 0.9, "both hold the same average model"


def test_own_loader_alone(alone) -> None:
    size, steps, right = said(alone("own_loader"))[0]
    assert (size, steps) == (1, 8 * 188)
    assert right > 0.9


@pytest.mark.dist
def test_own_loader_on_two_learners_with_shards_of_unequal_size(jobs: Jobs) -> None:
    script = str(EXAMPLES / "own_loader.py")
    metrics = said(jobs.start(TORCHRUN, "--standalone", "--nproc-per-node", "2", script).end(LIMIT_S).expect(0).out)
    # 2000 samples for one and 1000 for the other: both take 125 steps per epoch, the other the last 62 without a batch
    assert {rank: steps for rank, (_, steps, _) in metrics.items()} == {0: 8 * 125, 1: 8 * 125}
    assert metrics[0][2] == metrics[1][2] > 0.9


def test_fit_a_task_alone(alone) -> None:
    found = re.search(r"'accuracy': ([\d.]+)", alone("fit_a_task"))
    assert found is not None
    assert float(found[1]) > 0.9


def test_my_strategy_keeps_the_laws_it_promises(alone) -> None:
    kept = set(re.findall(r"kept: (\S+)", alone("my_strategy")))
    assert {"alone_it_is_single/1", "twice_the_same_bits/2", "resuming_changes_nothing/3", "stragglers_drain/3"} <= kept


@pytest.mark.dist
def test_my_strategy_by_name_on_the_command_line(jobs: Jobs) -> None:
    """Task and strategy are found beside the TOML file, whatever the current folder."""
    beside = jobs.folder / "beside"
    beside.mkdir()
    for name in ("join_any_module.py", "fit_a_task.py", "my_strategy.py"):
        (beside / name).write_text((EXAMPLES / name).read_text())
    (beside / "spirals.toml").write_text('task = "fit_a_task:Spirals"\nbatch = 16\nepochs = 2\n')
    done = jobs.run(
        "train", "beside/spirals.toml", "strategy=my_strategy:Elastic", "strategy_options.tau=2", "learners=2", "run=run",
        "--json", timeout_s=LIMIT_S,
    ).expect(0)  # fmt: skip
    assert done.json["metrics"]["accuracy"] > 0.8
    assert {e["rank"] for e in jobs.events(kind="summary") if e["steps"] == 188} == {0, 1}
