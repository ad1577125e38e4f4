"""Judging checkpoints that others may already have removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from roundelay.core.events import read_events
from roundelay.train import loop
from roundelay.train.battery import Lesson
from roundelay.train.loop import Plan, train
from roundelay.train.options import Options
from roundelay.train.pool import run_threads


def test_a_checkpoint_that_is_gone_goes_unjudged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that is `keep` checkpoints behind finds the folder removed: no reason to end the run, nor to judge no more."""
    read = loop.read_model

    def too_late(path: Path, learner: Any) -> Any:
        if path.name.endswith("24") and learner.rank == 1:
            shutil.rmtree(path)
        return read(path, learner)

    monkeypatch.setattr(loop, "read_model", too_late)
    plan = Plan(epochs=3, batch=4, lr=0.05, run=tmp_path, progress="none", keep=9)
    run_threads(lambda place: train(Lesson(samples=24), place, Options(strategy="sync"), plan), size=2)
    judged = [(e["position"], e["final"]) for e in read_events(tmp_path / "events.jsonl") if e["event"] == "evaluation"]
    assert judged == [(48, False), (72, True)]
    assert "samples-000000000024 was gone" in "".join(p.read_text() for p in (tmp_path / "log").iterdir())
