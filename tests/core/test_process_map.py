"""Work shared out over processes: results in order, errors as they were, a death told."""

from __future__ import annotations

import math
import operator
import os

import pytest

from roundelay.core.process_map import process_map
from roundelay.errors import RoundelayError


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_order(jobs: int) -> None:
    assert list(process_map(operator.neg, range(100), jobs=jobs, progress="none", chunk=3)) == [-n for n in range(100)]
    assert list(process_map(operator.neg, [], jobs=jobs, progress="none")) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_arrive(jobs: int) -> None:
    with pytest.raises(ValueError, match="math domain error"):
        list(process_map(math.sqrt, [1, 4, -1, 9], jobs=jobs, progress="none", chunk=1))


def test_a_process_that_dies_is_no_riddle() -> None:
    with pytest.raises(RoundelayError, match=r"a working process died[\s\S]*fewer jobs"):
        list(process_map(os._exit, [3, 3], jobs=2, progress="none", chunk=1))


def test_nobody_starts_a_thread_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert list(process_map(os.getenv, ["OMP_NUM_THREADS"] * 2, jobs=2, progress="none", chunk=1)) == ["1", "1"]
    assert os.environ["OMP_NUM_THREADS"] == "7"
