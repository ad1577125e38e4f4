"""Sharding: which rank trains on which samples.

static    round r covers indices r B to (r+1) B of the epoch, in rank order; a rank without samples takes part with weight 0
dynamic   a rank that is free leases the next indices from a counter in the job's store; leases of failed ranks are returned

Indices count global samples over all epochs: index p belongs to epoch p // samples. Both forms assign every index of an epoch
exactly once. Both can start at any index, so a resumed run continues at its checkpoint, with any number of ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from roundelay.core.contracts import Store
from roundelay.strategies.step import StepInfo

Span = tuple[int, int]
POLL_S = 0.01
WAKE_KEYS = ("returned", "returned-taken", "failures")
"""Keys of the store that a rank without work polls."""


@dataclass(frozen=True)
class BatchLease:
    """The samples start <= index < stop of an epoch, for one step of one rank; empty if start == stop."""

    epoch: int
    start: int
    stop: int
    step_info: StepInfo
    span: Span
    """Global indices that are done after this step; in a hierarchy, those of the whole machine."""


@dataclass(frozen=True)
class ShardPlan:
    """The samples of a run and the ranks among which they are divided."""

    samples: int
    """Samples in one epoch."""
    total: int
    """Global samples of the whole run."""
    batches: Sequence[int]
    """Batch size of every rank."""
    rank: int
    machine: Sequence[int]
    """Ranks of this rank's machine in a hierarchy; otherwise only the rank itself."""
    node_leaders: Sequence[int]
    """Lowest rank of every machine in a hierarchy; otherwise all ranks."""
    first: int = 0
    """Global samples done before this run."""

    @cached_property
    def global_batch(self) -> int:
        """Samples of a round in which every rank has a full batch."""
        return sum(self.batches)

    def step_info(self, local: int, node: int, global_samples: int, position: int, total: int) -> StepInfo:
        return StepInfo(local, node, global_samples, position, total, self.first)


class StaticSharding:
    """Yield one lease per round. All ranks yield the same number of rounds, without communication."""

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self.stop_at: int | None = None
        """Number of rounds after which to stop early; may be set while iterating."""

    def __iter__(self) -> Iterator[BatchLease]:
        plan = self.plan
        position, steps = plan.first, 0
        offsets = list(accumulate(plan.batches, initial=0))
        while position < plan.total and (self.stop_at is None or steps < self.stop_at):
            epoch = position // plan.samples
            end = min((epoch + 1) * plan.samples, plan.total)
            global_samples = min(plan.global_batch, end - position)

            def span(rank: int, position: int = position, end: int = end) -> Span:
                start = min(position + offsets[rank], end)
                return start, min(start + plan.batches[rank], end)

            start, stop = span(plan.rank)
            node_samples = sum(b - a for a, b in map(span, plan.machine))
            info = plan.step_info(stop - start, node_samples, global_samples, position, plan.total)
            offset = epoch * plan.samples
            yield BatchLease(epoch, start - offset, stop - offset, info, (position, position + global_samples))
            position += global_samples
            steps += 1


