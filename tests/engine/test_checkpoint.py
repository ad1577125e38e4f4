"""Stop and resume: by signal, after a crash, with other numbers of learners, from damaged files."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from command import Finished, Job, Jobs

from roundelay.cli import main

pytestmark = [pytest.mark.slow]


def interrupt(jobs: Jobs, job: Job, number: int, learners: int) -> Finished:
    """Send a signal while every learner is inside a gradient, then let them continue."""
    job.until(lambda: jobs.held() == set(range(learners)), "gradient of every rank")
    job.signal(number)
    job.until(lambda: "stopping after this step" in job.err, "log line about the stop")
    jobs.release()
    return job.end(60).expect(130)


# --------------------------------------------------------------------------------------------------------- signals


@pytest.mark.dist
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("settings", "number", "learners"),
    [
        (["strategy=sync", "backend=shm", "learners=2"], signal.SIGTERM, 2),
        (["strategy=kstep", "strategy_options.K=3", "backend=torch", "learners=2"], signal.SIGINT, 2),
        (["strategy=single"], signal.SIGTERM, 1),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_bits(settings: list[str], number: int, learners: int, jobs: Jobs) -> None:
    settings = [*settings, "deterministic_reduce=true", "epochs=2"]
    jobs.train(*settings, run="straight", dropout=0.2).end(60).expect(0)
    held = jobs.train(*settings, dropout=0.2, hold_at=7, pause_s=0.01)
    ended = interrupt(jobs, held, number, learners)
    assert "a checkpoint" in ended.err
    assert len(jobs.checkpoints()) == 1
    assert not (jobs.folder / "run" / "model.safetensors").exists()
    jobs.train(*settings, "resume=auto", dropout=0.2).end(60).expect(0)
    assert jobs.model() == jobs.model("straight")


@pytest.mark.dist
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "strategy", [["strategy=adpsgd"], ["strategy=kstep", "strategy_options.K=12", "strategy_options.sharding=dynamic"]]
)
def test_an_interrupted_dynamic_run_uses_every_sample_once(strategy: list[str], jobs: Jobs) -> None:
    settings = [*strategy, "learners=2", "epochs=2"]
    held = jobs.train(*settings, hold_at=7, pause_s=0.02)
    ended = interrupt(jobs, held, signal.SIGTERM, 2)
    assert ended.seconds < 50
    jobs.train(*settings, "resume=auto").end(60).expect(0)
    assert jobs.counts() == dict.fromkeys(range(120), 2)


# -------------------------------------------------------------------------------------- other numbers of learners


@pytest.mark.dist
@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["sync", "adpsgd"])
def test_a_run_resumes_with_another_number_of_learners(strategy: str, jobs: Jobs) -> None:
    losses = []
    for epochs, learners in ((1, 2), (2, 3), (3, 2)):
        settings = [f"strategy={strategy}", f"learners={learners}", f"epochs={epochs}", "resume=auto", "--json"]
        losses.append(jobs.train(*settings).end(60).expect(0).json["metrics"]["loss"])
        assert jobs.counts() == dict.fromkeys(range(120), epochs)
    assert losses[2] < losses[1] < losses[0]


# -------------------------------------------------------------------------------------------------------- failures


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_run_killed_while_saving_resumes_from_the_checkpoint_before(jobs: Jobs) -> None:
    settings = ["strategy=sync", "learners=2", "epochs=3", "checkpoint_every_epochs=1", "deterministic_reduce=true"]
    jobs.train(*settings, run="straight").end(60).expect(0)
    job = jobs.train(*settings, hold_save=240)
    job.until(lambda: (jobs.trace / "saving").exists(), "second checkpoint")
    partial = jobs.folder / "run" / "ckpt" / ".samples-000000000240.partial"
    assert (partial / "rank-000.safetensors").exists()
    job.kill_everything()
    assert jobs.checkpoints() == ["samples-000000000120"]
    assert partial.exists()
    jobs.train(*settings, "resume=auto").end(60).expect(0)
    assert "resuming from samples-000000000120" in (jobs.folder / "run" / "log" / "rank-000.txt").read_text()
    assert jobs.model() == jobs.model("straight")
    assert not partial.exists()


@pytest.fixture
def finished(jobs: Jobs) -> Jobs:
    """Train two epochs with one learner and a checkpoint per epoch."""
    settings = ["strategy=single", "epochs=2", "checkpoint_every_epochs=1", f"run={jobs.folder / 'run'}"]
    assert main.main(["train", jobs.task(trace=""), *settings]) == 0
    assert jobs.checkpoints() == ["samples-000000000120", "samples-000000000240"]
    return jobs


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(bytes(raw))


def forge(path: Path) -> None:
    meta = json.loads((path.parent / "meta.json").read_text())
    meta["format"] = 99
    (path.parent / "meta.json").write_text(json.dumps(meta))


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (truncate, "rank-000.safetensors"),
        (flip_a_bit, "model.safetensors"),
        (truncate, "meta.json"),
        (Path.unlink, "rank-000.json"),
        (forge, "meta.json"),
    ],
)
def test_a_damaged_checkpoint_raises_if_named_and_is_skipped_by_auto(
    damage, file: str, finished: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished.folder / "run"
    newest = run / "ckpt" / "samples-000000000240"
    damage(newest / file)
    common = ["train", finished.task(trace=""), "strategy=single", "epochs=3", "progress=plain"]

    assert main.main([*common, f"run={run}", f"resume={newest}"]) == 3
    err = capsys.readouterr().err
    assert "samples-000000000240" in err
    assert "what to do" in err

    assert main.main([*common, f"run={run}", "resume=auto"]) == 0
    err = capsys.readouterr().err
    assert "skipping a damaged checkpoint" in err
    assert "resuming from samples-000000000120" in err
    assert finished.checkpoints()[-1] == "samples-000000000360"


def test_a_checkpoint_of_another_model_is_refused(finished: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished.folder / "run"
    shutil.copytree(run, finished.folder / "other")
    file = finished.folder / "lesson.toml"
    file.write_text('task = "roundelay.testing.check_jobs:ToyTask"\nprogress = "none"\n')
    assert main.main(["train", str(file), "strategy=single", f"run={finished.folder / 'other'}", "resume=auto"]) == 3
    assert "as many parameters as the model" in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.timeout(150)
@pytest.mark.parametrize("strategy", ["sync", "adpsgd"])
def test_a_nan_loss_stops_the_run_and_keeps_the_last_checkpoint(strategy: str, jobs: Jobs) -> None:
    settings = [f"strategy={strategy}", "learners=2"]
    jobs.train(*settings, "epochs=1").end(60).expect(0)
    ended = jobs.train(*settings, "epochs=3", "resume=auto", nan_sample=77).end(60).expect(3)
    assert "the loss must be finite (got nan)" in ended.err
    nan_rank = next(rank for rank, batches in jobs.batches().items() if 77 in batches[-1])
    assert f"where: rank {nan_rank}, step " in ended.err
    assert jobs.checkpoints() == ["samples-000000000120"]
    jobs.train(*settings, "epochs=2", "resume=auto").end(60).expect(0)
