"""Collectives between threads: their results, missing ranks and failed ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roundelay.comm.threads import ThreadCommunicator, ThreadGroup
from roundelay.errors import PeerLost


def run(size: int, job: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    group, results = ThreadGroup(size, timeout_s=10.0), [None] * size

    def rank_thread(rank: int) -> None:
        results[rank] = job(group.comm(rank))

    threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def test_collectives_reduce_over_all_ranks() -> None:
    def job(comm: ThreadCommunicator) -> list[float]:
        x = torch.tensor([float(comm.rank)])
        mean = comm.all_reduce_mean(x, weight=1.0 + comm.rank).wait()
        total = comm.all_reduce_(x.clone()).wait()
        row = {comm.rank: 0.5, (comm.rank + 1) % 2: 0.5} if comm.rank < 2 else {2: 1.0}
        mixed = comm.neighbor_average(x, row).wait()
        first = x + 7
        comm.broadcast(first)
        return [float(mean), float(total), float(mixed), float(first)]

    results = run(3, job)
    assert [r[0] for r in results] == [pytest.approx(8 / 6)] * 3
    assert [r[1:] for r in results] == [[3.0, 0.5, 7.0], [3.0, 0.5, 7.0], [3.0, 2.0, 7.0]]


def test_a_subgroup_has_its_own_ranks() -> None:
    def job(comm: ThreadCommunicator) -> list[float] | None:
        part = comm.new_group([2, 0], "part")
        if part is None:
            return None
        return [part.rank, part.ranks, float(part.all_reduce_(torch.tensor([float(comm.rank)])).wait())]

    assert run(3, job) == [[1, [2, 0], 2.0], None, [0, [2, 0], 2.0]]


def test_one_sided_operations_count_versions_and_bytes() -> None:
    def job(comm: ThreadCommunicator) -> tuple[int, int, float, int]:
        comm.publish(torch.zeros(2))
        before = comm.remote_add(0, torch.ones(2)) if comm.rank else -1
        comm.all_reduce_mean(torch.zeros(1)).wait()
        out = torch.empty(2)
        version = comm.remote_get(0, out)
        comm.all_reduce_mean(torch.zeros(1)).wait()
        sent = comm.bytes_sent()
        comm.close()
        comm.close()
        return before, version, float(out.sum()), sent

    results = run(3, job)
    assert sorted(r[0] for r in results) == [-1, 0, 1]
    assert {r[1:3] for r in results} == {(2, 4.0)}
    assert results[1][3] - results[0][3] == 8


def test_a_missing_rank_is_named_after_the_timeout() -> None:
    comm = ThreadGroup(2, timeout_s=0.05).comm(0)
    with pytest.raises(PeerLost, match=r"ranks \[1\] did not call collective 1"):
        comm.all_reduce_(torch.zeros(1)).wait()


def test_a_failed_rank_ends_the_wait_of_the_other_ranks() -> None:
    group = ThreadGroup(2)
    work = group.comm(0).all_reduce_(torch.zeros(1))
    assert not work.done
    group.fail(1, "out of memory")
    with pytest.raises(PeerLost, match="rank 1 was lost: out of memory"):
        work.wait()
    assert group.comm(0).live_ranks() == [0]
