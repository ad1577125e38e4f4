"""Strategies from outside the package: one that keeps the laws, and some that violate one each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker


@dataclass
class HalfWay(Strategy):
    """Every rank moves half the way to the mean, `times` times per step."""

    times: int = 3  # so that the spread is below rounding after a few steps

    equation = "w_i <- (w_i + mean_j w_j) / 2 - D(g_i(w_i))"

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad())
        w = me.w.clone()
        for _ in range(self.times):
            w = (w + me.mean(w)) / 2
        me.assign_(w - d)


@dataclass
class TwoGradients(HalfWay):
    """Takes two gradients in one step."""

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
        me.add_(-me.delta(me.grad()))


@dataclass
class NoGradient(HalfWay):
    """Takes no gradient."""

    def step(self, me: Worker) -> None:
        me.assign_(me.mean(me.w))


@dataclass
class LosesTheMean(HalfWay):
    """Promises to conserve the mean, but copies the model of rank 0 to all ranks."""

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad())
        others = me.mean(0 * me.w if me.rank == 0 else d) * me.size
        first = me.mean(me.w if me.rank == 0 else 0 * me.w) * me.size
        me.assign_(first - d - others)


@dataclass
class Unrepeatable(HalfWay):
    """Promises the same bits in every run, but depends on the number of runs."""

    runs: ClassVar[list[int]] = []

    def start(self, me: Worker) -> None:
        self.runs.append(me.rank)

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad())
        w = me.mean(me.w) - d
        me.assign_(w * (1 + 1e-3 * len(self.runs)) if me.size > 1 else w)


@dataclass
class NeverCommunicates(Strategy):
    """Trains every rank alone. Its traits promise nothing that it does not keep."""

    equation = "w_i <- w_i - D(g_i(w_i))"
    traits = Traits(contracts=False)

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))


@dataclass
class OneWay(HalfWay):
    """Sends the weights of rank 0 to all ranks, and nothing back."""

    traits = Traits(conserves_mean=False)

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad())
        first = me.mean(me.w if me.rank == 0 else 0 * me.w) * me.size
        me.assign_(first - d)
