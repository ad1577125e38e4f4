"""Whole jobs in which a learner freezes, is interrupted, finds bad data, or loses the store."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from command import ROUNDELAY, Job, Jobs, gone

from roundelay.launch.local import _log_exit, _relay_result

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LIMIT_S = 90.0
"""Hard limit for the remaining processes to exit; the machine may have other work."""


def held_learner(jobs: Jobs, job: Job, rank: int) -> int:
    """Return the process of the rank that waits inside a gradient."""
    job.until(lambda: rank in jobs.held(), f"gradient of rank {rank}")
    return job.learners()[rank]


@pytest.mark.timeout(150)
def test_a_learner_that_freezes_for_good_is_left_behind_and_killed_at_the_end(jobs: Jobs) -> None:
    settings = ["strategy=adpsgd", "learners=3", "epochs=2", "failure_s=3", "timeout_s=20"]
    job = jobs.train(*settings, hold_at=4, hold_rank=1, pause_s=0.01)
    frozen = held_learner(jobs, job, 1)
    os.kill(frozen, signal.SIGSTOP)
    learners = job.learners()
    ended = job.end(LIMIT_S).expect(0)
    assert "rank 1 did not exit within" in ended.err
    assert all(gone(pid) for pid in learners.values())
    assert {e["lost"] for e in jobs.events(kind="lost")} == {1}
    assert (jobs.folder / "run" / "model.safetensors").exists()


@pytest.mark.timeout(150)
def test_an_interrupt_stops_all_learners_together_and_none_is_declared_failed(jobs: Jobs) -> None:
    job = jobs.train("strategy=adpsgd", "learners=3", "epochs=500", pause_s=0.01)
    job.until(lambda: {e["rank"] for e in jobs.events(kind="steps")} == {0, 1, 2}, "steps of all ranks")
    learners = job.learners()
    job.signal(signal.SIGINT)
    ended = job.end(LIMIT_S).expect(130)
    assert all(gone(pid) for pid in learners.values())
    assert jobs.events(kind="lost") == []
    assert "did not exit within" not in ended.err
    assert len(jobs.checkpoints()) == 1


@pytest.mark.timeout(150)
def test_a_learner_that_is_interrupted_at_once_holds_up_no_other(jobs: Jobs) -> None:
    job = jobs.train("strategy=adpsgd", "learners=3", "epochs=2", hold_at=4, hold_rank=1, pause_s=0.01)
    victim = held_learner(jobs, job, 1)
    for _ in range(2):  # the first signal asks for a stop after the gradient, in which the learner waits
        os.kill(victim, signal.SIGINT)
        time.sleep(0.3)
    ended = job.end(LIMIT_S).expect(130)
    assert {(e["lost"], e["why"]) for e in jobs.events(kind="lost")} == {(1, "interrupted")}
    assert "did not exit within" not in ended.err


BAD_DATA = """
import os
from roundelay.errors import DataError
from tasks import Dots

class Damaged(Dots):
    def loss(self, module, batch):
        if os.environ.get("RANK") == "1" and self._calls[0] == 5:
            raise DataError("the features are damaged", where="archive 7")
        return super().loss(module, batch)
"""


@pytest.mark.timeout(150)
def test_bad_data_of_one_learner_ends_all_of_them_at_once(jobs: Jobs) -> None:
    (jobs.folder / "damaged.py").write_text(BAD_DATA)
    job = jobs.train("task=damaged:Damaged", "strategy=adpsgd", "learners=3", "epochs=2000", pause_s=0.01)
    ended = job.end(LIMIT_S).expect(3)
    assert "did not exit within" not in ended.err, "the other learners end without the help of the launcher"
    assert "another rank stopped the run: the features are damaged" in ended.err
    assert not (jobs.folder / "run" / "model.safetensors").exists()


@pytest.mark.timeout(150)
def test_a_silent_store_ends_the_other_ranks_in_seconds(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    task = jobs.task(pause_s=0.01)
    command = [ROUNDELAY, "train", task, "run=run", "strategy=adpsgd", "epochs=5000"]
    ranks = [jobs.start(*command, RANK=str(rank), LOCAL_RANK="0", GROUP_RANK=str(rank), **common) for rank in range(2)]
    ranks[1].until(lambda: {e["rank"] for e in jobs.events(kind="steps")} == {0, 1}, "steps")
    ranks[0].signal(signal.SIGSTOP)
    began = time.monotonic()
    ended = ranks[1].end(LIMIT_S).expect(4)
    assert time.monotonic() - began < 20.0, "one time-out of 10 s, not one per call"
    assert "the job's store no longer answers" in ended.err


STUCK = """
import os
import time
from tasks import Dots

class Stuck(Dots):
    def build(self):
        if os.environ.get("RANK") == "1":
            open("stuck", "w").close()
            time.sleep(100)
        return super().build()
"""


@pytest.mark.timeout(150)
def test_a_learner_that_is_stuck_ends_with_the_command_that_started_it(jobs: Jobs) -> None:
    (jobs.folder / "stuck.py").write_text(STUCK)
    job = jobs.train("task=stuck:Stuck", "strategy=adpsgd", "learners=2")
    job.until(lambda: (jobs.folder / "stuck").exists(), "stuck learner")
    learners = job.learners().values()
    job.signal(signal.SIGKILL)
    deadline = time.monotonic() + 50.0
    while not all(gone(pid) for pid in learners):
        assert time.monotonic() < deadline, "a stuck learner outlives the command"
        time.sleep(0.05)


def test_a_missing_log_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _relay_result(tmp_path / "removed", 1)
    _log_exit(tmp_path / "removed", 1, 4)
    assert capsys.readouterr().out == ""
