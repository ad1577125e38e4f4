"""Virtual time: order, repeatability, and deadlocks that are named at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundelay.launch.context import DistributedContext
from roundelay.simulate.event_loop import EventLoop, SimulationDeadlock
from roundelay.simulate.simulated_cluster import PLAIN, SimulatedCluster, run_simulated
from roundelay.simulate.store import SimulatedStore


def test_events_come_in_the_order_of_time_then_of_planning() -> None:
    world, seen = EventLoop(), []

    def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            world.sleep(nap)
            seen.append((name, world.now))

    world.spawn("a", lambda: sleeper("a", 1.0, 1.0, 1.0))
    world.spawn("b", lambda: sleeper("b", 2.0, 1.0))
    world.at(2.5, lambda: seen.append(("event", world.now)))
    world.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("a", 2.0), ("event", 2.5), ("b", 3.0), ("a", 3.0)]


def test_the_digest_tells_two_orders_apart() -> None:
    def digest(nap: float) -> str:
        world = EventLoop()
        for name in ("a", "b"):
            world.spawn(name, lambda: world.sleep(nap) or world.sleep(0.5))
        world.run()
        return world.digest

    assert digest(1.0) == digest(1.0)
    assert digest(1.0) != digest(1.25)


def test_a_key_wakes_those_who_wait_for_it_and_nobody_else() -> None:
    world = EventLoop()
    store, woken = SimulatedStore(world), []

    def waiter(name: str, *keys: str) -> None:
        while store.get(keys[0]) is None:
            store.pause(0.01, *keys)
        woken.append((name, world.now))

    world.spawn("a", lambda: waiter("a", "x", "y"))
    world.spawn("b", lambda: waiter("b", "z"))
    world.at(3.0, lambda: store.set("x", "1"))
    world.at(5.0, lambda: store.add("z", 1))
    world.run()
    assert woken == [("a", 3.0), ("b", 5.0)]


def one_stays_away(context: DistributedContext) -> None:
    if context.rank != 2:
        context.comm.all_reduce_mean(torch.ones(3)).wait()


def test_a_missing_participant_is_a_deadlock_that_names_who_waits_for_whom() -> None:
    with pytest.raises(SimulationDeadlock) as error:
        run_simulated(one_stays_away, size=3)
    text = str(error.value)
    assert "rank 0 waits for rank 2 at mean 1 of 'all'" in text
    assert "rank 1 waits for rank 2" in text


def a_neighbour_stays_away(context: DistributedContext) -> None:
    rows = {r: {r: 0.5, (r + 1) % 2: 0.5} for r in range(2)}
    if context.rank == 1:
        context.comm.neighbor_average(torch.ones(3), rows[1]).wait()


def test_a_missing_neighbour_is_named_too() -> None:
    with pytest.raises(SimulationDeadlock, match="rank 1 waits for rank 0 at mix 1"):
        run_simulated(a_neighbour_stays_away, size=2)


def never_written(context: DistributedContext) -> None:
    context.comm.store.pause(0.01, "nobody-writes-this") if context.rank else None
    while context.comm.store.get("nobody-writes-this") is None and context.rank:
        context.comm.store.pause(0.01, "nobody-writes-this")


def test_a_key_that_nobody_writes_is_a_deadlock() -> None:
    with pytest.raises(SimulationDeadlock, match="the store's nobody-writes-this"):
        run_simulated(never_written, size=2)


def test_different_rendezvous_are_told_apart() -> None:
    def confused(context: DistributedContext) -> None:
        x = torch.ones(2)
        context.comm.broadcast(x) if context.rank else context.comm.all_reduce_mean(x).wait()

    with pytest.raises(Exception, match="comes to rendezvous 1 with cast, the others with mean"):
        run_simulated(confused, size=2)


def verbs(context: DistributedContext) -> dict[str, Any]:
    comm, rank = context.comm, context.rank
    published = comm.publish(torch.full((3,), float(rank)))
    mean = comm.all_reduce_mean(torch.full((2,), float(rank)), float(rank + 1)).wait()
    part = comm.new_group([0, 2], "even")
    inner = part.all_reduce_mean(torch.tensor([float(rank)])).wait() if part is not None else None
    before = comm.remote_add((rank + 1) % comm.size, torch.ones(3))
    comm.all_reduce_mean(torch.zeros(1)).wait()
    got = torch.empty(3)
    version = comm.remote_get(0, got)
    return {"mean": mean, "inner": inner, "before": before, "w": published.vector, "got": got, "version": version}


def test_the_verbs_do_what_other_wires_do() -> None:
    found = run_simulated(verbs, size=3)
    assert all(torch.equal(f["mean"], torch.full((2,), (0 + 2 + 6) / 6)) for f in found)
    assert found[1]["inner"] is None
    assert all(float(found[r]["inner"]) == 1.0 for r in (0, 2))
    assert all(torch.equal(f["w"], torch.full((3,), r + 1.0)) for r, f in enumerate(found))
    assert all(f["before"] == 0 and f["version"] == 1 for f in found)
    assert all(torch.equal(f["got"], torch.ones(3)) for f in found)


def test_learners_roll_their_own_dice() -> None:
    def draw(context: DistributedContext, order: int) -> torch.Tensor:
        context.runtime.seed_rank(7 + context.rank)
        context.comm.all_reduce_mean(torch.zeros(1)).wait()
        rolled = []
        for _ in range(2):
            context.runtime.compute(lambda: rolled.append(torch.rand(2)) or 0.0, 1 + order * context.rank, 1.0)
        return torch.cat(rolled)

    for order in (0, 3):  # whoever computes first
        found = run_simulated(draw, order, size=2)
        for rank in range(2):
            assert torch.equal(found[rank], torch.rand(4, generator=torch.Generator().manual_seed(7 + rank)))


def test_a_learner_that_fails_takes_the_waiting_along_and_says_why() -> None:
    def work(context: DistributedContext) -> None:
        if context.rank == 1:
            raise ValueError("not today")
        context.comm.all_reduce_mean(torch.ones(1)).wait()

    with pytest.raises(Exception, match="not today"):
        SimulatedCluster(PLAIN, machines=["here"] * 3).run(work)
