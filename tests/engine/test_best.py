"""The best checkpoint: one that is deleted at the same time does not become the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.engine.best import BestCheckpoint
from roundelay.engine.checkpoint import Checkpoints
from roundelay.engine.manifest import folder_name, read_best
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore


class InterruptedStore(LocalStore):
    """A store that calls `before` once before the n-th operation of some kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.before = -1, lambda: None

    def _count(self) -> None:
        self.number -= 1
        if self.number == 0:
            self.before()

    def claim(self, key: str, value: str) -> str:
        self._count()
        return super().claim(key, value)

    def list(self, prefix: str) -> dict[str, str]:
        self._count()
        return super().list(prefix)

    def compare_and_set(self, expected: Mapping[str, str | None], values: Mapping[str, str | None]) -> Any:
        self._count()
        return super().compare_and_set(expected, values)


def ranks(folder: Path, store: LocalStore) -> tuple[BestCheckpoint, Checkpoints]:
    """Return the best checkpoint as one rank sees it, and the checkpoints as another one does, which keeps the last two."""
    learner: Any = SimpleNamespace(
        rank=0,
        context=SimpleNamespace(rank=0, size=2),
        job=SimpleNamespace(store=store, membership=StoreMembership(store)),
    )
    return BestCheckpoint(folder, learner, "loss", "min"), Checkpoints(folder, learner, 2, {})


@pytest.mark.parametrize("number", range(1, 12))
def test_the_best_checkpoint_is_never_deleted_wherever_another_rank_prunes(tmp_path: Path, number: int) -> None:
    store = InterruptedStore()
    for position in (100, 200, 300, 400):
        (tmp_path / folder_name(position)).mkdir()
    best, checkpoints = ranks(tmp_path, store)
    best.update(100, {"loss": 2.0})
    store.before, store.number = lambda: checkpoints.prune(400), number
    best.update(200, {"loss": 1.0})
    store.number = -1
    note = read_best(tmp_path)
    assert note is not None
    assert (tmp_path / note["checkpoint"]).is_dir()


@pytest.mark.parametrize("number", range(1, 12))
def test_the_best_checkpoint_is_never_deleted_wherever_another_rank_finds_a_better_one(tmp_path: Path, number: int) -> None:
    store = InterruptedStore()
    for position in (100, 200, 300, 400):
        (tmp_path / folder_name(position)).mkdir()
    best, checkpoints = ranks(tmp_path, store)
    best.update(100, {"loss": 2.0})
    store.before, store.number = lambda: best.update(200, {"loss": 1.0}), number
    checkpoints.prune(400)
    store.number = -1
    note = read_best(tmp_path)
    assert note is not None
    assert (tmp_path / note["checkpoint"]).is_dir()
