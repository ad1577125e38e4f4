"""Checks of the run directory: all ranks see the one of rank 0, or all stop with one error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.engine.validate import check_shared_directory
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext
from roundelay.launch.threads import run_threads


def errors_of(folders: list[Path]) -> list[Any]:
    """Check the run directories of as many ranks; return the error of each."""

    def job(context: DistributedContext) -> Any:
        job = SimpleNamespace(store=context.comm.store, membership=context.comm.membership)
        try:
            check_shared_directory(folders[context.rank], context, job, 20.0)
        except UsageError as error:
            return error
        return None

    return run_threads(job, size=len(folders))


def test_a_run_directory_that_is_not_shared_is_named_on_all_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("shared", "local", "shared")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    errors = errors_of(folders)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].message == "the run directory of rank 0 is not visible to rank 1"
    assert f"rank 1 on localhost, run={tmp_path / 'local'}" in errors[0].where


@pytest.mark.parametrize("text", ["", "another token"])
def test_an_old_token_does_not_make_a_directory_shared(tmp_path: Path, text: str) -> None:
    folders = [tmp_path / "shared", tmp_path / "local"]
    for folder in folders:
        folder.mkdir()
    (folders[1] / ".token").write_text(text)
    assert [type(error) for error in errors_of(folders)] == [UsageError, UsageError]


def test_a_shared_run_directory_is_accepted(tmp_path: Path) -> None:
    assert errors_of([tmp_path] * 3) == [None] * 3
