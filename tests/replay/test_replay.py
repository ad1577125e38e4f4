"""Replay of asynchronous runs on real backends: the same weights, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Jobs
from crew import Crew
from tasks import Dots

from roundelay.cli.main import main
from roundelay.core.update_log import FIELDS, FOLDER, Op
from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.errors import DataError, UsageError
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.replay.reader import read_run_log
from roundelay.replay.replay import Replay, check_settings
from roundelay.testing.tasks import SyntheticFrames

SMALL = SyntheticFrames(samples=240, held_out=8, hidden=6, frames=5)
CONFIG = TrainConfig(
    strategy="adpsgd",
    epochs=2,
    batch=4,
    lr=0.2,
    eval_at_checkpoint=False,
    progress="none",
    checkpoint_every_epochs=100,
)


def train_plain(context: DistributedContext, task: Any, config: TrainConfig) -> None:
    train(task, context, config)


def train_recorded(context: DistributedContext, task: Any, config: TrainConfig) -> None:
    train(task, context, config, record_settings={"seed": 0})


def recorded(runner: Any, run: Path, task: Any = SMALL, size: int = 4, machines: int = 0, **settings: Any) -> Any:
    """Record a run, replay it, and return the comparison."""
    config = replace(CONFIG, run=str(run), **settings)
    runner(train_recorded, task, config, size=size, simulate_nodes=machines)
    log = read_run_log(run)
    again = Replay(task, config, log)
    again.run()
    return again.compare(run)


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["threads", "shm", "torch", "auto"])
@pytest.mark.parametrize("topology", ["ring", "random_ring"])
def test_gossip_is_replayed_bit_for_bit(crew: Crew, tmp_path: Path, backend: str, topology: str) -> None:
    comparison = recorded(crew.on(backend), tmp_path, strategy="adpsgd", topology=topology)
    assert comparison["equal"], comparison
    assert comparison["steps"] == 120
    assert comparison["average_difference"] < 1e-6


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["threads", "shm", "torch"])
def test_a_parameter_server_is_replayed_bit_for_bit(crew: Crew, tmp_path: Path, backend: str) -> None:
    comparison = recorded(crew.on(backend), tmp_path, size=3, strategy="asgd")
    assert comparison["equal"], comparison


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["threads", "auto"])
def test_a_hierarchy_is_replayed_bit_for_bit(crew: Crew, tmp_path: Path, backend: str) -> None:
    comparison = recorded(crew.on(backend), tmp_path, machines=2, strategy="hierarchical(adpsgd)")
    assert comparison["equal"], comparison


@pytest.mark.dist
def test_dropout_adam_and_schedule_are_replayed(crew: Crew, tmp_path: Path) -> None:
    settings = {"optimizer": "adam", "lr": 0.01, "schedule": "cosine", "max_grad_norm": 1.0}
    comparison = recorded(crew.on("shm"), tmp_path, Dots(dropout=0.3), **settings)
    assert comparison["equal"], comparison


def test_another_order_gives_different_weights(tmp_path: Path) -> None:
    """The comparison can fail: with an update and an exchange swapped, the weights differ."""
    config = replace(CONFIG, run=str(tmp_path))
    run_threads(train_recorded, SMALL, config, size=2)
    log = read_run_log(tmp_path)
    order = log.orders[0]
    at = next(n for n in range(2, len(order) - 2) if order[n].kind is Op.UPDATE and order[n + 1].kind is Op.PAIR_AVERAGE)
    order[at], order[at + 1] = order[at + 1], order[at]
    again = Replay(SMALL, config, log)
    again.run()
    comparison = again.compare(tmp_path)
    assert not comparison["equal"]
    assert comparison["largest_difference"] > 0


def test_without_record_order_there_is_no_log(tmp_path: Path) -> None:
    run_threads(train_plain, SMALL, replace(CONFIG, run=str(tmp_path)), size=2)
    assert not (tmp_path / FOLDER).exists()
    with pytest.raises(DataError, match="no recorded order"):
        read_run_log(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    run_threads(train_recorded, SMALL, replace(CONFIG, run=str(folder)), size=2)
    return folder


def damaged(run: Path, tmp_path: Path, name: str, change: Any) -> Path:
    """Copy a log with one file changed."""
    (tmp_path / FOLDER).mkdir()
    for file in (run / FOLDER).iterdir():
        data = file.read_bytes()
        (tmp_path / FOLDER / file.name).write_bytes(change(data) if file.name == name else data)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("rank-001.bin", lambda data: data[:-5], "truncated"),
        ("rank-001.bin", lambda data: data[: -8 * FIELDS], "incomplete"),
        ("rank-000.bin", lambda data: data[8 * FIELDS * 20 :], "incomplete"),
        ("rank-000.bin", lambda data: np.full(FIELDS, 99, dtype="<i8").tobytes() + data, "unknown operation"),
        ("rank-001.json", lambda data: data.replace(b'"complete": true', b'"complete": false'), "did not end normally"),
        ("rank-001.json", lambda data: data[:30], "missing or broken"),
        ("rank-001.json", lambda data: data.replace(b'"seed": 0', b'"seed": 1'), "different runs"),
        ("rank-000.safetensors", lambda data: data[:10], "missing or broken"),
    ],
)
def test_an_incomplete_log_is_an_error(run: Path, tmp_path: Path, name: str, change: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        read_run_log(damaged(run, tmp_path, name, change))


def test_a_log_of_other_settings_or_another_task_is_an_error(run: Path) -> None:
    log = read_run_log(run)
    with pytest.raises(DataError, match=r"seed must be 0 .* \(got 7\)"):
        check_settings(log, {"seed": 7}, "here")
    with pytest.raises(DataError, match="samples"):
        Replay(replace(SMALL, samples=10), CONFIG, log)
    with pytest.raises(DataError, match="parameters"):
        Replay(replace(SMALL, hidden=7), CONFIG, log).run()
    with pytest.raises(DataError, match="does not fit"):
        Replay(SMALL, replace(CONFIG, strategy="asgd"), log).run()


def test_a_resumed_run_cannot_be_recorded(tmp_path: Path) -> None:
    config = replace(CONFIG, run=str(tmp_path))
    run_threads(train_plain, SMALL, config, size=2)
    with pytest.raises(UsageError, match="a run that starts at 0"):
        run_threads(train_recorded, SMALL, replace(config, resume="auto", epochs=3), size=2)


def test_the_command_replays_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = Jobs(tmp_path).task(), tmp_path / "run"
    assert (
        main(["train", file, "strategy=adpsgd", "learners=2", "backend=threads", "record_order=true", "epochs=3", f"run={run}"])
        == 0
    )
    capsys.readouterr()
    assert main(["replay", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    assert main(["replay", str(run)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    config = run / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.05", "lr = 0.06"))
    assert main(["replay", str(run)]) == 3
    assert "lr must be 0.05" in capsys.readouterr().err
    card = run / FOLDER / "rank-001.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "complete": False}))
    assert main(["replay", str(run)]) == 3
    assert "incomplete" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "config.toml" in capsys.readouterr().err
