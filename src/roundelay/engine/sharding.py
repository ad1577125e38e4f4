"""Who gets which batch.

turn:  round r deals places r B .. (r+1) B of the epoch, in rank order; whoever finds none left joins with weight 0.
race:  whoever is free takes the next places from a counter in the job's store, as a lease; leases of the dead go back.

Places count global samples over all epochs: place p lies in epoch p // samples. Both deal every place of an epoch once, and
both can start anywhere, so a resumed run goes on where the checkpoint stood, with any number of learners.
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
WAKE_KEYS = ("returned", "returned-taken", "deaths")
"""Keys of the store that a learner without work waits for."""


@dataclass(frozen=True)
class BatchLease:
    """A learner's next piece of work: places start..stop of an epoch (none where start == stop)."""

    epoch: int
    start: int
    stop: int
    step_info: StepInfo
    span: Span
    """The same in global places: what is done when this is done (for a machine: its first member's count)."""


@dataclass(frozen=True)
class ShardPlan:
    """What is dealt among whom."""

    samples: int
    """Samples in an epoch."""
    total: int
    """Places to deal in the whole run."""
    batches: Sequence[int]
    """Batch size of every learner, by rank."""
    rank: int
    machine: Sequence[int]
    """Ranks of this learner's machine in a hierarchy; only itself otherwise."""
    node_leaders: Sequence[int]
    """Workers in the strategy's eyes: the first ranks of the machines in a hierarchy, else all ranks."""
    first: int = 0
    """Places dealt before this run began."""

    @cached_property
    def global_batch(self) -> int:
        """Samples of a round in which all have a batch."""
        return sum(self.batches)

    def share(self, own: int, machine: int, global_samples: int, position: int, total: int) -> StepInfo:
        return StepInfo(own, machine, global_samples, position, total, self.first)


class StaticSharding:
    """Batches dealt in rounds."""

    def __init__(self, dealt: ShardPlan) -> None:
        self.dealt = dealt
        self.stop_at: int | None = None
        """Steps of this run after which to stop early."""

    def __iter__(self) -> Iterator[BatchLease]:
        d = self.dealt
        position, everybody, steps = d.first, d.global_batch, 0
        before = list(accumulate(d.batches, initial=0))
        while position < d.total and (self.stop_at is None or steps < self.stop_at):
            epoch = position // d.samples
            end = min((epoch + 1) * d.samples, d.total)
            global_samples = min(everybody, end - position)

            def span(rank: int, position: int = position, end: int = end) -> Span:
                start = min(position + before[rank], end)
                return start, min(start + d.batches[rank], end)

            start, stop = span(d.rank)
            machine = sum(b - a for a, b in map(span, d.machine))
            share = d.share(stop - start, machine, global_samples, position, d.total)
            yield BatchLease(
                epoch, start - epoch * d.samples, stop - epoch * d.samples, share, (position, position + global_samples)
            )
            position += global_samples
            steps += 1