class DynamicSharding:
    """Lease batches from a counter in the store. In a hierarchy the node leader leases for all ranks of its machine.

    Iterate in one thread (the loader's) and call `complete` in another (the learner's).
    """

    def __init__(
        self,
        plan: ShardPlan,
        store: Store,
        missing_ranges: Sequence[Span] = (),
        stays: bool = True,
        failed: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Set up the counter on rank 0.

        missing_ranges   ranges before `plan.first` that still have to be done
        stays            a rank without work waits for leases that a failed rank may leave
        failed           returns the ranks that have failed so far
        """
        self.plan, self.store, self.stays, self._failed = plan, store, stays, failed
        self._lock = threading.Lock()
        self.leader = plan.machine[0]
        self._leased: list[Span] = []
        self._unused: list[Span] = []
        self._exhausted = False
        self._last_busy = 0  # index into node_leaders of the rank that was busy at the last poll
        self._recovered: set[int] = set()
        if plan.rank == 0:
            store.add("claimed", plan.first)
            for missing_range in missing_ranges:
                self._return(missing_range)
            store.set("sharding-ready", "1")

    def _return(self, span: Span) -> None:
        number = self.store.add("returned", 1)
        self.store.set(f"returned/{number}", json.dumps(span))

    def _return_leases_of_failed_ranks(self) -> None:
        """Return the leases of newly failed ranks. A counter in the store makes sure that only one rank does so."""
        failed = self._failed()
        if not failed:
            return
        for rank in set(failed) - self._recovered:
            self._recovered.add(rank)
            if self.store.add(f"lease-returned/{rank}", 1) == 1:
                for span in json.loads(self.store.get(f"lease/{rank}") or "[]"):
                    self._return(tuple(span))

    def complete(self, span: Span) -> None:
        """Release a lease: its samples have been applied to w."""
        with self._lock:
            self._leased = [s for s in self._leased if s != span]
        if self._exhausted:  # wake up the iterating thread
            self.store.set(f"completed/{self.plan.rank}", str(span[1]))

    def stop(self) -> None:
        """End the run early: no rank leases samples beyond those leased by now."""
        self.store.claim("stop-total", str(self.store.add("claimed", 0)))

    @property
    def total(self) -> int:
        """Global samples of the run, or of the part before `stop`."""
        stop = self.store.get("stop-total")
        return self.plan.total if stop is None else min(self.plan.total, int(stop))

    def empty_step(self) -> StepInfo:
        """Return the step info of a step without samples at the end of the run."""
        total = self.total
        return self.plan.step_info(0, 0, self.plan.global_batch, total, total)

    def _next_returned(self) -> Span | None:
        returned, reused = int(self.store.get("returned") or 0), int(self.store.get("returned-taken") or 0)
        if reused >= returned:
            return None
        number = self.store.add("returned-taken", 1)
        if number > returned:
            self.store.add("returned-taken", -1)
            return None
        while (text := self.store.get(f"returned/{number}")) is None:
            self.store.pause(POLL_S, f"returned/{number}")
        start, stop = json.loads(text)
        return start, stop

    def _next_span(self, size: int) -> Span | None:
        """Return the next span of at most `size` indices: returned leases first, then the counter. None if all are leased."""
        if not self._unused:
            span = self._next_returned() if self.store.get("stop-total") is None else None
            if span is None:
                start = self.store.add("claimed", size) - size
                total = self.total
                if start >= total:
                    return None
                span = (start, min(start + size, total))
            self._unused = self._split(span, size)
        return self._unused.pop(0)

    def _split(self, span: Span, size: int) -> list[Span]:
        """Split a span into pieces of at most `size` indices of one epoch."""
        pieces, (start, stop) = [], span
        while start < stop:
            end = min(stop, start + size, (start // self.plan.samples + 1) * self.plan.samples)
            pieces.append((start, end))
            start = end
        return pieces

    def __iter__(self) -> Iterator[BatchLease]:
        while self.store.get("sharding-ready") is None:
            self.store.pause(POLL_S, "sharding-ready")
        if self.plan.rank != self.leader:
            yield from self._follow_leader()
            return
        size = sum(self.plan.batches[rank] for rank in self.plan.machine)
        number = 0
        idle = False
        while True:
            self._return_leases_of_failed_ranks()
            span = self._next_span(size)
            if span is None and not self.stays:
                break  # a failure ends the job anyway, and other ranks may be waiting in a collective
            self._exhausted = span is None
            if span is None:
                # Stay until all ranks are idle: a failed rank may leave leases behind.
                if not idle and not self._leased:
                    self._publish_lease()
                    self.store.set(f"idle/{self.plan.rank}", "1")
                    idle = True
                busy = self._busy_rank() if idle else self.plan.rank
                if busy is None and self._nothing_returned():
                    break
                self.store.pause(POLL_S, f"idle/{busy}", f"completed/{self.plan.rank}", *WAKE_KEYS)
                continue
            if idle:
                self.store.set(f"idle/{self.plan.rank}", "0")
                idle = False
            with self._lock:
                self._leased.append(span)
            self._publish_lease()
            if len(self.plan.machine) > 1:
                number += 1
                self.store.set(f"machine/{self.leader}/{number}", json.dumps(span))
            yield self._lease(span)
        if len(self.plan.machine) > 1:
            self.store.set(f"machine/{self.leader}/{number + 1}", "null")

    def _publish_lease(self) -> None:
        # If this rank fails between the counter and this line, its indices are lost. The window is one message long.
        with self._lock:
            text = json.dumps(self._leased + self._unused)
        self.store.set(f"lease/{self.plan.rank}", text)

    def _busy_rank(self) -> int | None:
        """Return a live rank that still has work, or None. Starts at the rank that was busy last: those before it are idle."""
        node_leaders, own = self.plan.node_leaders, self.plan.rank
        for _ in node_leaders:
            rank = node_leaders[self._last_busy]
            if rank != own and rank not in self._recovered and self.store.get(f"idle/{rank}") != "1":
                return rank
            self._last_busy = (self._last_busy + 1) % len(node_leaders)
        return None

    def _nothing_returned(self) -> bool:
        return int(self.store.get("returned-taken") or 0) >= int(self.store.get("returned") or 0)

    def _follow_leader(self) -> Iterator[BatchLease]:
        number = 1
        while True:
            while (text := self.store.get(f"machine/{self.leader}/{number}")) is None:
                self.store.pause(0.001, f"machine/{self.leader}/{number}")
            span = json.loads(text)
            if span is None:
                return
            number += 1
            yield self._lease((span[0], span[1]))

    def _lease(self, span: Span) -> BatchLease:
        plan = self.plan
        start, stop = span
        epoch = start // plan.samples
        first = min(stop, start + sum(plan.batches[r] for r in plan.machine if r < plan.rank))
        end = min(stop, first + plan.batches[plan.rank])
        info = plan.step_info(end - first, stop - start, plan.global_batch, start, plan.total)
        return BatchLease(epoch, first - epoch * plan.samples, end - epoch * plan.samples, info, span)


def uncovered_ranges(completed: Sequence[Span], total: int) -> tuple[list[Span], int]:
    """Return the ranges below the highest completed index that are not completed, and the index at which to continue."""
    missing_ranges: list[Span] = []
    reached = 0
    for start, stop in sorted(completed):
        if start > reached:
            missing_ranges.append((reached, start))
        reached = max(reached, stop)
    return missing_ranges, min(reached, total)


def merge_ranges(spans: Sequence[Span]) -> list[Span]:
    """Return the union of the spans as sorted spans that neither overlap nor touch."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
