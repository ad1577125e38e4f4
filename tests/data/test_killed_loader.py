"""A loader process of a running job is killed: the job continues and still uses every sample once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command import Jobs, descendants


def loaders(pid: int) -> list[int]:
    """Return the descendants that multiprocessing has spawned as workers, without its resource tracker."""
    workers = []
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in command:
            workers.append(child)
    return workers


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_a_job_survives_a_killed_loader_process(jobs: Jobs) -> None:
    job = jobs.train("loader_kind=process", "learners=1", "strategy=single", "epochs=1", pause_s=0.02, hold_at=5)
    job.until(lambda: jobs.held(), "gradient 5", timeout_s=100)
    (child,) = loaders(job.process.pid)
    os.kill(child, signal.SIGKILL)
    jobs.release()
    job.end(100).expect(0)
    assert jobs.counts() == dict.fromkeys(range(120), 1)
    assert loaders(job.process.pid) == []
