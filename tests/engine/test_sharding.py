"""Every context is dealt exactly once, to whomever, in whatever order learners come and go."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.engine.sharding import (
    BatchLease,
    DynamicSharding,
    ShardPlan,
    Span,
    StaticSharding,
    merge_ranges,
    uncovered_ranges,
)
from roundelay.fleet.store import LocalStore


@dataclass(frozen=True)
class Deal:
    """What is dealt, and to which machines."""

    samples: int
    total: int
    batches: list[int]
    machines: list[list[int]]
    first: int = 0

    def dealt(self, rank: int) -> ShardPlan:
        machine = next(m for m in self.machines if rank in m)
        return ShardPlan(self.samples, self.total, self.batches, rank, machine, [m[0] for m in self.machines], self.first)


@st.composite
def deals(draw: st.DrawFn) -> Deal:
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
    return Deal(samples, total, batches, machines, draw(st.integers(0, total - 1)))


def places(deal: Deal, claims: Sequence[BatchLease]) -> list[int]:
    """The global places of claims, after checking that each lies in one epoch."""
    found = []
    for claim in claims:
        assert 0 <= claim.start <= claim.stop <= deal.samples
        assert claim.step_info.local_samples == claim.stop - claim.start
        found += range(claim.epoch * deal.samples + claim.start, claim.epoch * deal.samples + claim.stop)
    return found


# ----------------------------------------------------------------------------------------------------------- turn


@given(deals())
def test_turn_deals_every_place_once(deal: Deal) -> None:
    by_rank = [list(StaticSharding(deal.dealt(rank))) for rank in range(len(deal.batches))]
    everything = [p for claims in by_rank for p in places(deal, claims)]
    assert sorted(everything) == list(range(deal.first, deal.total))


@given(deals())
def test_in_a_turn_all_ranks_have_the_same_rounds_and_their_weights_add_up(deal: Deal) -> None:
    by_rank = [list(StaticSharding(deal.dealt(rank))) for rank in range(len(deal.batches))]
    assert len({len(claims) for claims in by_rank}) == 1
    for claims in zip(*by_rank, strict=True):
        assert len({claim.span for claim in claims}) == 1
        global_samples = claims[0].span[1] - claims[0].span[0]
        assert all(claim.step_info.global_samples == global_samples for claim in claims)
        assert sum(claim.step_info.local_samples for claim in claims) == global_samples
        for machine in deal.machines:
            assert {claims[r].share.node_samples for r in machine} == {sum(claims[r].share.local_samples for r in machine)}


@given(deals(), st.integers(0, 5))
def test_a_turn_can_be_stopped_after_any_round_and_resumed_by_other_learners(deal: Deal, steps: int) -> None:
    done = []
    for rank in range(len(deal.batches)):
        turn = StaticSharding(deal.dealt(rank))
        turn.stop_at = steps
        done += places(deal, list(turn))
    position = max(done, default=deal.first - 1) + 1
    other = Deal(deal.samples, deal.total, [3, 1], [[0], [1]], position)
    rest = [p for rank in range(2) for p in places(other, list(StaticSharding(other.dealt(rank))))]
    assert sorted(done + rest) == list(range(deal.first, deal.total))


# ----------------------------------------------------------------------------------------------------------- race


def racers(deal: Deal, store: LocalStore, missing_ranges: Sequence[Span] = (), **options: Any) -> list[DynamicSharding]:
    return [DynamicSharding(deal.dealt(rank), store, missing_ranges, **options) for rank in range(len(deal.batches))]


def in_threads(races: list[DynamicSharding], begun: Iterator[BatchLease] | None = None) -> list[list[BatchLease]]:
    """All learners at once, each as fast as it can; the first one may have begun."""
    found: list[list[BatchLease]] = [[] for _ in races]

    def learner(rank: int) -> None:
        for claim in begun if begun is not None and rank == 0 else races[rank]:
            found[rank].append(claim)
            races[rank].complete(claim.span)

    threads = [threading.Thread(target=learner, args=(rank,), daemon=True) for rank in range(len(races))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a learner does not leave"
    return found


@settings(max_examples=60)
@given(deals(), st.booleans())
def test_a_race_deals_every_place_once_whoever_is_fast(deal: Deal, stays: bool) -> None:
    by_rank = in_threads(racers(deal, LocalStore(), stays=stays))
    everything = [p for claims in by_rank for p in places(deal, claims)]
    assert sorted(everything) == list(range(deal.first, deal.total))
    for machine in deal.machines:
        for claims in zip(*(by_rank[r] for r in machine), strict=True):
            assert len({claim.span for claim in claims}) == 1
            assert {claim.step_info.node_samples for claim in claims} == {
                sum(claim.step_info.local_samples for claim in claims)
            }


@settings(max_examples=60)
@given(deals(), st.data())
def test_holes_of_an_earlier_run_are_dealt_too(deal: Deal, data: st.DataObject) -> None:
    done = data.draw(st.sets(st.integers(0, max(deal.first - 1, 0)), max_size=20)) if deal.first else set()
    completed = [(0, 0), *((p, p + 1) for p in done)]
    missing_ranges, reached = uncovered_ranges(completed, deal.total)
    resumed = Deal(deal.samples, deal.total, deal.batches, deal.machines, reached)
    by_rank = in_threads(racers(resumed, LocalStore(), missing_ranges))
    everything = [p for claims in by_rank for p in places(resumed, claims)]
    assert Counter(everything) == Counter(set(range(deal.total)) - done)


@given(deals(), st.data())
def test_leases_of_the_dead_come_back(deal: Deal, data: st.DataObject) -> None:
    deal = Deal(deal.samples, deal.total, [*deal.batches, 2], [[r] for r in range(len(deal.batches) + 1)], deal.first)
    dead = data.draw(st.integers(0, len(deal.batches) - 1))
    buried: list[int] = []
    races = racers(deal, LocalStore(), lost=lambda: buried)
    claimed = take(iter(races[dead]), data.draw(st.integers(0, 4)), deal)
    completed = claimed[: data.draw(st.integers(0, len(claimed)))]
    for claim in completed:
        races[dead].complete(claim.span)
    races[dead]._note_lease()  # what a learner does when it claims its next
    buried.append(dead)
    found = in_threads([race for rank, race in enumerate(races) if rank != dead])
    everything = places(deal, completed) + [p for claims in found for p in places(deal, claims)]
    assert sorted(everything) == list(range(deal.first, deal.total))


def take(claims: Iterator[BatchLease], count: int, deal: Deal) -> list[BatchLease]:
    """The first few, as long as there are any left: an idle learner would wait for the others."""
    found: list[BatchLease] = []
    while len(found) < count and sum(c.share.local_samples for c in found) < deal.total - deal.first:
        found.append(next(claims))
    return found


@given(deals())
def test_a_stopped_race_deals_nothing_further_and_what_was_claimed_is_done(deal: Deal) -> None:
    store = LocalStore()
    races = racers(Deal(deal.samples, deal.total, deal.batches, [[r] for r in range(len(deal.batches))], deal.first), store)
    claims = iter(races[0])
    first = next(claims)
    races[0].stop()
    races[0].complete(first.span)
    found = [[first], *in_threads(races, claims)]
    everything = [p for claims_ in found for p in places(deal, claims_)]
    assert sorted(everything) == list(range(deal.first, races[0].total))
    assert races[0].total == min(deal.total, deal.first + deal.batches[0])
    share = races[0].empty_step()
    assert (share.local_samples, share.position, share.total) == (0, races[0].total, races[0].total)


# ---------------------------------------------------------------------------------------------------------- spans

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


def covered(found: Sequence[Span]) -> set[int]:
    return {p for start, stop in found for p in range(start, stop)}


@given(spans)
def test_merged_covers_the_same_places_in_order_without_touching(found: list[Span]) -> None:
    out = merge_ranges(found)
    assert covered(out) == covered(found)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(out))
    assert json.loads(json.dumps(out)) == [list(s) for s in out]


@given(spans, st.integers(0, 40))
def test_missing_is_what_lies_below_the_highest_and_was_not_done(found: list[Span], total: int) -> None:
    missing_ranges, reached = uncovered_ranges(found, total)
    highest = max((stop for _, stop in found), default=0)
    assert reached == min(highest, total)
    assert covered(missing_ranges) == set(range(highest)) - covered(found)
