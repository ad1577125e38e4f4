"""Functions and objects on several processes: order, errors, deaths, state between calls."""

from __future__ import annotations

import collections
import math
import operator
import os

import pytest

from roundelay.core.process_map import WorkerDied, WorkerPool, WorkerProcess, process_map
from roundelay.errors import DataError


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_items(jobs: int) -> None:
    assert list(process_map(operator.neg, range(100), jobs=jobs, progress="none", chunk=3)) == [-n for n in range(100)]
    assert list(process_map(operator.neg, [], jobs=jobs, progress="none")) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_exception_of_the_function_is_raised(jobs: int) -> None:
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        list(process_map(math.sqrt, [1, 4, -1, 9], jobs=jobs, progress="none", chunk=1))


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(WorkerDied, match="a worker process died"):
        list(process_map(os._exit, [3, 3], jobs=2, progress="none", chunk=1))


def test_processes_use_one_thread_each() -> None:
    assert list(process_map(os.getenv, ["OMP_NUM_THREADS"] * 2, jobs=2, progress="none", chunk=1)) == ["1", "1"]


class Adder:
    """Keeps a total between calls."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise DataError("start must be >= 0 (got -1)", where="Adder", hint="use a larger start")
        self.total = start

    def add(self, amount: int) -> int:
        if amount < 0:
            raise DataError("amount must be >= 0 (got -1)", where="add", hint="use a larger amount")
        self.total += amount
        return self.total

    def pid(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        os._exit(3)

    def divide(self, n: int) -> float:
        return 1 / n


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_objects_keep_their_state_and_answer_in_order(jobs: int) -> None:
    with WorkerPool(Adder, [(n,) for n in range(5)], jobs=jobs) as pool:
        pool.call("add", 10)
        assert pool.call("add", 10) == [20, 21, 22, 23, 24]
        assert len(set(pool.call("pid"))) == jobs
        assert (os.getpid() in pool.call("pid")) == (jobs == 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_items_are_mapped_in_order_with_progress(jobs: int) -> None:
    counts: list[int] = []
    with WorkerPool(Adder, [(0,)] * jobs, jobs=jobs) as pool:
        results = list(pool.map("divide", ((n,) for n in range(1, 60)), counts.append))
    assert results == [1 / n for n in range(1, 60)]
    assert counts == list(range(1, 60))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_a_method_keeps_its_parts_and_the_pool(jobs: int) -> None:
    with WorkerPool(Adder, [(0,), (1,)], jobs=jobs) as pool:
        with pytest.raises(DataError) as caught:
            pool.call("add", -1)
        assert (caught.value.message, caught.value.where) == ("amount must be >= 0 (got -1)", "add")
        assert caught.value.hint == "use a larger amount"
        with pytest.raises(ZeroDivisionError):
            list(pool.map("divide", [(1,), (0,), (2,)]))
        assert pool.call("add", 1) == [1, 2]


def test_an_error_of_the_constructor_is_raised_by_the_first_call() -> None:
    with WorkerPool(Adder, [(0,), (-1,)], jobs=2) as pool, pytest.raises(DataError, match="start must be >= 0"):
        pool.call("add", 1)


def test_a_dead_worker_is_named_with_its_exit_code() -> None:
    with (
        WorkerPool(Adder, [(0,), (1,)], jobs=2, what="an aligning process") as pool,
        pytest.raises(WorkerDied, match=r"an aligning process died\n.*exit code 3"),
    ):
        pool.call("leave")
    with WorkerPool(Adder, [(0,), (1,)], jobs=2) as pool, pytest.raises(WorkerDied, match="exit code 3"):
        list(pool.map("leave", [()]))


def test_a_single_process_answers_until_it_is_closed() -> None:
    worker = WorkerProcess(Adder, 3)
    assert worker.call("add", 2) == 5
    assert worker.pid != os.getpid()
    worker.close()
    assert not worker.is_alive()


def test_what_cannot_be_pickled_is_an_error_at_the_start() -> None:
    with pytest.raises((TypeError, AttributeError)):
        WorkerPool(collections.Counter, [(lambda: 0,), (lambda: 0,)], jobs=2)
