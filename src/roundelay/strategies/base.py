"""What a strategy promises, so that tests, the loop and the documentation need not know its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from roundelay.strategies.worker import Worker


@dataclass(frozen=True)
class Traits:
    """The promises of a strategy; each decides which laws of the battery apply to it."""

    sharding: Literal["static", "dynamic"]
    """turn: batches are dealt in rounds; race: whoever is free takes the next."""
    deterministic: bool
    """Two runs with `exact` give the same bits."""
    conserves_mean: bool
    """With a zero gradient the mean of all learners stays."""
    contracts: bool
    """With a zero gradient the spread between learners falls."""
    survives_death: bool
    """The others go on when a learner dies."""
    optimizer_state: Literal["shared", "keep", "average", "reset"]
    """What becomes of the local optimizer's state when weights are averaged."""
    shares_weights: bool
    """Neighbours reach into `w` in the background, so it must be a vector of its own."""
    sample_weighting: Literal["gradient", "average"] = "gradient"
    """Where a learner's number of samples counts: in the length of its step, or in the weight of its average."""


class Strategy(Protocol):
    """An algorithm: it owns its step."""

    equation: ClassVar[str]

    @property
    def traits(self) -> Traits: ...

    @property
    def saved(self) -> tuple[str, ...]:
        """Attributes that a checkpoint must hold: tensors, numbers, and dataclasses of numbers."""

    def start(self, me: Worker) -> None:
        """Before the first step, on every learner."""

    def step(self, me: Worker) -> None:
        """One step: exactly one gradient. (A strategy may also have `finish(me)`, called when there is no more work.)"""
