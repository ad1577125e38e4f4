"""Strategies from outside the tree: one that keeps the laws, and some that break them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker

IN_TURN = Traits(
    sharding="static",
    deterministic=True,
    conserves_mean=True,
    contracts=True,
    survives_failures=False,
    optimizer_state="keep",
    shares_weights=False,
)


@dataclass
class HalfWay:
    """Every learner goes half the way to the mean, `times` times per step."""

    times: int = 3  # times over, so that the spread is below rounding after a few steps

    equation: ClassVar[str] = "w_i <- (w_i + mean_j w_j) / 2 - D(g_i(w_i))"
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = IN_TURN

    def start(self, me: Worker) -> None:
        """Nothing to prepare."""

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad())
        w = me.w.clone()
        for _ in range(self.times):
            w = (w + me.mean(w)) / 2
        me.assign_(w - d)


@dataclass
class TwoGradients(HalfWay):
    """Breaks the law: two gradients in one step."""

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
        me.add_(-me.delta(me.grad()))


@dataclass
class NoGradient(HalfWay):
    """Breaks the law: no gradient at all."""

    def step(self, me: Worker) -> None:
        me.assign_(me.mean(me.w))


@dataclass
class LosesTheMean(HalfWay):
    """Promises to conserve the mean and does not: everybody takes rank 0's model."""

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad())
        first = me.mean(me.w if me.rank == 0 else 0 * me.w) * me.size
        me.assign_(first - d)


@dataclass
class Unrepeatable(HalfWay):
    """Promises the same bits every time and counts its runs instead."""

    runs: ClassVar[list[int]] = []

    def start(self, me: Worker) -> None:
        self.runs.append(me.rank)

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad())
        w = me.mean(me.w) - d
        me.assign_(w * (1 + 1e-3 * len(self.runs)) if me.size > 1 else w)
