"""Evaluation of checkpoints that other ranks may already have deleted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from roundelay.engine import trainer
from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.launch.threads import run_threads
from roundelay.metrics.events import read_events
from roundelay.testing.check_jobs import ToyTask


def test_a_deleted_checkpoint_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is `keep_checkpoints` behind finds the folder deleted: it skips this evaluation and continues."""
    read = trainer.read_model

    def delete_first(path: Path, learner: Any) -> Any:
        if path.name.endswith("24") and learner.rank == 1:
            shutil.rmtree(path)
        return read(path, learner)

    monkeypatch.setattr(trainer, "read_model", delete_first)
    config = TrainConfig(strategy="sync", epochs=3, batch=4, lr=0.05, run=str(tmp_path), progress="none", keep_checkpoints=9)
    run_threads(lambda context: train(ToyTask(samples=24), context, config), size=2)
    evaluated = [(e["position"], e["final"]) for e in read_events(tmp_path / "events.jsonl") if e["event"] == "evaluation"]
    assert evaluated == [(48, False), (72, True)]
    assert "samples-000000000024 was deleted" in "".join(p.read_text() for p in (tmp_path / "log").iterdir())