class DynamicSharding:
    """Batches claimed from a counter. In a hierarchy the machine's first rank sharding for all its members."""

    def __init__(
        self,
        dealt: ShardPlan,
        store: Store,
        missing_ranges: Sequence[Span] = (),
        stays: bool = True,
        lost: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`stays`: a learner without work waits for what the dead may leave; `lost`: who is dead by now."""
        self.dealt, self.store, self.stays, self._lost = dealt, store, stays, lost
        self._changing = threading.Lock()  # claimed in the loader's thread, completed in the learner's
        self.leader = dealt.machine[0]
        self._leased: list[Span] = []
        self._rest: list[Span] = []
        self._ran_out = False
        self._looked_at = 0  # place among the node_leaders where somebody was busy when last looked
        self.dead: set[int] = set()
        if dealt.rank == 0:
            store.add("claimed", dealt.first)
            for missing_range in missing_ranges:
                self._give_back(missing_range)
            store.set("dealing", "1")

    def _give_back(self, span: Span) -> None:
        number = self.store.add("returned", 1)
        self.store.set(f"returned/{number}", json.dumps(span))

    def _bury(self) -> None:
        """Leases of the dead go back; exactly one of the living sees to it."""
        lost = self._lost()
        if not lost:
            return
        for rank in set(lost) - self.dead:
            self.dead.add(rank)
            if self.store.add(f"lease-taken-back/{rank}", 1) == 1:
                for span in json.loads(self.store.get(f"lease/{rank}") or "[]"):
                    self._give_back(tuple(span))

    def complete(self, span: Span) -> None:
        """This work is in w."""
        with self._changing:
            self._leased = [s for s in self._leased if s != span]
        if self._ran_out:  # and waits for this
            self.store.set(f"worked-off/{self.dealt.rank}", str(span[1]))

    def stop(self) -> None:
        """Nothing beyond what has been claimed by now is dealt any more."""
        self.store.claim("stop-total", str(self.store.add("claimed", 0)))

    @property
    def total(self) -> int:
        stop = self.store.get("stop-total")
        return self.dealt.total if stop is None else min(self.dealt.total, int(stop))

    def empty_step(self) -> StepInfo:
        """What a learner works on when all is dealt: no samples, at the end of the run."""
        d, total = self.dealt, self.total
        return d.share(0, 0, d.global_batch, total, total)

    def _next_returned(self) -> Span | None:
        returned, taken = int(self.store.get("returned") or 0), int(self.store.get("returned-taken") or 0)
        if taken >= returned:
            return None
        number = self.store.add("returned-taken", 1)
        if number > returned:
            self.store.add("returned-taken", -1)
            return None
        while (note := self.store.get(f"returned/{number}")) is None:
            self.store.pause(POLL_S, f"returned/{number}")
        start, stop = json.loads(note)
        return start, stop

    def _next_span(self, size: int) -> Span | None:
        """The next places: what was given back first, then the counter."""
        if not self._rest:
            found = self._next_returned() if self.store.get("stop-total") is None else None
            if found is None:
                start = self.store.add("claimed", size) - size
                total = self.total
                if start >= total:
                    return None
                found = (start, min(start + size, total))
            self._rest = self._cut(found, size)
        return self._rest.pop(0)

    def _cut(self, span: Span, size: int) -> list[Span]:
        """A span in pieces that lie in one epoch and are no larger than a batch."""
        pieces, (start, stop) = [], span
        while start < stop:
            end = min(stop, start + size, (start // self.dealt.samples + 1) * self.dealt.samples)
            pieces.append((start, end))
            start = end
        return pieces

    def __iter__(self) -> Iterator[BatchLease]:
        while self.store.get("dealing") is None:
            self.store.pause(POLL_S, "dealing")
        if self.dealt.rank != self.leader:
            yield from self._follow()
            return
        size = sum(self.dealt.batches[rank] for rank in self.dealt.machine)
        number = 0
        idle = False
        while True:
            self._bury()
            span = self._next_span(size)
            if span is None and not self.stays:
                break  # nobody's death is survived, and others may be waiting at a rendezvous
            self._ran_out = span is None
            if span is None:
                # Stay until everybody has run out: somebody may die and leave work behind.
                if not idle and not self._leased:
                    self._note_lease()
                    self.store.set(f"idle/{self.dealt.rank}", "1")
                    idle = True
                busy = self._somebody_busy() if idle else self.dealt.rank
                if busy is None and self._nothing_returned():
                    break
                self.store.pause(POLL_S, f"idle/{busy}", f"worked-off/{self.dealt.rank}", *WAKE_KEYS)
                continue
            if idle:
                self.store.set(f"idle/{self.dealt.rank}", "0")
                idle = False
            with self._changing:
                self._leased.append(span)
            self._note_lease()
            if len(self.dealt.machine) > 1:
                number += 1
                self.store.set(f"machine/{self.leader}/{number}", json.dumps(span))
            yield self._claim(span)
        if len(self.dealt.machine) > 1:
            self.store.set(f"machine/{self.leader}/{number + 1}", "null")

    def _note_lease(self) -> None:
        # A learner that dies between the counter and this line takes its places with it; the window is one message long.
        with self._changing:
            note = json.dumps(self._leased + self._rest)
        self.store.set(f"lease/{self.dealt.rank}", note)

    def _somebody_busy(self) -> int | None:
        """A living worker that has not run out of work; None where all have. Looks first where it found one the last time: with
        many learners, most of those before are still idle."""
        node_leaders, own = self.dealt.node_leaders, self.dealt.rank
        for _ in node_leaders:
            rank = node_leaders[self._looked_at]
            if rank != own and rank not in self.dead and self.store.get(f"idle/{rank}") != "1":
                return rank
            self._looked_at = (self._looked_at + 1) % len(node_leaders)
        return None

    def _nothing_returned(self) -> bool:
        return int(self.store.get("returned-taken") or 0) >= int(self.store.get("returned") or 0)

    def _follow(self) -> Iterator[BatchLease]:
        number = 1
        while True:
            while (note := self.store.get(f"machine/{self.leader}/{number}")) is None:
                self.store.pause(0.001, f"machine/{self.leader}/{number}")
            span = json.loads(note)
            if span is None:
                return
            number += 1
            yield self._claim((span[0], span[1]))

    def _claim(self, span: Span) -> BatchLease:
        d = self.dealt
        start, stop = span
        epoch = start // d.samples
        mine = min(stop, start + sum(d.batches[r] for r in d.machine if r < d.rank))
        end = min(stop, mine + d.batches[d.rank])
        share = d.share(end - mine, stop - start, d.global_batch, start, d.total)
        return BatchLease(epoch, mine - epoch * d.samples, end - epoch * d.samples, share, span)


def uncovered_ranges(completed: Sequence[Span], total: int) -> tuple[list[Span], int]:
    """Places below the highest completed one that nobody has completed, and that highest one: where to go on."""
    missing_ranges: list[Span] = []
    reached = 0
    for start, stop in sorted(completed):
        if start > reached:
            missing_ranges.append((reached, start))
        reached = max(reached, stop)
    return missing_ranges, min(reached, total)


def merge_ranges(spans: Sequence[Span]) -> list[Span]:
    """The same places in as few spans as possible."""
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out
