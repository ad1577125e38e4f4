"""What all forms of sharding share: the plan, the lease of one step, and static sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from roundelay.fleet.leases import Span
from roundelay.strategies.step import StepInfo


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


def uncovered_ranges(completed: Sequence[Span], total: int) -> tuple[list[Span], int]:
    """Return the ranges below the highest completed index that are not completed, and the index at which to continue."""
    missing_ranges: list[Span] = []
    reached = 0
    for start, stop in sorted(completed):
        if start > reached:
            missing_ranges.append((reached, start))
        reached = max(reached, stop)
    return missing_ranges, min(reached, total)
