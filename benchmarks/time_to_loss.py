"""Seconds to a loss, computed after the run from snapshots of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.netns_cluster import NetnsCluster
from roundelay.bench.competitors import Competitor

STEPS_OF_A_ROUND = 8
"""Runs end on a multiple of this number of steps, so that methods that update every few steps end on an update."""
SLACK = 1.15
"""A further rate gets at most this multiple of the samples that the best rate needed: beyond it cannot win."""
LONGEST_S = 900.0


@dataclass(frozen=True)
class Contest:
    """The settings of a comparison."""

    batch: int
    """Samples per learner and step."""
    samples: int
    """The sample budget of a run."""
    rates: tuple[float, ...]
    momentum: float = 0.9


@dataclass
class TimeToLossResult:
    """One run."""

    rate: float
    samples: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    sent_bytes: list[int] = field(default_factory=list)
    """By machine, as its interface counts."""
    members: list[dict[str, Any]] = field(default_factory=list)
    last_loss: float = math.nan
    seconds_to_loss: float | None = None
    samples_to_loss: float | None = None
    failure: str = ""

    @property
    def reached(self) -> bool:
        return self.seconds_to_loss is not None

    @property
    def cpu_to_loss(self) -> float | None:
        return self.cpu_s * self.samples_to_loss / self.samples if self.samples_to_loss is not None else None

    def sooner_than(self, other: TimeToLossResult | None) -> bool:
        if other is None or self.seconds_to_loss is None or other.seconds_to_loss is None:
            return other is None or (self.reached and not other.reached)
        return self.seconds_to_loss < other.seconds_to_loss


Log = Callable[[str], None]


def target_loss(workers: NetnsCluster, contest: Contest, log: Log) -> tuple[float, list[float]]:
    """What one learner with the global batch reaches after half the budget, at the best of the rates; and the rates in
    the order of what they reach. Two learners that know nothing of each other try two rates at a time."""
    batch = contest.batch * workers.size
    job = {
        "job": "train", "number": -1, "name": "single", "strategy": "single", "options": {}, "momentum": contest.momentum,
        "batch": batch, "samples": contest.samples // 2 // batch * batch,
    }  # fmt: skip
    losses: dict[float, float] = {}
    waiting = list(contest.rates)
    while waiting:
        rates, waiting = waiting[:2], waiting[2:]
        runs = workers.ask({rank: {**job, "lr": rate} for rank, rate in enumerate(rates)}, LONGEST_S)
        for rank, (rate, run) in enumerate(zip(rates, runs, strict=True)):
            failed = run.get("failure")
            losses[rate] = math.inf if failed else workers.loss([(rank, run["snapshots"][-1]["slot"])])
            log(f"single, rate {rate:g}: held-out loss {losses[rate]:.4f} after {job['samples']} samples")
    order = sorted(losses, key=lambda rate: losses[rate])
    return losses[order[0]], order


def best_of_rates(
    workers: NetnsCluster,
    entry: Competitor,
    contest: Contest,
    rates: Sequence[float],
    target: float,
    hint: float | None,
    log: Log,
) -> TimeToLossResult:
    """The rate that is soonest at the target. `hint`: samples that are probably enough; where they are not, the budget."""
    best: TimeToLossResult | None = None
    for rate in rates:
        enough = hint if best is None else best.samples_to_loss
        outcome = train(workers, entry, contest, rate, target, enough, log)
        if best is None and enough is not None and not outcome.reached and not outcome.failure:
            outcome = train(workers, entry, contest, rate, target, None, log)
        if outcome.sooner_than(best):
            best = outcome
    assert best is not None
    return best


def train(
    workers: NetnsCluster, entry: Competitor, contest: Contest, rate: float, target: float, enough: float | None, log: Log
) -> TimeToLossResult:
    """One run, and when it was at the target."""
    samples = contest.samples
    if enough is not None:
        whole = STEPS_OF_A_ROUND * contest.batch * workers.size
        samples = min(samples, math.ceil(enough * SLACK / whole) * whole)
    before = workers.machines.sent_bytes()
    members = workers.all(
        "train", LONGEST_S, name=entry.name, strategy=entry.strategy, options=dict(entry.options), lr=rate,
        momentum=contest.momentum, batch=contest.batch, samples=samples,
    )  # fmt: skip
    sent = [after - b for after, b in zip(workers.machines.sent_bytes(), before, strict=True)]
    outcome = TimeToLossResult(rate, sent_bytes=sent, members=members)
    outcome.failure = next((str(m["failure"]) for m in members if m.get("failure")), "")
    if not outcome.failure:
        outcome.samples = sum(m["samples"] for m in members)
        outcome.seconds = max(m["ended"] for m in members) - min(m["began"] for m in members)
        outcome.cpu_s = sum(m["cpu_s"] for m in members)
        TimeToLoss(workers, outcome, target).evaluate()
    log(f"{entry.name}, rate {rate:g}: {described(outcome, target)}")
    return outcome


class TimeToLoss:
    """Finds when a run reached a loss."""

    def __init__(self, workers: NetnsCluster, outcome: TimeToLossResult, target: float) -> None:
        self.workers, self.outcome, self.target = workers, outcome, target
        self.began = min(m["began"] for m in outcome.members)
        self.buffers = {rank: m["snapshots"] for rank, m in enumerate(outcome.members) if m["snapshots"]}
        """In a hierarchy only the first learner of a machine has weights of its own, and snapshots of them."""
        self.times = [p["seconds"] for p in self.buffers[min(self.buffers)]]
        self._losses: dict[int, float] = {}

    def snapshots(self, index: int) -> dict[int, dict[str, Any]]:
        """Of every learner, the snapshot nearest to a time."""
        when = self.times[index]
        return {rank: min(buffer, key=lambda p: abs(p["seconds"] - when)) for rank, buffer in self.buffers.items()}

    def loss(self, index: int) -> float:
        """Held-out loss of the mean of the learners at a time."""
        if index not in self._losses:
            self._losses[index] = self.workers.loss([(rank, p["slot"]) for rank, p in self.snapshots(index).items()])
        return self._losses[index]

    def samples(self, index: int) -> float:
        return sum(p["samples"] for p in self.snapshots(index).values()) * self._share()

    def _share(self) -> float:
        """Learners per buffer: in a hierarchy a buffer belongs to a machine."""
        return self.outcome.samples / sum(buffer[-1]["samples"] for buffer in self.buffers.values())

    def evaluate(self) -> None:
        """Between the last snapshot above the target and the first at it, the loss is taken as a straight line."""
        last = len(self.times) - 1
        self.outcome.last_loss = self.loss(last)
        above, at = -1, self._some_index_at_target(last)
        if at is None:
            return
        while at - above > 1:
            middle = (above + at) // 2
            if self.loss(middle) <= self.target:
                at = middle
            else:
                above = middle
        seconds, samples = self.times[at] - self.began, self.samples(at)
        if above >= 0:
            part = (self.loss(above) - self.target) / max(self.loss(above) - self.loss(at), 1e-12)
            earlier = self.times[above] - self.began
            seconds = earlier + part * (seconds - earlier)
            samples = self.samples(above) + part * (samples - self.samples(above))
        self.outcome.seconds_to_loss, self.outcome.samples_to_loss = seconds, samples

    def _some_index_at_target(self, last: int) -> int | None:
        """The end, if it is at the target; a run that came and went again is results by a coarse look."""
        for index in [last, *range(last // 4, last, max(1, last // 4))]:
            if self.loss(index) <= self.target:
                return index
        return None


def described(outcome: TimeToLossResult, target: float) -> str:
    if outcome.failure:
        return f"failed ({outcome.failure.splitlines()[0]})"
    pace = f"{outcome.samples} samples in {outcome.seconds:.1f} s, loss {outcome.last_loss:.4f}"
    if outcome.seconds_to_loss is None:
        return f"{pace}; not at {target:.4f}"
    return f"{pace}; at {target:.4f} after {outcome.seconds_to_loss:.2f} s, {outcome.samples_to_loss:.0f} samples"
