"""Loaders: in order, never further ahead than they may, and whatever happens to them is seen."""

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

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Place:
    epoch: int
    start: int
    stop: int


def counted(upto: int, taken: list[int]) -> Iterator[int]:
    for n in range(upto):
        taken.append(n)
        yield n


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_pieces_come_in_the_order_of_their_claims(workers: int) -> None:
    def prepare(n: int) -> int:
        time.sleep(0.002 * (n % 3))  # later ones are often ready earlier
        return n * n

    assert list(PrefetchLoader(range(30), prepare, workers=workers)) == [(n, n * n) for n in range(30)]


def test_nothing_is_claimed_or_held_beyond_the_depth() -> None:
    taken: list[int] = []
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

    loader = PrefetchLoader(counted(60, taken), lambda n: Held(), workers=2, most=4)
    for given, _ in loader:
        assert loader.depth <= 4
        assert len(taken) <= given + 1 + 4
    assert len(taken) == 60
    assert most_alive <= 4 + 2  # those ahead, the learner's, and the one it has just let go


def test_the_depth_grows_while_the_learner_waits_and_falls_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "CALM", 5)
    slow = threading.Event()
    slow.set()

    def prepare(n: int) -> int:
        if slow.is_set():
            time.sleep(0.01)
        return n

    loader = PrefetchLoader(range(10_000), prepare, workers=1, most=5)
    pieces = iter(loader)
    deadline = time.monotonic() + PATIENCE_S
    while loader.depth < 5 and time.monotonic() < deadline:
        next(pieces)
    assert loader.depth == 5
    assert loader.waited_s > 0
    slow.clear()
    while loader.depth > 2 and time.monotonic() < deadline:
        next(pieces)
        time.sleep(0.02)  # the gradient
    assert loader.depth == 2
    pieces.close()  # type: ignore[attr-defined]


def test_waiting_for_a_claim_is_not_waiting_for_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(loaders, "time", clock)

    def claims() -> Iterator[int]:
        for n in range(4):
            clock.now += 10.0
            yield n

    def prepare(n: int) -> int:
        clock.now += 1.0 if n == 2 else 0.0
        return n

    loader = PrefetchLoader(claims(), prepare, least=1, most=1)
    waits = [loader.last_s for _ in loader]
    assert waits in ([0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0])  # piece 2 may be ready before it is asked for
    assert sum(waits) == loader.waited_s


def test_an_error_comes_out_where_its_piece_would_have() -> None:
    def prepare(n: int) -> int:
        if n == 3:
            raise DataError("this one is broken", where="piece 3")
        return n

    seen: list[int] = []
    with pytest.raises(DataError, match="this one is broken"):
        seen.extend(claim for claim, _ in PrefetchLoader(range(10), prepare, workers=2))
    assert seen == [0, 1, 2]


def test_an_error_of_the_claims_is_raised_after_what_was_claimed() -> None:
    def claims() -> Iterator[int]:
        yield from range(3)
        raise DataError("no more", where="sharding")

    seen: list[int] = []
    with pytest.raises(DataError, match="no more"):
        seen.extend(claim for claim, _ in PrefetchLoader(claims(), lambda n: n))
    assert seen == [0, 1, 2]


def test_bad_moments_of_a_file_system_are_survived_and_bad_days_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "PAUSE_S", 0.001)
    failures = {2: 2, 5: 1}

    def prepare(n: int) -> int:
        if failures.get(n, 0):
            failures[n] -= 1
            raise OSError(5, "Input/output error", "/far/away")
        return n

    assert [c for c, _ in PrefetchLoader(range(8), prepare)] == list(range(8))
    failures[4] = 99
    with pytest.raises(DataError, match="could not be read, 3 times in a row: Input/output error"):
        list(PrefetchLoader(range(8), prepare))


def test_a_loader_thread_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "LOOK_S", 0.02)
    monkeypatch.setattr(PrefetchLoader, "_work", lambda self: None)
    with pytest.raises(RoundelayError, match="ended without a word"):
        list(PrefetchLoader(range(3), lambda n: n))


def test_a_learner_that_leaves_early_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    for _ in PrefetchLoader(range(1000), lambda n: n, workers=3):
        break
    deadline = time.monotonic() + PATIENCE_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


# ------------------------------------------------------------------------------------------------------- processes


@dataclass
class Squares:
    """Batches that say who made them."""

    poison: int = -1

    def batch(self, epoch: int, start: int, stop: int) -> dict[str, Any]:
        if start == self.poison:
            os.kill(os.getpid(), signal.SIGKILL)
        if start == 90:
            raise DataError("nothing there", where="place 90", hint="look elsewhere")
        places = torch.arange(start, stop)
        return {"places": places, "squares": (places * places, epoch), "process": os.getpid()}


def test_killed_loader_processes_are_replaced_and_nothing_is_lost() -> None:
    prepare = ProcessBatches(Squares())
    claims = [Place(1, n, n + 2) for n in range(0, 24, 2)] + [Place(1, 24, 24), Place(1, 90, 92)]
    seen: list[int] = []

    def watched() -> None:
        for claim, batch in PrefetchLoader(claims, prepare, workers=1):
            if claim.start == claim.stop:
                assert batch is None
                continue
            seen.extend(batch["places"].tolist())
            assert batch["squares"][0].tolist() == [n * n for n in batch["places"].tolist()]
            assert batch["process"] != os.getpid()
            if claim.start == 4:
                (child,) = prepare.ids
                os.kill(child, signal.SIGKILL)

    with pytest.raises(DataError, match=r"nothing there[\s\S]*place 90[\s\S]*look elsewhere"):
        watched()
    assert prepare.deaths == 1
    assert seen == list(range(24))
    assert prepare.ids == []


def test_data_that_kills_every_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LIVES", 2)
    with pytest.raises(DataError, match=r"2 loader processes died over the same piece[\s\S]*places 4 to 6"):
        list(PrefetchLoader([Place(0, 4, 6)], ProcessBatches(Squares(poison=4))))
