"""A disk that fills up during a run: metrics stop, the next checkpoint raises an error, earlier checkpoints stay intact.

RLIMIT_FSIZE makes the kernel refuse writes as on a full disk. The test lowers it while the run waits.
"""

from __future__ import annotations

import resource

import pytest
from command import Jobs

from roundelay.engine.checkpoint import verify

# Dots has 120 samples and batches of 4: the first checkpoint, at half an epoch, is complete long before gradient 25
HELD = 25
LIMIT = 4096
"""Bytes: enough for the records of the test, not for a shard (torch's RNG state alone has 5,056)."""


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "learners"), [("single", 1), ("sync", 2)])
def test_a_full_disk_raises_an_error_and_loses_nothing(strategy: str, learners: int, jobs: Jobs) -> None:
    settings = [f"strategy={strategy}", f"learners={learners}", "epochs=2", "checkpoint_every_epochs=0.5"]
    job = jobs.train(*settings, hold_at=HELD // learners)
    job.until(lambda: len(jobs.held()) == learners, "wait of all ranks", 90)
    job.until(jobs.checkpoints, "complete checkpoint", 90)  # it must be complete before the limit falls
    saved = jobs.checkpoints()
    metrics = jobs.folder / "run" / "events.jsonl"
    written = metrics.stat().st_size
    for pid in job.learners().values() if learners > 1 else [job.process.pid]:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, hard))
    jobs.release()
    ended = job.end(90).expect(3)
    assert "writing the checkpoint failed: " in ended.err
    assert "what to do: free space on that disk, then continue with resume=auto" in ended.err
    assert metrics.stat().st_size <= max(written, LIMIT), "metrics have stopped"
    assert jobs.checkpoints() == saved
    for name in saved:
        verify(jobs.folder / "run" / "ckpt" / name)

    again = jobs.train(*settings, "resume=auto").end(90).expect(0)
    assert "Traceback" not in again.err
    assert jobs.checkpoints()[-1] == "samples-000000000240"
