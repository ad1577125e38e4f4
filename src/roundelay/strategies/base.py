"""The base class of strategies, and the traits that a strategy declares instead of being known by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from roundelay.strategies.worker import Worker


@dataclass(frozen=True)
class Traits:
    """What a strategy promises. The engine, the conformance suite and the documentation read these, never its name."""

    sharding: Literal["static", "dynamic"] = "static"
    """static: every round gives each rank one batch. dynamic: a rank leases the next batch when it is free."""
    deterministic: bool = True
    """Two runs with `deterministic_reduce` give the same bits."""
    conserves_mean: bool = True
    """With a zero gradient the mean over all ranks stays the same, even if they start from different weights."""
    contracts: bool = True
    """With a zero gradient the spread between ranks shrinks."""
    survives_failures: bool = False
    """The remaining ranks continue when a rank fails."""
    optimizer_state: Literal["shared", "keep", "average", "reset"] = "keep"
    """What happens to the local optimizer's state when weights are averaged."""
    shares_weights: bool = False
    """Other ranks read and write `w` in the background, so `w` is a vector separate from the module's parameters."""
    sample_weighting: Literal["gradient", "average"] = "gradient"
    """Where a rank's number of samples counts: in the length of its step, or in its weight in the average."""
    averaging: Literal["all", "neighbors", "pairs", "server", "none"] = "all"
    """Which ranks exchange weights or gradients: all, neighbors of a topology, its pairs, a server, or none (one rank only)."""
    hierarchical: bool = False
    """The ranks of one node act as one worker; the attribute `outer` is the strategy between nodes."""


class Strategy(ABC):
    """An algorithm: it owns its step. Subclasses are dataclasses whose fields are the settings.

    A strategy may also define `finish(me)`. It is called once on each rank that has no more work, before the final average.
    """

    equation: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    advice: ClassVar[str] = ""
    """When to use it: one line for `roundelay list strategies`."""
    weakness: ClassVar[str] = ""
    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes that a checkpoint holds: tensors, numbers, and dataclasses of numbers."""

    @property
    def traits(self) -> Traits:
        """Return what the strategy promises. Override it with a class attribute, or with a property that reads the settings."""
        return Traits()

    def start(self, me: Worker) -> None:  # noqa: B027  # optional
        """Prepare for training. Called on every rank, before the first step, when all ranks have the same w."""

    @abstractmethod
    def step(self, me: Worker) -> None:
        """Run one training step, with exactly one call of `me.grad()` or `me.mean_grad()`."""


def innermost(strategy: Any) -> Any:
    """Return the strategy that runs between nodes: the strategy itself, unless it is hierarchical."""
    while strategy.traits.hierarchical:
        strategy = strategy.outer
    return strategy
