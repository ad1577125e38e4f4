"""Virtual time: the order of events, determinism, and deadlocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundelay.launch.context import DistributedContext
from roundelay.simulate.event_loop import EventLoop, SimulationDeadlock
from roundelay.simulate.simulated_cluster import PLAIN, SimulatedCluster, run_simulated
from roundelay.simulate.store import SimulatedStore


def test_events_run_in_the_order_of_time_then_of_scheduling() -> None:
    loop, seen = EventLoop(), []

    def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            loop.sleep(nap)
            seen.append((name, loop.now))

    loop.spawn("a", lambda: sleeper("a", 1.0, 1.0, 1.0))
    loop.spawn("b", lambda: sleeper("b", 2.0, 1.0))
    loop.at(2.5, lambda: seen.append(("event", loop.now)))
    loop.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("a", 2.0), ("event", 2.5), ("b", 3.0), ("a", 3.0)]


def test_the_digest_distinguishes_two_orders() -> None:
    def digest(nap: float) -> str:
        loop = EventLoop()
        for name in ("a", "b"):
            loop.spawn(name, lambda: loop.sleep(nap) or loop.sleep(0.5))
        loop.run()
        return loop.digest

    assert digest(1.0) == digest(1.0)
    assert digest(1.0) != digest(1.25)


def test_a_key_wakes_only_the_processes_that_wait_for_it() -> None:
    loop = EventLoop()
    store, woken = SimulatedStore(loop), []

    def waiter(name: str, *keys: str) -> None:
        while store.get(keys[0]) is None:
            store.pause(0.01, *keys)
        woken.append((name, loop.now))

    loop.spawn("a", lambda: waiter("a", "x", "y"))
    loop.spawn("b", lambda: waiter("b", "z"))
    loop.at(3.0, lambda: store.set("x", "1"))
    loop.at(5.0, lambda: store.add("z", 1))
    loop.run()
    assert woken == [("a", 3.0), ("b", 5.0)]


def one_rank_is_missing(context: DistributedContext) -> None:
    if context.rank != 2:
        context.comm.all_reduce_mean(torch.ones(3)).wait()


def test_a_missing_rank_is_a_deadlock_that_names_the_waiting_ranks() -> None:
    with pytest.raises(SimulationDeadlock) as error:
        run_simulated(one_rank_is_missing, size=3)
    text = str(error.value)
    assert "rank 0 waits for rank 2 at mean 1 of 'all'" in text
    assert "rank 1 waits for rank 2" in text


def a_neighbor_is_missing(context: DistributedContext) -> None:
    rows = {r: {r: 0.5, (r + 1) % 2: 0.5} for r in range(2)}
    if context.rank == 1:
        context.comm.neighbor_average(torch.ones(3), rows[1]).wait()


def test_a_missing_neighbor_is_named() -> None:
    with pytest.raises(SimulationDeadlock, match="rank 1 waits for rank 0 at neighbor_average 1"):
        run_simulated(a_neighbor_is_missing, size=2)


def never_written(context: DistributedContext) -> None:
    context.comm.store.pause(0.01, "missing-key") if context.rank else None
    while context.comm.store.get("missing-key") is None and context.rank:
        context.comm.store.pause(0.01, "missing-key")


def test_a_key_that_is_never_written_is_a_deadlock() -> None:
    with pytest.raises(SimulationDeadlock, match="store key missing-key"):
        run_simulated(never_written, size=2)


def test_different_collectives_at_once_are_an_error() -> None:
    def confused(context: DistributedContext) -> None:
        x = torch.ones(2)
        context.comm.broadcast(x) if context.rank else context.comm.all_reduce_mean(x).wait()

    with pytest.raises(Exception, match=r"collective 1 of .all.: rank 1 calls broadcast, other ranks mean"):
        run_simulated(confused, size=2)


def call_operations(context: DistributedContext) -> dict[str, Any]:
    comm, rank = context.comm, context.rank
    shared_weights = comm.publish(torch.full((3,), float(rank)))
    mean = comm.all_reduce_mean(torch.full((2,), float(rank)), float(rank + 1)).wait()
    part = comm.new_group([0, 2], "even")
    inner = part.all_reduce_mean(torch.tensor([float(rank)])).wait() if part is not None else None
    before = comm.remote_add((rank + 1) % comm.size, torch.ones(3))
    comm.all_reduce_mean(torch.zeros(1)).wait()
    got = torch.empty(3)
    version = comm.remote_get(0, got)
    return {"mean": mean, "inner": inner, "before": before, "w": shared_weights.vector, "got": got, "version": version}


def test_operations_give_the_results_of_other_backends() -> None:
    results = run_simulated(call_operations, size=3)
    assert all(torch.equal(f["mean"], torch.full((2,), (0 + 2 + 6) / 6)) for f in results)
    assert results[1]["inner"] is None
    assert all(float(results[r]["inner"]) == 1.0 for r in (0, 2))
    assert all(torch.equal(f["w"], torch.full((3,), r + 1.0)) for r, f in enumerate(results))
    assert all(f["before"] == 0 and f["version"] == 1 for f in results)
    assert all(torch.equal(f["got"], torch.ones(3)) for f in results)


def test_every_learner_has_its_own_rng() -> None:
    def draw(context: DistributedContext, order: int) -> torch.Tensor:
        context.runtime.seed_rank(7 + context.rank)
        context.comm.all_reduce_mean(torch.zeros(1)).wait()
        values = []
        for _ in range(2):
            context.runtime.compute(lambda: values.append(torch.rand(2)) or 0.0, 1 + order * context.rank, 1.0)
        return torch.cat(values)

    for order in (0, 3):  # for any order of the learners
        results = run_simulated(draw, order, size=2)
        for rank in range(2):
            assert torch.equal(results[rank], torch.rand(4, generator=torch.Generator().manual_seed(7 + rank)))


def test_the_error_of_a_failed_learner_is_raised() -> None:
    def work(context: DistributedContext) -> None:
        if context.rank == 1:
            raise ValueError("not today")
        context.comm.all_reduce_mean(torch.ones(1)).wait()

    with pytest.raises(Exception, match="not today"):
        SimulatedCluster(PLAIN, machines=["here"] * 3).run(work)
