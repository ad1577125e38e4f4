"""Plain SGD on one learner: the yardstick.

    w <- w - D(g(w))

Use it to find a rate and a batch size before paying for more machines. It refuses to run on several learners, because
each would train a model of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.errors import UsageError
from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker


@dataclass
class Single:
    """One learner, no communication."""

    equation: ClassVar[str] = "w <- w - D(g(w))"
    reference: ClassVar[str] = "Robbins & Monro 1951"
    advice: ClassVar[str] = "One learner. The yardstick for accuracy, and the way to find a rate and a batch size."
    weakness: ClassVar[str] = "One learner's speed."
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(
        sharding="static",
        deterministic=True,
        conserves_mean=True,
        contracts=False,
        survives_death=False,
        optimizer_state="keep",
        shares_weights=False,
    )

    def start(self, me: Worker) -> None:
        if me.size > 1:
            raise UsageError(
                f"strategy 'single' was given {me.size} learners",
                hint="set learners=1, or choose a strategy that lets learners work together (roundelay list strategies)",
            )

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
