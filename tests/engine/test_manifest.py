"""Damaged and hostile checkpoints give a DataError, never another exception; the best checkpoint is kept."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.core.files import digest
from roundelay.engine.config import TrainConfig
from roundelay.engine.manifest import best, read_best, seal, verify
from roundelay.engine.trainer import train
from roundelay.errors import DataError
from roundelay.launch.context import single_process_context
from roundelay.metrics.events import read_events
from roundelay.testing.check_jobs import ToyTask

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


def run(folder: Path, **settings: Any) -> dict[str, Any]:
    config = TrainConfig(strategy="single", batch=4, lr=0.05, run=str(folder), progress="none", tensorboard=False, **settings)
    return train(ToyTask(samples=24), single_process_context("cpu"), config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch with one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    run(folder, epochs=1)
    return folder


def checkpoint_of(folder: Path) -> Path:
    return folder / "ckpt" / "samples-000000000024"


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_manifests_give_a_data_error(data: st.DataObject, finished: Path) -> None:
    path = checkpoint_of(finished) / "meta.json"
    raw = path.read_bytes()
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else damaged
    try:
        path.write_bytes(bytes(damaged))
        meta = json.loads(raw)
        with suppress(DataError):
            assert verify(path.parent) == meta  # only white space may have changed
    finally:
        path.write_bytes(raw)


@settings(max_examples=200)
@given(field=st.sampled_from(["position", "ranks", "node_leaders", "size", "sharding", "completed", "files"]), value=JSON)
def test_hostile_manifests_with_a_correct_checksum_give_a_data_error(field: str, value: Any, finished: Path) -> None:
    path = checkpoint_of(finished) / "meta.json"
    raw = path.read_bytes()
    meta = json.loads(raw)
    try:
        path.write_text(seal({**meta, field: value}))
        try:
            loaded = verify(path.parent)
        except DataError:
            return
        assert type(loaded[field]) is type(meta[field])
    finally:
        path.write_bytes(raw)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "meta.json", "..", ""])
def test_names_of_files_outside_the_checkpoint_are_refused(name: str, finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "samples-000000000024"
    shutil.copytree(checkpoint_of(finished), copy)
    meta = json.loads((copy / "meta.json").read_text())
    meta["files"][name] = {"bytes": 1, "sha256": "0"}
    (copy / "meta.json").write_text(seal(meta))
    with pytest.raises(DataError, match="'files' is missing or invalid"):
        verify(copy)


@settings(max_examples=25)
@given(key=st.sampled_from(["k", "steps", "completed", "optimizer", "strategy", "samples_since_mean", ""]), value=JSON)
def test_hostile_shards_with_correct_checksums_give_a_data_error(key: str, value: Any, finished: Path) -> None:
    folder = checkpoint_of(finished)
    saved = {name: (folder / name).read_bytes() for name in ("meta.json", "rank-000.json")}
    notes = json.loads(saved["rank-000.json"])
    try:
        (folder / "rank-000.json").write_text(json.dumps({**notes, key: value} if key else value))
        meta = json.loads(saved["meta.json"])
        file = folder / "rank-000.json"
        meta["files"]["rank-000.json"] = {"bytes": file.stat().st_size, "sha256": digest(file)}
        (folder / "meta.json").write_text(seal(meta))
        with suppress(DataError):
            run(finished, epochs=1, resume=str(folder), eval_at_checkpoint=False)
    finally:
        if not folder.exists():
            folder.mkdir()
        for name, content in saved.items():
            (folder / name).write_bytes(content)


def test_the_best_checkpoint_is_kept_and_can_be_resumed(tmp_path: Path) -> None:
    run(tmp_path, epochs=5, keep_checkpoints=1, best_metric="loss", best_goal="max")  # the loss falls: the first is the best
    names = sorted(p.name for p in (tmp_path / "ckpt").glob("samples-*"))
    evaluated = {
        e["position"]: e["metrics"]["loss"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "evaluation"
    }
    highest = max(evaluated, key=lambda position: evaluated[position])
    assert highest < 120
    assert names == [f"samples-{highest:012d}", "samples-000000000120"]
    assert read_best(tmp_path / "ckpt") == {
        "position": highest, "checkpoint": names[0], "metric": "loss", "value": evaluated[highest],
    }  # fmt: skip
    assert best(tmp_path / "ckpt").name == names[0]
    run(tmp_path, epochs=6, keep_checkpoints=1, resume="best", best_goal="max")
    log = (tmp_path / "log" / "rank-000.txt").read_text()
    assert f"resuming from {names[0]}: {highest} samples are done" in log


def test_resume_best_without_a_best_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "best.json").write_text('{"position": "../.."}')
    with pytest.raises(DataError, match="no best checkpoint"):
        run(tmp_path, epochs=1, resume="best")
