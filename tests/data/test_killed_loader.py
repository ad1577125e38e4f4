"""A loader process of a running job is killed: the job goes on, and every sample is still trained on once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command import Jobs, descendants


def loaders(pid: int) -> list[int]:
    """Processes below this one that multiprocessing has spawned to work (it also spawns one that tracks resources)."""
    found = []
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in command:
            found.append(child)
    return found


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_a_job_survives_the_death_of_its_loader(jobs: Jobs) -> None:
    job = jobs.train("loader_kind=process", "learners=1", "strategy=single", "epochs=1", pause_s=0.02, hold_at=5)
    job.until(lambda: jobs.held(), "gradient 5", timeout_s=100)
    (child,) = loaders(job.process.pid)
    os.kill(child, signal.SIGKILL)
    jobs.release()
    job.end(100).expect(0)
    assert jobs.counts() == dict.fromkeys(range(120), 1)
    assert loaders(job.process.pid) == []
