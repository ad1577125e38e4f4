"""Resume: all ranks restore the checkpoint that rank 0 has chosen, or all end with one error; later ones are set aside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundelay.engine import checkpoint, manifest, resume
from roundelay.engine.config import TrainConfig
from roundelay.engine.manifest import read_best
from roundelay.engine.trainer import train
from roundelay.errors import DataError, RoundelayError
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads
from roundelay.testing.check_jobs import ToyTask

SAMPLES = 24
here = threading.local()
"""The rank whose code runs in this thread."""


def run(folder: Path, size: int = 1, **options: Any) -> list[RoundelayError | None]:
    """Train as `size` ranks in threads; return the error of each rank."""
    settings = {"strategy": "sync", "batch": 4, "keep_checkpoints": 10, "eval_at_checkpoint": False, **options}
    config = TrainConfig(lr=0.05, run=str(folder), progress="none", tensorboard=False, timeout_s=20, **settings)

    def job(context: DistributedContext) -> RoundelayError | None:
        here.rank = context.rank
        try:
            train(ToyTask(samples=SAMPLES), context, config)
        except RoundelayError as error:
            return error
        return None

    return run_threads(job, size=size, timeout_s=60)


def name(epochs: int) -> str:
    return f"samples-{epochs * SAMPLES:012d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ckpt").iterdir())


def log(folder: Path, rank: int) -> str:
    return (folder / "log" / f"rank-{rank:03d}.txt").read_text()


def on_rank_1(function: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """Return the function with a read error on rank 1 in one folder."""

    def read(path: Path) -> Any:
        if here.rank == 1 and path.name == folder:
            raise DataError("reading the checkpoint failed: Stale file handle", where=str(path))
        return function(path)

    return read


@pytest.mark.parametrize("strategy", ["sync", "adpsgd"])
def test_a_rank_that_would_choose_another_checkpoint_restores_that_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    assert run(tmp_path, 2, epochs=2, strategy=strategy) == [None, None]
    monkeypatch.setattr(manifest, "verify", on_rank_1(manifest.verify, name(2)))  # seen by manifest.latest only
    assert run(tmp_path, 2, epochs=3, strategy=strategy, resume="auto") == [None, None]
    for rank in range(2):
        assert f"resuming from {name(2)}: {2 * SAMPLES} samples are done" in log(tmp_path, rank)


@pytest.mark.parametrize("setting", ["auto", "best", "path"])
def test_a_rank_that_cannot_read_the_chosen_checkpoint_ends_the_job_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    run(tmp_path, 2, epochs=2, eval_at_checkpoint=True)
    note = read_best(tmp_path / "ckpt")
    assert note is not None
    chosen = note["checkpoint"] if setting == "best" else name(2) if setting == "auto" else name(1)
    before = names(tmp_path)
    monkeypatch.setattr(checkpoint, "verify", on_rank_1(checkpoint.verify, chosen))
    errors = run(tmp_path, 2, epochs=3, resume=str(tmp_path / "ckpt" / chosen) if setting == "path" else setting)
    assert [type(error) for error in errors] == [DataError, DataError]
    assert str(errors[0]) == str(errors[1])
    assert "Stale file handle" in str(errors[0])
    assert f"rank 1 on localhost, {tmp_path / 'ckpt' / chosen}" in str(errors[0])
    assert names(tmp_path) == before, "a refused run changes no checkpoint"


def test_another_checkpoint_under_the_chosen_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "a", 2, epochs=1)
    run(tmp_path / "b", 2, epochs=1, seed=1)
    there, read = tmp_path / "b" / "ckpt" / name(1), resume.read_manifest
    monkeypatch.setattr(resume, "read_manifest", lambda path: read(there if here.rank == 1 else path))
    errors = run(tmp_path / "a", 2, epochs=2, resume="auto")
    assert len({str(error) for error in errors}) == 1
    assert "must be the one that rank 0 reads" in str(errors[1])


def test_a_choice_that_fails_on_rank_0_is_the_error_of_all_ranks(tmp_path: Path) -> None:
    run(tmp_path, 2, epochs=1)
    (tmp_path / "ckpt" / name(1) / "model.safetensors").unlink()
    errors = run(tmp_path, 2, epochs=2, resume=str(tmp_path / "ckpt" / name(1)))
    assert [type(error) for error in errors] == [DataError, DataError]
    assert str(errors[0]) == str(errors[1])
    assert "model.safetensors is missing from the checkpoint" in str(errors[0])


def test_checkpoints_after_the_one_resumed_from_are_set_aside(tmp_path: Path) -> None:
    run(tmp_path, epochs=4, eval_at_checkpoint=True, best_goal="min")
    assert read_best(tmp_path / "ckpt") is not None
    run(tmp_path, epochs=2, resume=str(tmp_path / "ckpt" / name(1)))
    abandoned = [f"abandoned-{name(epochs)}" for epochs in (2, 3, 4)]
    assert names(tmp_path) == ["abandoned-best.json", *abandoned, name(1), name(2)]
    assert read_best(tmp_path / "ckpt") is None, "the best one was abandoned"
    assert log(tmp_path, 0).count("renamed to abandoned-") == 1
    assert run(tmp_path, epochs=3, keep_checkpoints=1, resume="auto") == [None]
    assert f"resuming from {name(2)}: {2 * SAMPLES} samples are done" in log(tmp_path, 0)
    assert names(tmp_path) == ["abandoned-best.json", *abandoned, name(3)], "abandoned ones are not counted"
    run(tmp_path, epochs=2, resume=str(tmp_path / "ckpt" / f"abandoned-{name(2)}"))
    assert names(tmp_path) == ["abandoned-2-" + name(3), "abandoned-best.json", *abandoned, name(2)]


def test_a_checkpoint_of_another_run_abandons_all_from_its_position_on(tmp_path: Path) -> None:
    run(tmp_path / "a", epochs=2)
    run(tmp_path / "b", epochs=3, seed=1)
    run(tmp_path / "a", epochs=3, resume=str(tmp_path / "b" / "ckpt" / name(2)))
    assert names(tmp_path / "a") == [f"abandoned-{name(2)}", name(1), name(3)]
    assert names(tmp_path / "b") == [name(1), name(2), name(3)]


def test_what_a_killed_writer_left_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    (tmp_path / ".model.safetensors.7.partial").write_text("half a model")
    (tmp_path / "ckpt" / ".samples-000000000048.3.partial").mkdir()
    assert run(tmp_path, epochs=2, resume="auto") == [None]
    assert [path.name for path in tmp_path.rglob("*.partial")] == []
