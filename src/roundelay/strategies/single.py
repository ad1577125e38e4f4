"""Plain SGD on one rank: the yardstick.   Robbins & Monro 1951.

    w <- w - D(g(w))

Use it to find a learning rate and a batch size before you pay for more machines. It refuses to run on several ranks, because
each would train its own model.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.errors import UsageError
from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker


@dataclass
class Single(Strategy):
    """One rank, no communication."""

    equation = "w <- w - D(g(w))"
    reference = "Robbins & Monro 1951"
    advice = "One rank. The yardstick for accuracy, and the way to find a learning rate and a batch size."
    weakness = "The speed of one rank."
    traits = Traits(contracts=False, averaging="none")

    def start(self, me: Worker) -> None:
        if me.size > 1:
            raise UsageError(
                f"strategy 'single' must run on one rank (got {me.size})",
                where="strategy",
                hint="set learners=1, or choose a strategy that averages (roundelay list strategies)",
            )

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
