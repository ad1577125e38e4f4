"""The final average: how it waits."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.comm.torch_backend import TorchCommunicator
from roundelay.engine.closing import ClosingAverage
from roundelay.errors import PeerLost
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore


class CountingStore(LocalStore):
    """A store that counts how often it is read."""

    reads = 0

    def get_many(self, keys: Any) -> dict[str, str | None]:
        self.reads += 1
        return super().get_many(keys)

    def list(self, prefix: str) -> dict[str, str]:
        self.reads += 1
        return super().list(prefix)


def closing_on(store: LocalStore) -> tuple[ClosingAverage, Any]:
    comm = TorchCommunicator.__new__(TorchCommunicator)
    closing = ClosingAverage.__new__(ClosingAverage)
    closing.comm = SimpleNamespace(membership=StoreMembership(store))  # type: ignore[assignment]
    closing.learner, closing._index = SimpleNamespace(rank=0), {0: 0, 1: 1}  # type: ignore[assignment]
    return closing, comm


def test_a_wait_for_a_collective_does_not_read_the_store() -> None:
    store = CountingStore()
    closing, comm = closing_on(store)
    end = time.monotonic() + 0.3

    class Collective:
        @property
        def done(self) -> bool:
            return time.monotonic() > end

    closing._wait_for_work(comm, Collective(), [0, 1], 20.0)  # type: ignore[arg-type]
    assert store.reads == 0


def test_a_wait_for_a_collective_ends_once_this_rank_has_read_that_a_member_failed() -> None:
    store = LocalStore()
    closing, comm = closing_on(store)
    heartbeat = StoreMembership(store)
    heartbeat.report(1, "killed")
    timer = threading.Timer(0.1, heartbeat.refresh)
    timer.start()
    with pytest.raises(PeerLost, match="a member failed"):
        closing._wait_for_work(comm, SimpleNamespace(done=False), [0, 1], 60.0)  # type: ignore[arg-type]
    timer.join()
