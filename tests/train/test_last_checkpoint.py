"""The last checkpoint of a race bears the position of the whole run, whoever of the learners writes it down first."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundelay.core.events import read_events
from roundelay.train.battery import Lesson
from roundelay.train.loop import Plan, train
from roundelay.train.options import Options
from roundelay.train.pool import run_threads


@pytest.mark.parametrize("slow", ["0:20", "1:20"])
def test_the_last_checkpoint_is_the_newest_by_name(tmp_path: Path, slow: str) -> None:
    """Named by one learner's own last batch it would stand below earlier ones: resumed from too early, and retired first."""
    options = Options(strategy="adpsgd", slow=slow)
    plan = Plan(epochs=3, batch=4, lr=0.05, run=tmp_path, progress="none", keep=9)
    run_threads(lambda place: train(Lesson(samples=24), place, options, plan), size=2)
    names = sorted(path.name for path in (tmp_path / "ckpt").glob("samples-*"))
    assert names[-1] == "samples-000000000072"
    final = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "evaluation" and e["final"]]
    assert [e["position"] for e in final] == [72]
