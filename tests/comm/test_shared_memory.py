"""Shared vectors of one node: locks, wake-ups, deaths, and shared memory that leaves no files behind."""

from __future__ import annotations

import select
import threading

import pytest
import torch

from roundelay.comm.shared_memory import ShmVectors, memory_file
from roundelay.comm.vectors import LocalVectors, SharedVector, SharedVectors, drain_socket
from roundelay.errors import PeerLost, UsageError
from roundelay.fleet.store import LocalStore


def open_shm(size: int) -> list[ShmVectors]:
    """Return the views of all ranks; each is opened on its own thread, as all ranks must take part."""
    store, views = LocalStore(), {}

    def open_one(rank: int) -> None:
        views[rank] = ShmVectors(range(size), rank, torch.full((5,), float(rank)), store, "test", 10.0)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [views[rank] for rank in range(size)]


def open_local(size: int) -> list[SharedVectors]:
    vectors = LocalVectors(range(size))
    for rank in range(size):
        vectors.publish(rank, torch.full((5,), float(rank)))
    return [vectors.view(rank) for rank in range(size)]


@pytest.fixture(params=[open_local, open_shm], ids=["threads", "processes"])
def views(request: pytest.FixtureRequest):
    views = request.param(2)
    yield views
    for view in views:
        view.close()


def test_a_write_is_seen_by_all_ranks_and_counted(views: list[SharedVectors]) -> None:
    shared = SharedVector(views[0], 1)
    with shared.locked():
        assert shared.count(writes=1) == (1, 1)
        shared.vector.add_(2.0)
    other = SharedVector(views[1], 1)
    assert other.version == 1
    assert other.vector.tolist() == [3.0] * 5
    assert other.count() == (2, 1)


def test_a_lock_excludes_other_threads(views: list[SharedVectors]) -> None:
    locked = threading.Event()

    def lock() -> None:
        with views[1].lock(0):
            locked.set()

    with views[0].lock(0):
        thread = threading.Thread(target=lock)
        thread.start()
        assert not locked.wait(0.05)
    assert locked.wait(10)
    thread.join(10)


def test_several_wakeups_are_one(views: list[SharedVectors]) -> None:
    socket = views[1].wakeups()
    assert select.select([socket], [], [], 0)[0] == []
    for _ in range(1000):
        views[0].wake(1)
    assert select.select([socket], [], [], 10)[0] == [socket]
    drain_socket(socket)
    assert select.select([socket], [], [], 0)[0] == []


def test_a_closed_rank_is_not_alive() -> None:
    for opened in (open_local(2), open_shm(2)):
        assert opened[0].alive(1)
        opened[1].close()
        assert not opened[0].alive(1)
        opened[0].wake(1)  # a wake-up of a closed rank is no error
        opened[0].close()


def test_a_rank_that_does_not_join_is_an_error() -> None:
    with pytest.raises(PeerLost, match=r"ranks \[1\] did not share their memory"):
        ShmVectors(range(2), 0, torch.zeros(1), LocalStore(), "test", 0.05)


def test_full_shared_memory_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="shared memory is full"):
        memory_file("w-0", 1 << 60, "rank 0")
