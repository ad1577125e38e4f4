"""With dynamic sharding the last checkpoint has the position of the whole run, whichever rank writes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.launch.threads import run_threads
from roundelay.metrics.events import read_events
from roundelay.testing.check_jobs import ToyTask


@pytest.mark.parametrize("slow", ["0:20", "1:20"])
def test_the_last_checkpoint_is_the_newest_by_name(tmp_path: Path, slow: str) -> None:
    """Named by one rank's last batch it would sort before earlier ones: resumed from too early, and pruned first."""
    config = TrainConfig(
        strategy="adpsgd", straggler=slow, epochs=3, batch=4, lr=0.05, run=str(tmp_path), progress="none", keep_checkpoints=9
    )
    run_threads(lambda context: train(ToyTask(samples=24), context, config), size=2)
    names = sorted(path.name for path in (tmp_path / "ckpt").glob("samples-*"))
    assert names[-1] == "samples-000000000072"
    final = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "evaluation" and e["final"]]
    assert [e["position"] for e in final] == [72]
