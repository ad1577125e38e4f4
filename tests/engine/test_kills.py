"""What becomes of a run when a learner is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from command import Job, Jobs, gone

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SECONDS_TO_LEAVE = 10.0


def kill_the_held(jobs: Jobs, job: Job, rank: int) -> float:
    """SIGKILL for the rank that waits inside a gradient; returns the moment."""
    job.until(lambda: rank in jobs.held(), f"gradient of rank {rank}")
    victim = job.learners()[rank]
    now = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return now


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("strategy", "backend"), [("sync", "shm"), ("kstep", "torch"), ("delay_by_one", "auto")])
def test_at_a_rendezvous_survivors_leave_and_name_the_lost_rank(strategy: str, backend: str, jobs: Jobs) -> None:
    job = jobs.train(f"strategy={strategy}", f"backend={backend}", "learners=3", "epochs=3", hold_at=5, hold_rank=1)
    killed_at = kill_the_held(jobs, job, 1)
    survivors = [pid for rank, pid in job.learners().items() if rank != 1]
    ended = job.end(SECONDS_TO_LEAVE + 20).expect(4)
    took = time.monotonic() - killed_at
    assert took < SECONDS_TO_LEAVE, f"the job needed {took:.1f} s to end\n{ended.err}"
    assert all(gone(pid) for pid in survivors)
    assert "did not leave by itself" not in ended.err
    assert "rank 1 (killed by signal SIGKILL) was lost" in ended.err
    assert "resume=auto" in ended.err


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("rank", "backend"), [(1, "shm"), (0, "torch")])
def test_gossip_goes_on_without_the_dead(rank: int, backend: str, jobs: Jobs) -> None:
    job = jobs.train(
        "strategy=adpsgd", f"backend={backend}", "learners=3", "epochs=2", "--json", hold_at=4, hold_rank=rank, pause_s=0.01
    )
    kill_the_held(jobs, job, rank)
    ended = job.end(60).expect(0)

    lost = jobs.events(kind="lost")
    assert {e["lost"] for e in lost} == {rank}
    assert {e["rank"] for e in lost} == {0, 1, 2} - {rank}
    assert all(e["why"] for e in lost)
    assert f"rank {rank} ended with -9" in ended.err

    # What the dead one was at work on has been done by somebody else: every sample of both epochs, at least once.
    batches = jobs.batches()
    interrupted = batches[rank].pop()
    by_the_living = jobs.counts()
    by_the_living.subtract(interrupted)
    assert all(by_the_living[place] >= 2 for place in range(120))

    assert ended.json["metrics"]["loss"] < 1.0
    survivors = {e["rank"]: e for e in jobs.events(kind="summary")}
    assert set(survivors) == {0, 1, 2} - {rank}
    assert all(e["exchanges"] > 0 for e in survivors.values())
    assert (jobs.folder / "run" / "model.safetensors").exists()
    assert jobs.checkpoints()[-1] == "samples-000000000240"


@pytest.mark.timeout(150)
def test_a_machine_that_lost_a_member_is_lost_and_the_others_go_on(jobs: Jobs) -> None:
    settings = ["strategy=hierarchical(adpsgd)", "simulate_nodes=2", "learners=3", "epochs=2"]
    job = jobs.train(*settings, hold_at=4, hold_rank=1, pause_s=0.01)
    kill_the_held(jobs, job, 1)  # ranks 0 and 1 are one machine
    job.end(60).expect(0)
    assert {e["lost"] for e in jobs.events(kind="lost")} == {0, 1}
    assert {e["rank"] for e in jobs.events(kind="summary")} == {2}
    done = jobs.counts()
    assert all(done[place] >= 2 for place in range(120))


@pytest.mark.timeout(150)
def test_learners_do_not_outlive_the_command_that_started_them(jobs: Jobs) -> None:
    job = jobs.train("strategy=adpsgd", "learners=2", "epochs=500", pause_s=0.01)
    job.until(lambda: len(jobs.events(kind="steps")) > 2, "step")
    learners = job.learners().values()
    job.signal(signal.SIGKILL)
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    while not all(gone(pid) for pid in learners):
        assert time.monotonic() < deadline, "learners run on without the process that serves their store"
        time.sleep(0.05)
