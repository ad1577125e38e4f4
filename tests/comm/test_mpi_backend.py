"""Whole runs under mpirun: equal bits, clear errors, no hang; and the errors without MPI."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from command import ROUNDELAY, TORCHRUN, Jobs, gone
from crew import SIZE, Crew
from mpi_jobs import one_sided, overlapping, waiting
from paths import ROOT

from roundelay.testing.mpi_pool import mpirun

pytest.importorskip("mpi4py")
pytestmark = [pytest.mark.dist, pytest.mark.slow]
LAUNCHED = str(ROOT / "tests" / "support" / "launched.py")
TIMEOUT_S = 240.0
"""Several interpreters import torch at once, on a machine that may be busy."""


def under_mpirun(size: int) -> list[str]:
    return mpirun(size, ["-x", "OMP_NUM_THREADS=1"])


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_waiting_rank_leaves_the_core_idle(crew: Crew) -> None:
    for used in crew.on("mpi")(waiting, 2.0, size=SIZE):
        assert used["waited"] > 1.0
        assert used["cpu"] < used["waited"] / 2  # the MPI library by itself would spin all the time


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_mean_progresses_while_all_ranks_compute(crew: Crew) -> None:
    for result in crew.on("mpi")(overlapping, 2_000_000, size=3):
        assert result == {"done": True, "mean": 1.0}


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("length", [10, 300_000])  # an eager message, and one that waits for its receiver
def test_one_sided_operations_lose_nothing(length: int, crew: Crew) -> None:
    results = crew.on("mpi")(one_sided, length, 5, size=3)
    for result in results:
        assert result["reads"] == [(15, 15.0, 15.0)] * 3
    for peer in range(3):
        assert sorted(v for r in results for v in r["versions"][peer::3]) == list(range(15))


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_torchrun_and_mpirun_give_equal_bits(jobs: Jobs) -> None:
    by_torchrun = jobs.start(TORCHRUN, "--standalone", "--nproc-per-node", "3", LAUNCHED, "torch").end(TIMEOUT_S).expect(0)
    by_mpirun = jobs.start(*under_mpirun(3), sys.executable, LAUNCHED, "mpi").end(TIMEOUT_S).expect(0)
    expected = json.loads(by_torchrun.out)
    assert {"sync", "kstep", "dpsgd", "delay_by_one", "hierarchical(kstep)"} <= set(expected)
    assert json.loads(by_mpirun.out) == expected


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_run_under_mpirun_succeeds_on_any_backend(jobs: Jobs) -> None:
    for backend in ("mpi", "auto"):
        command = [
            *under_mpirun(3),
            ROUNDELAY,
            "train",
            jobs.task(),
            f"run={backend}",
            f"backend={backend}",
            "strategy=adpsgd",
            "epochs=2",
        ]
        done = jobs.start(*command, "--json").end(TIMEOUT_S).expect(0)
        assert json.loads(done.out)["metrics"]["loss"] < 1.2
        assert sorted(json.loads(done.out)["ranks"]) == ["0", "1", "2"]
        assert jobs.model(backend)
    assert set(jobs.counts().values()) == {4}  # two epochs of two runs


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("strategy", ["sync", "adpsgd"])
def test_a_killed_rank_ends_the_job_and_is_named(strategy: str, jobs: Jobs) -> None:
    task = jobs.task(hold_at=3, hold_rank=1, samples=4000)
    job = jobs.start(*under_mpirun(3), ROUNDELAY, "train", task, "backend=mpi", f"strategy={strategy}", "epochs=50")
    job.until(lambda: 1 in jobs.held(), "gradient of rank 1", TIMEOUT_S)
    learners = job.learners()
    os.kill(int((jobs.trace / "held-1").read_text()), signal.SIGKILL)
    done = job.end(TIMEOUT_S)
    assert done.code == 128 + signal.SIGKILL
    assert "rank 1" in done.err
    assert "signal 9 (Killed)" in done.err
    assert all(gone(pid) for pid in learners.values())


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_rank_with_bad_data_ends_the_job_with_its_code_and_message(jobs: Jobs) -> None:
    task = jobs.task(nan_sample=60)
    done = jobs.start(*under_mpirun(2), ROUNDELAY, "train", task, "backend=mpi", "strategy=adpsgd", "epochs=50").end(TIMEOUT_S)
    assert done.code == 3
    assert "the loss must be finite (got nan)" in done.err
    assert "Traceback" not in done.err


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_without_mpirun_the_error_says_how_to_start(jobs: Jobs) -> None:
    done = jobs.run("train", jobs.task(), "backend=mpi", "learners=2", timeout_s=TIMEOUT_S).expect(2)
    assert "mpirun -n 2 roundelay train" in done.err
    one_rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = jobs.run("train", jobs.task(), "backend=mpi", timeout_s=TIMEOUT_S, **one_rank)
    assert done.code == 2
    assert "MPI and the launcher must agree on the rank (MPI: 0 of 1, launcher: 0 of 2)" in done.err


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_without_mpi4py_the_error_names_the_extra(jobs: Jobs) -> None:
    (jobs.folder / "absent" / "mpi4py").mkdir(parents=True)
    (jobs.folder / "absent" / "mpi4py" / "__init__.py").write_text("raise ImportError('No module named mpi4py')\n")
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env["PYTHONPATH"] = str(jobs.folder / "absent")
    done = jobs.run("train", jobs.task(), "backend=mpi", timeout_s=TIMEOUT_S, **env).expect(2)
    assert "pip install 'roundelay[mpi]'" in done.err
