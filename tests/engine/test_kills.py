"""Runs in which a learner is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from command import Job, Jobs, gone

from roundelay.engine.manifest import verify

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LIMIT_S = 60.0
"""Hard limit for the remaining processes to exit; the machine may have other work."""


def kill_held_rank(jobs: Jobs, job: Job, rank: int) -> None:
    """Send SIGKILL to the rank that waits inside a gradient."""
    job.until(lambda: rank in jobs.held(), f"gradient of rank {rank}")
    victim = job.learners()[rank]
    os.kill(victim, signal.SIGKILL)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("strategy", "backend"), [("sync", "shm"), ("kstep", "torch"), ("delay_by_one", "auto")])
def test_ranks_of_a_synchronous_strategy_exit_and_name_the_lost_rank(strategy: str, backend: str, jobs: Jobs) -> None:
    job = jobs.train(f"strategy={strategy}", f"backend={backend}", "learners=3", "epochs=3", hold_at=5, hold_rank=1)
    kill_held_rank(jobs, job, 1)
    survivors = [pid for rank, pid in job.learners().items() if rank != 1]
    ended = job.end(LIMIT_S).expect(4)
    assert all(gone(pid) for pid in survivors)
    assert "did not exit within" not in ended.err
    assert "rank 1 (killed by signal SIGKILL) was lost" in ended.err
    assert "resume=auto" in ended.err


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("rank", "backend"), [(1, "shm"), (0, "torch")])
def test_gossip_continues_without_the_killed_rank(rank: int, backend: str, jobs: Jobs) -> None:
    job = jobs.train(
        "strategy=adpsgd", f"backend={backend}", "learners=3", "epochs=2", "--json", hold_at=4, hold_rank=rank, pause_s=0.01
    )
    kill_held_rank(jobs, job, rank)
    ended = job.end(60).expect(0)

    lost = jobs.events(kind="lost")
    assert {e["lost"] for e in lost} == {rank}
    assert {e["rank"] for e in lost} == {0, 1, 2} - {rank}
    assert all(e["why"] for e in lost)
    assert f"rank {rank} ended with exit code -9" in ended.err

    # Another rank has done the batch of the killed rank: every sample of both epochs is used at least once.
    batches = jobs.batches()
    interrupted = batches[rank].pop()
    completed = jobs.counts()
    completed.subtract(interrupted)
    assert all(completed[sample] >= 2 for sample in range(120))

    assert ended.json["metrics"]["loss"] < 1.0
    survivors = {e["rank"]: e for e in jobs.events(kind="summary")}
    assert set(survivors) == {0, 1, 2} - {rank}
    assert all(e["exchanges"] > 0 for e in survivors.values())
    assert (jobs.folder / "run" / "model.safetensors").exists()
    assert jobs.checkpoints()[-1] == "samples-000000000240"


@pytest.mark.timeout(150)
def test_a_machine_that_lost_a_rank_is_lost_and_the_rest_continues(jobs: Jobs) -> None:
    settings = ["strategy=hierarchical(adpsgd)", "simulate_nodes=2", "learners=3", "epochs=2"]
    job = jobs.train(*settings, hold_at=4, hold_rank=1, pause_s=0.01)
    kill_held_rank(jobs, job, 1)  # ranks 0 and 1 are one machine
    job.end(60).expect(0)
    assert {e["lost"] for e in jobs.events(kind="lost")} == {0, 1}
    assert {e["rank"] for e in jobs.events(kind="summary")} == {2}
    completed = jobs.counts()
    assert all(completed[sample] >= 2 for sample in range(120))


@pytest.mark.timeout(150)
def test_learners_do_not_outlive_the_command_that_started_them(jobs: Jobs) -> None:
    job = jobs.train("strategy=adpsgd", "learners=2", "epochs=500", pause_s=0.01)
    job.until(lambda: len(jobs.events(kind="steps")) > 2, "step")
    learners = job.learners().values()
    job.signal(signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while not all(gone(pid) for pid in learners):
        assert time.monotonic() < deadline, "learners still run without the process that serves their store"
        time.sleep(0.05)


@pytest.mark.timeout(150)
def test_checkpoints_that_wait_for_a_frozen_rank_do_not_end_the_run(jobs: Jobs) -> None:
    """Many positions wait until its failure; the other ranks then complete and delete them at the same time."""
    settings = [
        "strategy=adpsgd",
        "learners=3",
        "epochs=60",
        "checkpoint_every_epochs=0.5",
        "failure_s=2",
        "keep_checkpoints=2",
    ]
    job = jobs.train(*settings, "timeout_s=20", hold_at=30, hold_rank=1, pause_s=0.005)
    job.until(lambda: 1 in jobs.held(), "gradient of rank 1")
    frozen = job.learners()[1]
    os.kill(frozen, signal.SIGSTOP)
    ckpt = jobs.folder / "run" / "ckpt"
    job.until(lambda: len(list(ckpt.glob(".samples-*.partial"))) >= 3, "third waiting checkpoint")
    job.until(lambda: len({e["rank"] for e in jobs.events(kind="lost")}) == 2, "declared failure")
    job.until(lambda: (jobs.folder / "run" / "model.safetensors").exists(), "model")
    os.kill(frozen, signal.SIGKILL)  # the command waits for it
    job.end(LIMIT_S).expect(0)
    assert jobs.checkpoints()[-1] == f"samples-{60 * 120:012d}"
    for name in jobs.checkpoints():
        verify(ckpt / name)
    assert not list(ckpt.glob(".*.partial"))
