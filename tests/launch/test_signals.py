"""Signals to a command with several learners: Ctrl-Z, a closed terminal, and a signal in the middle of a poll."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command import Job, Jobs, gone

from roundelay.launch import local
from roundelay.launch.local import start_learners

pytestmark = pytest.mark.dist
LIMIT_S = 90.0


def state(pid: int) -> str:
    """Return the state of a process: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def steps_of_both(jobs: Jobs) -> bool:
    return {e["rank"] for e in jobs.events(kind="steps")} == {0, 1}


def suspended(jobs: Jobs, job: Job) -> list[int]:
    """Press Ctrl-Z once both learners train; return the processes of the learners when all processes are stopped."""
    job.until(lambda: steps_of_both(jobs), "steps of both ranks")
    learners = list(job.learners().values())
    job.signal(signal.SIGTSTP)
    job.until(lambda: all(state(pid) == "T" for pid in [job.process.pid, *learners]), "stop of all processes")
    return learners


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_job_that_is_suspended_for_longer_than_failure_s_continues(jobs: Jobs) -> None:
    job = jobs.train("strategy=adpsgd", "learners=2", "epochs=20", "failure_s=2", pause_s=0.01)
    suspended(jobs, job)
    time.sleep(5.0)
    job.signal(signal.SIGCONT)
    job.end(LIMIT_S).expect(0)
    assert jobs.events(kind="lost") == []
    assert len(jobs.model()) > 0


@pytest.mark.timeout(150)
def test_a_suspended_job_whose_launcher_is_killed_leaves_no_learner_behind(jobs: Jobs) -> None:
    job = jobs.train("strategy=adpsgd", "learners=2", "epochs=5000", pause_s=0.01)
    learners = suspended(jobs, job)
    job.signal(signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while not all(gone(pid) for pid in learners):
        assert time.monotonic() < deadline, "a learner stays"
        time.sleep(0.05)


@pytest.mark.timeout(150)
def test_a_closed_terminal_ends_a_job_with_a_checkpoint(jobs: Jobs) -> None:
    job = jobs.train("strategy=adpsgd", "learners=2", "epochs=5000", pause_s=0.01)
    job.until(lambda: steps_of_both(jobs), "steps of both ranks")
    job.signal(signal.SIGHUP)
    job.end(LIMIT_S).expect(130)
    assert len(jobs.checkpoints()) == 1


def test_a_signal_in_the_middle_of_a_poll_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives when the learner has ended and the launcher is about to find that out."""
    waitpid = os.waitpid
    calls: list[int] = []

    def interrupted(pid: int, options: int) -> Any:
        if not calls:
            calls.append(pid)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            signal.raise_signal(signal.SIGTERM)
        return waitpid(pid, options)

    monkeypatch.setattr(local.os, "waitpid", interrupted)
    code = start_learners(
        [], lambda: 0, 1, bind_address="127.0.0.1", port=0, run=None, survives_failures=True,
    )  # fmt: skip
    assert calls
    assert code == 0
