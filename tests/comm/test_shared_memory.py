"""Shared vectors of one node: locks, wake-ups, deaths, and shared memory that leaves no files behind."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lock_holder import SIZE, LockHolder, mappings

from roundelay.comm.gossip.pair_average import PairAverager
from roundelay.comm.shared_memory import ShmVectors, is_stopped, memory_file, open_memory_file
from roundelay.comm.vectors import (
    AVERAGED,
    FENCED,
    HOLDER,
    ROUNDS,
    LocalVectors,
    LockTimeout,
    SharedVector,
    SharedVectors,
    drain_socket,
)
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


# -- moves -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def holder_process() -> Iterator[LockHolder]:
    holder = LockHolder()
    yield holder
    holder.kill()


@pytest.fixture
def holder(holder_process: LockHolder) -> Iterator[LockHolder]:
    yield holder_process
    holder_process.finish()
    with holder_process.vectors.lock(0):  # adds what was written late
        pass


def some_vectors(count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=random, dtype=torch.float64) for _ in range(count)]


@pytest.mark.dist
@pytest.mark.parametrize("point", ["before", "middle", "after"])
def test_an_average_that_is_stopped_does_not_delay_the_owner_and_is_completed_late(holder: LockHolder, point: str) -> None:
    owner, (a, b, *updates) = holder.vectors, some_vectors(4)
    with owner.lock(0) as own:
        own.vector.copy_(a)
    moves, averaged = owner.moves, int(owner.header(0)[AVERAGED])
    holder.start("average", point, b)
    for update in updates:
        with owner.lock(0) as own:  # the test's process continues only if the owner moves
            own.vector.add_(update)
    assert owner.moves == moves + 1
    rounds, other, _ = holder.result()
    with owner.lock(0) as own:
        torch.testing.assert_close(own.vector + other, a + b + sum(updates), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(own.vector - sum(updates), other, rtol=1e-13, atol=1e-13)
        assert own.header[AVERAGED] == averaged + 1
        assert own.header[ROUNDS] == rounds


@pytest.mark.dist
def test_an_addition_that_is_stopped_is_neither_lost_nor_halved(holder: LockHolder) -> None:
    owner, (a, d, update) = holder.vectors, some_vectors(3)
    with owner.lock(0) as own:
        own.vector.copy_(a)
    holder.start("add", "middle", d)
    with owner.lock(0) as own:
        own.vector.add_(update)
    holder.result()
    with owner.lock(0) as own:
        torch.testing.assert_close(own.vector, a + d + update, rtol=1e-13, atol=1e-13)


@pytest.mark.dist
def test_averages_go_on_in_the_new_memory(holder: LockHolder) -> None:
    owner, (a, b, c) = holder.vectors, some_vectors(3)
    holder.start("average", "middle", b)
    with owner.lock(0) as own:
        own.vector.copy_(a)
    holder.result()
    with owner.lock(0) as own:
        own.vector.copy_(a)
    holder.start("average", None, c)
    assert torch.equal(holder.result()[1], (a + c) / 2)
    assert torch.equal(owner.vector(0), (a + c) / 2)


@pytest.mark.dist
def test_repeated_moves_keep_no_memory_and_no_descriptors(holder: LockHolder) -> None:
    owner, (a,) = holder.vectors, some_vectors(1)
    holder.start("average", None, a)
    before = mappings(), holder.result()[2]
    moves = owner.moves
    for _ in range(50):
        holder.start("add", "middle", a)
        with owner.lock(0):
            pass
        holder.result()
        with owner.lock(0):
            pass
    assert owner.moves == moves + 50
    holder.start("average", None, a)
    assert (mappings(), holder.result()[2]) == before


@pytest.mark.dist
def test_memory_held_by_a_failed_rank_is_freed(holder: LockHolder) -> None:
    owner, (a,) = holder.vectors, some_vectors(1)
    before = mappings()
    holder.start("add", "middle", a)
    with owner.lock(0):
        pass
    assert mappings() > before
    owner.header(1)[FENCED] = 1
    with owner.lock(0):
        pass
    assert mappings() == before
    owner.header(1)[FENCED] = 0


@pytest.mark.dist
def test_only_a_stopped_or_ended_process_counts_as_stopped(holder: LockHolder) -> None:
    assert not is_stopped(holder.pid)  # it sleeps
    assert not is_stopped(os.getpid())
    holder.start("add", "before", some_vectors(1)[0])
    assert is_stopped(holder.pid)
    assert is_stopped(1 << 30)  # no such process


def test_the_header_names_the_last_other_rank_that_has_locked_a_vector() -> None:
    views = open_shm(3)
    with views[2].lock(2), pytest.raises(LockTimeout), views[1].lock(2, 0.01):
        pass
    assert views[2].header(2)[HOLDER] == 0
    with views[1].lock(2) as segment:
        with pytest.raises(LockTimeout), views[0].lock(2, 0.01):
            pass
        assert segment.header[HOLDER] == 2
    assert views[2].header(2)[HOLDER] == 2  # also until the lock is free: a process can be stopped right before
    for view in views:
        view.close()


def test_another_file_in_place_of_a_vector_is_a_lost_peer(tmp_path: Path) -> None:
    views = open_shm(2)
    with views[1]._own_mutex:
        views[1]._move()
    with (tmp_path / "file").open("wb") as file:  # as if the owner had closed its vectors and opened a file
        os.dup2(file.fileno(), views[1]._segments[1].fd)
    with pytest.raises(PeerLost), views[0].lock(1):
        pass
    assert PairAverager(views[0]).average(1, 0, 0.1) is None
    for view in views:
        view.close()


def test_a_memory_file_is_opened_by_its_name_and_size_only() -> None:
    fd = memory_file("w-1", 4096, "rank 1")
    os.close(open_memory_file(os.getpid(), fd, "w-1", 4096))
    for name, nbytes in (("w-1", 8192), ("w-10", 4096), ("w-", 4096)):
        with pytest.raises(PeerLost, match="is not its shared memory"):
            open_memory_file(os.getpid(), fd, name, nbytes)
    os.close(fd)
