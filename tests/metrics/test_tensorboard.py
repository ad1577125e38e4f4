"""The files for TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import Jobs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roundelay.metrics.tensorboard import FOLDER, ScalarWriter


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(s.step, s.value) for s in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    board = ScalarWriter(tmp_path)
    board.scalars(10, {"train/loss": 0.5, "spread/learners": None})
    board.scalars(20, {"train/loss": 0.25})
    board.close()
    assert scalars(tmp_path) == {"train/loss": [(10, 0.5), (20, 0.25)]}


def test_a_resumed_board_goes_on_where_the_checkpoint_stood(tmp_path: Path) -> None:
    first = ScalarWriter(tmp_path)
    for step in (10, 20, 30):
        first.scalars(step, {"train/loss": float(step)})
    first.close()
    second = ScalarWriter(tmp_path, 20)
    second.scalars(25, {"train/loss": -25.0})
    second.close()
    assert scalars(tmp_path)["train/loss"] == [(10, 10.0), (25, -25.0)]  # from the checkpoint on, only what was done again


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    board = ScalarWriter(None)
    board.scalars(10, {"train/loss": 0.5})
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_writing_does_not_import_tensorflow(tmp_path: Path) -> None:
    """Where tensorflow is installed its import takes seconds: a stand-in for it fails when it is imported."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')\n")
    script = (
        "from pathlib import Path; from roundelay.metrics.tensorboard import Board\n"
        "board = Board(Path('tb')); board.scalars(1, {'a': 1.0}); board.close()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
    assert len(list((tmp_path / "tb").iterdir())) == 1


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_run_writes_its_figures_and_a_resumed_one_goes_on(jobs: Jobs) -> None:
    settings = ("strategy=sync", "learners=2", "backend=threads", "checkpoint_every_epochs=1", "keep_checkpoints=99")
    jobs.train(*settings, "epochs=2").end(100).expect(0)
    before = scalars(jobs.folder / "run" / FOLDER)
    evaluations = jobs.events(kind="evaluation")
    assert dict(before["valid/loss"]) == pytest.approx({e["position"]: e["metrics"]["loss"] for e in evaluations}, rel=1e-6)
    assert {"train/loss", "train/lr", "time/data", "time/compute", "time/comm", "speed/samples_per_s"} <= set(before)
    mine = [e for e in jobs.events(kind="steps") if e["rank"] == 0 and e["loss"] is not None]
    assert [v for _, v in before["train/loss"]] == pytest.approx([e["loss"] for e in mine], rel=1e-5)
    jobs.train(*settings, "epochs=3", "resume=auto").end(100).expect(0)
    after = scalars(jobs.folder / "run" / FOLDER)
    places = [step for step, _ in after["valid/loss"]]
    assert places == sorted(set(places))
    assert max(places) > max(step for step, _ in before["valid/loss"])


@pytest.mark.dist
def test_it_can_be_switched_off_and_the_start_says_who_runs(jobs: Jobs) -> None:
    jobs.train("strategy=dpsgd", "learners=3", "epochs=1", "backend=threads", "tensorboard=false").end(100).expect(0)
    assert not (jobs.folder / "run" / FOLDER).exists()
    (start,) = jobs.events(kind="start")
    assert start["learners"] == 3
    assert start["environment"]["versions"]["torch"]
    assert any("tensorboard=false" in word for word in start["environment"]["command"])
    assert start["mixing"]["kind"] == "neighbors"
    assert json.dumps(start["mixing"]["weights"]) == "[[0, 1, 0.333333], [0, 2, 0.333333], [1, 2, 0.333333]]"
    assert start["mixing"]["gap"] == pytest.approx(1.0)
