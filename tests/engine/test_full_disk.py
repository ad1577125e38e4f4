"""A disk that fills up in the middle of a run: metrics stop quietly, the next checkpoint is an error, nothing saved is lost.

The kernel refuses writes beyond RLIMIT_FSIZE as it refuses them on a full disk; the limit falls while the run stands still.
"""

from __future__ import annotations

import resource

import pytest
from command import Jobs

from roundelay.engine.checkpoint import verify

# Dots has 120 samples and learners take 4 each: its first checkpoint, at half an epoch, is long whole when they stand still
HELD = 25
LIMIT = 4096
"""Bytes: room for what the test itself writes down, not for a shard (torch's random state alone takes 5,056)."""


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "learners"), [("single", 1), ("sync", 2)])
def test_a_full_disk_ends_in_a_sentence_and_loses_nothing(strategy: str, learners: int, jobs: Jobs) -> None:
    settings = [f"strategy={strategy}", f"learners={learners}", "epochs=2", "checkpoint_every_epochs=0.5"]
    job = jobs.train(*settings, hold_at=HELD // learners)
    job.until(lambda: len(jobs.held()) == learners, "everybody to stand still", 90)
    saved = jobs.checkpoints()
    assert saved, "there is something to lose"
    metrics = jobs.folder / "run" / "events.jsonl"
    written = metrics.stat().st_size
    for pid in job.learners().values() if learners > 1 else [job.process.pid]:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, hard))
    jobs.release()
    ended = job.end(90).expect(3)
    assert "the checkpoint cannot be written: " in ended.err
    assert "what to do: free space on that disk, then go on with resume=auto" in ended.err
    assert metrics.stat().st_size <= max(written, LIMIT), "metrics have stopped, quietly"
    assert jobs.checkpoints() == saved
    for name in saved:
        verify(jobs.folder / "run" / "ckpt" / name)

    again = jobs.train(*settings, "resume=auto").end(90).expect(0)
    assert "Traceback" not in again.err
    assert jobs.checkpoints()[-1] == "samples-000000000240"
