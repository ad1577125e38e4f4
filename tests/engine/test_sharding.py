"""Every index is leased exactly once, in any order in which ranks ask, fail and resume."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.engine import node_leases
from roundelay.engine.sharding import (
    BatchLease,
    DynamicSharding,
    ShardPlan,
    Span,
    StaticSharding,
    merge_ranges,
    uncovered_ranges,
)
from roundelay.errors import PeerLost
from roundelay.fleet.store import LocalStore


@dataclass(frozen=True)
class Scenario:
    """The samples of a run, and the machines that share them."""

    samples: int
    total: int
    batches: list[int]
    machines: list[list[int]]
    first: int = 0

    def plan(self, rank: int) -> ShardPlan:
        machine = next(m for m in self.machines if rank in m)
        return ShardPlan(self.samples, self.total, self.batches, rank, machine, [m[0] for m in self.machines], self.first)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    samples = draw(st.integers(1, 12))
    batches = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    epochs = draw(st.integers(1, 3))
    total = draw(st.integers(1, samples * epochs))
    cuts = draw(st.sets(st.integers(1, max(1, len(batches) - 1))))
    machines: list[list[int]] = [[]]
    for rank in range(len(batches)):
        if rank in cuts and machines[-1]:
            machines.append([])
        machines[-1].append(rank)
    if draw(st.booleans()):
        machines = [[rank] for rank in range(len(batches))]
    return Scenario(samples, total, batches, machines, draw(st.integers(0, total - 1)))


def indices(scenario: Scenario, leases: Sequence[BatchLease]) -> list[int]:
    """Return the global indices of leases; assert that each lease lies in one epoch."""
    result: list[int] = []
    for lease in leases:
        assert 0 <= lease.start <= lease.stop <= scenario.samples
        assert lease.step_info.local_samples == lease.stop - lease.start
        result += range(lease.epoch * scenario.samples + lease.start, lease.epoch * scenario.samples + lease.stop)
    return result


# --------------------------------------------------------------------------------------------------------- static


@given(scenarios())
def test_static_sharding_leases_every_index_once(scenario: Scenario) -> None:
    by_rank = [list(StaticSharding(scenario.plan(rank))) for rank in range(len(scenario.batches))]
    everything = [p for leases in by_rank for p in indices(scenario, leases)]
    assert sorted(everything) == list(range(scenario.first, scenario.total))


@given(scenarios())
def test_all_ranks_have_the_same_rounds_and_their_weights_add_up(scenario: Scenario) -> None:
    by_rank = [list(StaticSharding(scenario.plan(rank))) for rank in range(len(scenario.batches))]
    assert len({len(leases) for leases in by_rank}) == 1
    for leases in zip(*by_rank, strict=True):
        assert len({lease.span for lease in leases}) == 1
        global_samples = leases[0].span[1] - leases[0].span[0]
        assert all(lease.step_info.global_samples == global_samples for lease in leases)
        assert sum(lease.step_info.local_samples for lease in leases) == global_samples
        for machine in scenario.machines:
            assert {leases[r].step_info.node_samples for r in machine} == {
                sum(leases[r].step_info.local_samples for r in machine)
            }


@given(scenarios(), st.integers(0, 5))
def test_static_sharding_can_stop_after_any_round_and_resume(scenario: Scenario, steps: int) -> None:
    done = []
    for rank in range(len(scenario.batches)):
        sharding = StaticSharding(scenario.plan(rank))
        sharding.stop_at = steps
        done += indices(scenario, list(sharding))
    position = max(done, default=scenario.first - 1) + 1
    other = Scenario(scenario.samples, scenario.total, [3, 1], [[0], [1]], position)
    rest = [p for rank in range(2) for p in indices(other, list(StaticSharding(other.plan(rank))))]
    assert sorted(done + rest) == list(range(scenario.first, scenario.total))


# --------------------------------------------------------------------------------------------------------- dynamic


def shardings(
    scenario: Scenario, store: LocalStore, missing_ranges: Sequence[Span] = (), **options: Any
) -> list[DynamicSharding]:
    return [DynamicSharding(scenario.plan(rank), store, missing_ranges, **options) for rank in range(len(scenario.batches))]


def in_threads(ranks: list[DynamicSharding], begun: Iterator[BatchLease] | None = None) -> list[list[BatchLease]]:
    """Iterate all shardings at once in threads, each at full speed; the first one may have begun."""
    result: list[list[BatchLease]] = [[] for _ in ranks]

    def learner(rank: int) -> None:
        for lease in begun if begun is not None and rank == 0 else ranks[rank]:
            if not ranks[rank].begin(lease):
                continue
            result[rank].append(lease)
            ranks[rank].complete(lease.span)

    threads = [threading.Thread(target=learner, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank does not stop"
    return result


@settings(max_examples=60)
@given(scenarios(), st.booleans())
def test_dynamic_sharding_leases_every_index_once(scenario: Scenario, stays: bool) -> None:
    by_rank = in_threads(shardings(scenario, LocalStore(), stays=stays))
    everything = [p for leases in by_rank for p in indices(scenario, leases)]
    assert sorted(everything) == list(range(scenario.first, scenario.total))
    for machine in scenario.machines:
        for leases in zip(*(by_rank[r] for r in machine), strict=True):
            assert len({lease.span for lease in leases}) == 1
            assert {lease.step_info.node_samples for lease in leases} == {
                sum(lease.step_info.local_samples for lease in leases)
            }


@settings(max_examples=60)
@given(scenarios(), st.data())
def test_missing_ranges_of_an_earlier_run_are_leased(scenario: Scenario, data: st.DataObject) -> None:
    done = data.draw(st.sets(st.integers(0, max(scenario.first - 1, 0)), max_size=20)) if scenario.first else set()
    completed = [(0, 0), *((p, p + 1) for p in done)]
    missing_ranges, reached = uncovered_ranges(completed, scenario.total)
    resumed = Scenario(scenario.samples, scenario.total, scenario.batches, scenario.machines, reached)
    by_rank = in_threads(shardings(resumed, LocalStore(), missing_ranges))
    everything = [p for leases in by_rank for p in indices(resumed, leases)]
    assert Counter(everything) == Counter(set(range(scenario.total)) - done)


@given(scenarios(), st.data())
def test_leases_of_failed_ranks_are_returned(scenario: Scenario, data: st.DataObject) -> None:
    scenario = Scenario(
        scenario.samples,
        scenario.total,
        [*scenario.batches, 2],
        [[r] for r in range(len(scenario.batches) + 1)],
        scenario.first,
    )
    failed_rank = data.draw(st.integers(0, len(scenario.batches) - 1))
    failed: list[int] = []
    ranks = shardings(scenario, LocalStore(), failed=lambda: failed)
    drawn_leases = take(iter(ranks[failed_rank]), data.draw(st.integers(0, 4)), scenario)
    completed = drawn_leases[: data.draw(st.integers(0, len(drawn_leases)))]
    for lease in completed:
        assert ranks[failed_rank].begin(lease)
        ranks[failed_rank].complete(lease.span)
    ranks[failed_rank]._write()  # as before the next lease
    failed.append(failed_rank)
    leases = in_threads([sharding for rank, sharding in enumerate(ranks) if rank != failed_rank])
    everything = indices(scenario, completed) + [p for rank in leases for p in indices(scenario, rank)]
    assert sorted(everything) == list(range(scenario.first, scenario.total))


@given(scenarios(), st.data())
def test_samples_that_a_rank_gives_up_are_leased_again(scenario: Scenario, data: st.DataObject) -> None:
    size = len(scenario.batches) + 1
    scenario = Scenario(
        scenario.samples, scenario.total, [*scenario.batches, 2], [[r] for r in range(size)], scenario.first
    )  # fmt: skip
    ranks = shardings(scenario, LocalStore())
    drawn_leases = take(iter(ranks[0]), data.draw(st.integers(0, 4)), scenario)
    begun = drawn_leases[: data.draw(st.integers(0, len(drawn_leases)))]
    completed = begun[: data.draw(st.integers(0, len(begun)))]
    for lease in begun:
        assert ranks[0].begin(lease)
    for lease in completed:
        ranks[0].complete(lease.span)
    for _ in range(2):
        ranks[0].give_up()
    leases = in_threads(ranks[1:])
    everything = indices(scenario, completed) + [p for rank in leases for p in indices(scenario, rank)]
    assert sorted(everything) == list(range(scenario.first, scenario.total))


def take(leases: Iterator[BatchLease], count: int, scenario: Scenario) -> list[BatchLease]:
    """Take the first leases while any are left: an idle rank would wait for all other ranks."""
    first: list[BatchLease] = []
    while len(first) < count and sum(c.step_info.local_samples for c in first) < scenario.total - scenario.first:
        first.append(next(leases))
    return first


def test_a_gap_is_trained_although_the_rank_that_fenced_the_failed_one_has_gone() -> None:
    scenario, store = Scenario(4, 12, [1, 1, 1], [[0], [1], [2]]), LocalStore()
    dead, unaware = shardings(scenario, store)[:2]
    aware = DynamicSharding(scenario.plan(2), store, failed=lambda: [0])
    dead.table.start(0, [])
    assert dead.table.advance(1) == 0  # it dies between the counter and its lease
    aware.table.start(0, [])
    aware._give_back()
    aware._write(over=True)
    leases = in_threads([unaware])[0]
    assert sorted(indices(scenario, leases)) == list(range(12))


def test_the_store_keeps_few_leases_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_leases, "KEPT_LEASES", 20)
    scenario, store = Scenario(50, 200, [1, 1], [[0, 1]]), LocalStore()
    leader, follower = shardings(scenario, store)
    spans, longest = [], 0
    for lease, other in zip(leader, follower, strict=True):
        assert leader.begin(lease)
        leader.complete(lease.span)
        spans.append(other.span)
        longest = max(longest, len(store.list("machine/")))
        assert lease.span == other.span
    assert spans == [(start, start + 2) for start in range(0, 200, 2)]
    assert longest <= 22, "the newest leases, the number of the last deleted one and the end"
    with pytest.raises(PeerLost, match="rank is more than 20 batches behind rank 0"):
        next(iter(shardings(scenario, store)[1]))


def test_a_rank_that_follows_its_leader_waits_with_few_store_calls() -> None:
    class CountingStore(LocalStore):
        reads = 0

        def get_many(self, keys: Sequence[str]) -> dict[str, str | None]:
            type(self).reads += threading.current_thread() is waiting
            return super().get_many(keys)

    scenario, store = Scenario(4, 4, [1, 1], [[0, 1]]), CountingStore()
    spans: list[Span] = []
    waiting = threading.Thread(target=lambda: spans.extend(lease.span for lease in shardings(scenario, store)[1]), daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert store.reads <= 10, "it waits for a change of the key, or for FOLLOW_S"
    store.set("machine/0/1", "[0, 2]")
    store.set("machine/0/2", "null")
    waiting.join(20)
    assert spans == [(0, 2)]


@given(scenarios())
def test_after_a_stop_only_existing_leases_are_done(scenario: Scenario) -> None:
    store = LocalStore()
    ranks = shardings(
        Scenario(
            scenario.samples, scenario.total, scenario.batches, [[r] for r in range(len(scenario.batches))], scenario.first
        ),
        store,
    )
    leases = iter(ranks[0])
    first = next(leases)
    ranks[0].stop()
    assert ranks[0].begin(first)
    ranks[0].complete(first.span)
    leases = [[first], *in_threads(ranks, leases)]
    everything = [p for rank in leases for p in indices(scenario, rank)]
    assert sorted(everything) == list(range(scenario.first, ranks[0].total))
    assert ranks[0].total == min(scenario.total, scenario.first + scenario.batches[0])
    info = ranks[0].empty_step()
    assert (info.local_samples, info.position, info.total) == (0, ranks[0].total, ranks[0].total)


# ---------------------------------------------------------------------------------------------------------- spans

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


def covered(spans: Sequence[Span]) -> set[int]:
    return {p for start, stop in spans for p in range(start, stop)}


@given(spans)
def test_merged_ranges_cover_the_same_indices_without_touching(ranges: list[Span]) -> None:
    merged = merge_ranges(ranges)
    assert covered(merged) == covered(ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    assert json.loads(json.dumps(merged)) == [list(s) for s in merged]


@given(spans, st.integers(0, 40))
def test_uncovered_ranges_are_the_gaps_below_the_highest_index(ranges: list[Span], total: int) -> None:
    missing_ranges, reached = uncovered_ranges(ranges, total)
    highest = max((stop for _, stop in ranges), default=0)
    assert reached == min(highest, total)
    assert covered(missing_ranges) == set(range(highest)) - covered(ranges)
