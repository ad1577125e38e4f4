"""Prefetching loaders: order, depth, waiting times, errors, and killed processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from roundelay.data import loader as loaders
from roundelay.data import process
from roundelay.data.loader import PrefetchLoader
from roundelay.data.process import ProcessBatches
from roundelay.errors import DataError, RoundelayError

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Lease:
    epoch: int
    start: int
    stop: int


def counted(count: int, leased: list[int]) -> Iterator[int]:
    for n in range(count):
        leased.append(n)
        yield n


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_items_come_in_the_order_of_their_leases(workers: int) -> None:
    def prepare(n: int) -> int:
        time.sleep(0.002 * (n % 3))  # later items are often ready earlier
        return n * n

    assert list(PrefetchLoader(range(30), prepare, workers=workers)) == [(n, n * n) for n in range(30)]


def test_nothing_is_leased_or_held_beyond_the_depth() -> None:
    leased: list[int] = []
    alive = most_alive = 0
    lock = threading.Lock()

    class Held:
        def __init__(self) -> None:
            nonlocal alive, most_alive
            with lock:
                alive += 1
                most_alive = max(most_alive, alive)

        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1

    loader = PrefetchLoader(counted(60, leased), lambda n: Held(), workers=2, max_depth=4)
    for n, _ in loader:
        assert loader.depth <= 4
        assert len(leased) <= n + 1 + 4
    assert len(leased) == 60
    assert most_alive <= 4 + 2  # prefetched items, the current one, and the previous one


def test_the_depth_grows_while_the_learner_waits_and_then_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "SHRINK_AFTER", 5)
    slow = threading.Event()
    slow.set()

    def prepare(n: int) -> int:
        if slow.is_set():
            time.sleep(0.01)
        return n

    loader = PrefetchLoader(range(10_000), prepare, workers=1, max_depth=5)
    items = iter(loader)
    deadline = time.monotonic() + TIMEOUT_S
    while loader.depth < 5 and time.monotonic() < deadline:
        next(items)
    assert loader.depth == 5
    assert loader.waited_s > 0
    slow.clear()
    while loader.depth > 2 and time.monotonic() < deadline:
        next(items)
        time.sleep(0.02)  # the gradient
    assert loader.depth == 2
    items.close()  # type: ignore[attr-defined]


def test_only_waiting_for_leased_items_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 2 is prepared only after the learner has begun to wait for it: one second of waiting, exactly."""

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(loaders, "time", clock)
    prepared = {n: threading.Event() for n in range(4)}
    waiting = threading.Event()

    def leases() -> Iterator[int]:
        for n in range(4):
            clock.now += 10.0
            yield n

    def prepare(n: int) -> int:
        if n == 2:
            assert waiting.wait(TIMEOUT_S)
            clock.now += 1.0
        prepared[n].set()
        return n

    class Learner(PrefetchLoader[int]):
        def _check_alive(self) -> None:  # called when the loader starts to wait for an item
            super()._check_alive()
            if self._items and self._items[0].lease == 2:
                waiting.set()

    loader = Learner(leases(), prepare, min_depth=1, max_depth=1)
    waits = []
    for n, _ in loader:
        waits.append(loader.last_s)
        if n + 1 < 4 and n + 1 != 2:
            assert prepared[n + 1].wait(TIMEOUT_S)
    assert waits == [0.0, 0.0, 1.0, 0.0]
    assert sum(waits) == loader.waited_s


def test_an_error_is_raised_in_place_of_its_item() -> None:
    def prepare(n: int) -> int:
        if n == 3:
            raise DataError("item 3 is damaged", where="item 3")
        return n

    seen: list[int] = []
    with pytest.raises(DataError, match="item 3 is damaged"):
        seen.extend(lease for lease, _ in PrefetchLoader(range(10), prepare, workers=2))
    assert seen == [0, 1, 2]


def test_an_error_of_the_leases_is_raised_after_the_last_lease() -> None:
    def leases() -> Iterator[int]:
        yield from range(3)
        raise DataError("no more", where="sharding")

    seen: list[int] = []
    with pytest.raises(DataError, match="no more"):
        seen.extend(lease for lease, _ in PrefetchLoader(leases(), lambda n: n))
    assert seen == [0, 1, 2]


def test_file_system_errors_are_retried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "RETRY_S", 0.001)
    failures = {2: 2, 5: 1}

    def prepare(n: int) -> int:
        if failures.get(n, 0):
            failures[n] -= 1
            raise OSError(5, "Input/output error", "/mnt/data")
        return n

    assert [c for c, _ in PrefetchLoader(range(8), prepare)] == list(range(8))
    failures[4] = 99
    with pytest.raises(DataError, match="reading training data failed 3 times: Input/output error"):
        list(PrefetchLoader(range(8), prepare))


def test_exited_loader_threads_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "CHECK_S", 0.02)
    monkeypatch.setattr(PrefetchLoader, "_work", lambda self: None)
    with pytest.raises(RoundelayError, match="exited unexpectedly"):
        list(PrefetchLoader(range(3), lambda n: n))


def test_a_loop_that_ends_early_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    for _ in PrefetchLoader(range(1000), lambda n: n, workers=3):
        break
    deadline = time.monotonic() + TIMEOUT_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


# ------------------------------------------------------------------------------------------------------- processes


@dataclass
class Squares:
    """Batches that carry the id of the process that made them."""

    poison: int = -1

    def batch(self, epoch: int, start: int, stop: int) -> dict[str, Any]:
        if start == self.poison:
            os.kill(os.getpid(), signal.SIGKILL)
        if start == 90:
            raise DataError("sample 90 is missing", where="sample 90", hint="choose another")
        numbers = torch.arange(start, stop)
        return {"numbers": numbers, "squares": (numbers * numbers, epoch), "process": os.getpid()}


def test_killed_loader_processes_are_replaced() -> None:
    prepare = ProcessBatches(Squares())
    leases = [Lease(1, n, n + 2) for n in range(0, 24, 2)] + [Lease(1, 24, 24), Lease(1, 90, 92)]
    seen: list[int] = []

    def iterate() -> None:
        for lease, batch in PrefetchLoader(leases, prepare, workers=1):
            if lease.start == lease.stop:
                assert batch is None
                continue
            seen.extend(batch["numbers"].tolist())
            assert batch["squares"][0].tolist() == [n * n for n in batch["numbers"].tolist()]
            assert batch["process"] != os.getpid()
            if lease.start == 4:
                (child,) = prepare.ids
                os.kill(child, signal.SIGKILL)

    with pytest.raises(DataError, match=r"sample 90 is missing[\s\S]*sample 90[\s\S]*choose another"):
        iterate()
    assert prepare.deaths == 1
    assert seen == list(range(24))
    assert prepare.ids == []


def test_data_that_kills_every_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_DEATHS", 2)
    with pytest.raises(DataError, match=r"2 loader processes died while preparing the same batch[\s\S]*samples 4 to 6"):
        list(PrefetchLoader([Lease(0, 4, 6)], ProcessBatches(Squares(poison=4))))
