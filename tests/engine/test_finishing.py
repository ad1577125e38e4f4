"""Deaths at exact points of the end of a run: exit 0 with a verified model, or a clear error."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from command import Job, Jobs
from safetensors import safe_open

from roundelay.engine.manifest import verify

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LEARNERS = 3
TENSORS = {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "4.weight"}


def train_with_fault(jobs: Jobs, fault: str, rank: int, *overrides: str) -> Job:
    (jobs.folder / "faults.py").write_text((Path(__file__).parents[1] / "support" / "faults.py").read_text())
    settings = ["task=faults:Faulty", "strategy=adpsgd", f"learners={LEARNERS}", "epochs=1", "timeout_s=20", *overrides]
    return jobs.train(*settings, fault=fault, faulty_rank=rank, pause_s=0.002)


def check_model(jobs: Jobs) -> None:
    """Check that the model file is complete and finite, and that no temporary file hides the real one."""
    path = jobs.folder / "run" / "model.safetensors"
    with safe_open(str(path), "pt") as file:
        assert set(file.keys()) >= TENSORS
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118 - not a dict


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("fail_in_evaluation", 0),
        ("fail_in_evaluation", 2),
        ("fail_writing_the_model", 0),
        ("fail_after_arriving", 0),
        ("fail_after_arriving", 1),
        ("fail_before_agreeing", 0),
    ],
)
def test_the_death_of_a_rank_at_the_end_leaves_a_model(fault: str, rank: int, jobs: Jobs) -> None:
    ended = train_with_fault(jobs, fault, rank, "--json").end(60).expect(0)
    assert f"rank {rank} ended with exit code -9" in ended.err
    check_model(jobs)
    assert ended.seconds < 40
    result = ended.json
    assert result["metrics"]["loss"] < 3
    assert str(rank) in result["lost"]
    assert jobs.counts() == dict.fromkeys(range(120), 1)


@pytest.mark.timeout(120)
def test_a_process_stopped_while_it_holds_locks_costs_no_gradient(jobs: Jobs) -> None:
    settings = ("epochs=40", "failure_s=3", "log_every_s=0.2")
    ended = train_with_fault(jobs, "stop_in_an_average", 1, *settings).end(90).expect(0)
    assert "rank 1 did not exit" in ended.err
    assert {e["lost"] for e in jobs.events(kind="lost")} == {1}
    check_model(jobs)
    summaries = {e["rank"]: e for e in jobs.events(kind="summary")}
    assert set(summaries) == {0, 2}
    for summary in summaries.values():  # a gradient that waited for the lock would have waited until the failure, 3 s
        assert summary["update_s"] + summary["compute_s"] < 120 * 40 / 3 * 0.002 + 2.0, summary


@pytest.mark.timeout(120)
def test_a_checkpoint_is_completed_by_another_rank_if_the_first_one_dies(jobs: Jobs) -> None:
    train_with_fault(jobs, "fail_completing_a_checkpoint", 1, "checkpoint_every_epochs=0.2", "keep_checkpoints=20").end(
        60
    ).expect(0)
    names = jobs.checkpoints()
    assert names[-1] == "samples-000000000120"
    for name in names:
        meta = verify(jobs.folder / "run" / "ckpt" / name)
        assert not any(name.endswith("meta.json") for name in meta["files"])
    assert not list((jobs.folder / "run" / "ckpt").glob(".*.old.partial"))
    check_model(jobs)


@pytest.mark.timeout(120)
def test_an_exception_in_one_learner_is_a_failure_like_any_other(jobs: Jobs) -> None:
    ended = train_with_fault(jobs, "raise_in_training", 1).end(60)
    assert ended.code == 0, ended.err
    assert "rank 1 ended with exit code 1" in ended.err
    assert {e["lost"] for e in jobs.events(kind="lost")} == {1}
    assert all("the disk of this rank is gone" in e["why"] for e in jobs.events(kind="lost"))
    check_model(jobs)
    assert all(count >= 1 for count in jobs.counts().values())
    assert set(jobs.counts()) == set(range(120))


@pytest.mark.timeout(120)
def test_an_exception_in_every_learner_ends_the_job_with_its_code(jobs: Jobs) -> None:
    (jobs.folder / "broken.py").write_text(
        "from tasks import Dots\n\nclass Broken(Dots):\n    def loss(self, module, batch):\n        raise OSError('broken')\n"
    )
    ended = jobs.train("task=broken:Broken", "strategy=adpsgd", "learners=2").end(60)
    assert ended.code == 1, ended.err


@pytest.mark.timeout(120)
def test_a_resumed_run_repeats_only_what_the_manifest_lacks(jobs: Jobs) -> None:
    job = train_with_fault(jobs, "raise_in_training", 1, "checkpoint_every_epochs=100")
    job.end(60)
    meta = verify(jobs.folder / "run" / "ckpt" / jobs.checkpoints()[-1])
    missing = set(range(120)) - {i for start, stop in meta["completed"] for i in range(start, stop)}
    for path in jobs.trace.glob("samples-*"):
        path.unlink()
    jobs.train("strategy=adpsgd", "learners=2", "epochs=2", "resume=auto").end(60).expect(0)
    counts = jobs.counts()
    assert sum(counts.values()) == 120 + len(missing)
    assert set(counts) == set(range(120))
    last = verify(jobs.folder / "run" / "ckpt" / jobs.checkpoints()[-1])
    assert last["completed"] == [[0, 240]]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.timeout(120)
def test_a_stale_partial_folder_does_not_enter_a_new_checkpoint(jobs: Jobs) -> None:
    stale = jobs.folder / "run" / "ckpt" / ".samples-000000000120.partial"
    stale.mkdir(parents=True)
    (stale / "meta.json").write_text("{}")
    (stale / "rank-007.json").write_text("{}")
    jobs.train("strategy=adpsgd", "learners=2", "epochs=1", "resume=auto").end(60).expect(0)
    folder = jobs.folder / "run" / "ckpt" / "samples-000000000120"
    meta = json.loads((folder / "meta.json").read_text())
    assert verify(folder) == meta
    assert "rank-007.json" not in meta["files"]
    assert all(digest(folder / name) == entry["sha256"] for name, entry in meta["files"].items())
    assert not stale.exists()
