"""TensorBoard files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command import Jobs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roundelay.metrics import tensorboard
from roundelay.metrics.tensorboard import FOLDER, ScalarWriter


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(s.step, s.value) for s in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_scalars_are_read_back(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path)
    writer.scalars(10, {"train/loss": 0.5, "spread/learners": None})
    writer.scalars(20, {"train/loss": 0.25})
    writer.close()
    assert scalars(tmp_path) == {"train/loss": [(10, 0.5), (20, 0.25)]}


def test_a_resumed_run_hides_records_after_its_checkpoint(tmp_path: Path) -> None:
    first = ScalarWriter(tmp_path)
    for step in (10, 20, 30):
        first.scalars(step, {"train/loss": float(step)})
    first.close()
    second = ScalarWriter(tmp_path, 20)
    second.scalars(25, {"train/loss": -25.0})
    second.close()
    assert scalars(tmp_path)["train/loss"] == [(10, 10.0), (25, -25.0)]


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    writer = ScalarWriter(None)
    writer.scalars(10, {"train/loss": 0.5})
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_records_carry_virtual_time(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path, now=lambda: 12.5)
    writer.scalars(10, {"train/loss": 0.5})
    writer.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [e.wall_time for e in accumulator.Scalars("train/loss")] == [12.5]


def test_without_tensorboard_one_warning_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    tensorboard.summary_writer_class.cache_clear()
    for name in ("first", "second"):
        writer = ScalarWriter(tmp_path / name)
        writer.scalars(10, {"train/loss": 0.5})
        writer.close()
    tensorboard.summary_writer_class.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "roundelay[tensorboard]" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_run_and_its_resumption_write_their_metrics(jobs: Jobs) -> None:
    settings = ("strategy=sync", "learners=2", "backend=threads", "checkpoint_every_epochs=1", "keep_checkpoints=99")
    jobs.train(*settings, "epochs=2").end(100).expect(0)
    before = scalars(jobs.folder / "run" / FOLDER)
    evaluations = jobs.events(kind="evaluation")
    assert dict(before["valid/loss"]) == pytest.approx({e["position"]: e["metrics"]["loss"] for e in evaluations}, rel=1e-6)
    assert {"train/loss", "train/lr", "time/data", "time/compute", "time/comm", "speed/samples_per_s"} <= set(before)
    own = [e for e in jobs.events(kind="steps") if e["rank"] == 0 and e["loss"] is not None]
    assert [v for _, v in before["train/loss"]] == pytest.approx([e["loss"] for e in own], rel=1e-5)
    jobs.train(*settings, "epochs=3", "resume=auto").end(100).expect(0)
    after = scalars(jobs.folder / "run" / FOLDER)
    positions = [step for step, _ in after["valid/loss"]]
    assert positions == sorted(set(positions))
    assert max(positions) > max(step for step, _ in before["valid/loss"])


@pytest.mark.dist
def test_tensorboard_can_be_disabled_and_start_describes_the_run(jobs: Jobs) -> None:
    jobs.train("strategy=dpsgd", "learners=3", "epochs=1", "backend=threads", "tensorboard=false").end(100).expect(0)
    assert not (jobs.folder / "run" / FOLDER).exists()
    (start,) = jobs.events(kind="start")
    assert start["learners"] == 3
    assert start["environment"]["versions"]["torch"]
    assert any("tensorboard=false" in word for word in start["environment"]["command"])
    assert start["mixing"]["kind"] == "neighbors"
    assert json.dumps(start["mixing"]["weights"]) == "[[0, 1, 0.333333], [0, 2, 0.333333], [1, 2, 0.333333]]"
    assert start["mixing"]["gap"] == pytest.approx(1.0)
