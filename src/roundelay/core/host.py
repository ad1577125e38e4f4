"""What a learner has beside the wire: a clock, dice, arithmetic, and hands that work in the background.

The training loop asks its host for these instead of the operating system, so the same loop runs on a real machine and in
virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from roundelay.core.events import EventLog

T = TypeVar("T")


class Host(Protocol):
    """One learner's host."""

    def clock(self) -> float:
        """Seconds, from any beginning."""

    def stamp(self) -> str:
        """The time as the lines of a log begin with it."""

    def begin_with(self, number: int) -> None:
        """Torch's own dice roll from this number: first weights, the same for all learners."""

    def seed(self, number: int) -> None:
        """From now on the learner's dice (dropout and the like) roll from this number."""

    def dice(self) -> Tensor:
        """The state of the learner's dice, for a checkpoint."""

    def set_dice(self, state: Tensor) -> None: ...

    def rolling(self) -> AbstractContextManager[object]:
        """Inside, torch's dice are this learner's."""

    def compute(self, gradient: Callable[[], float], samples: int, slow: float) -> float:
        """Runs forward and backward on so many samples and returns the loss; `slow` times as long as usual."""

    def load(self, make: Callable[[], T], samples: int) -> T:
        """Makes a batch of so many samples."""

    def ahead(self, items: Iterable[T]) -> Iterator[T]:
        """The items, made in the background one ahead of the one that is worked on."""

    def watch(self, look: Callable[[], None], hear: Callable[[], None], every_s: float) -> Callable[[], None]:
        """Calls `look` every so often in the background, or `hear` when somebody has died and that is known without looking.
        Returns what ends it."""

    def events(self, path: Path | None, rank: int) -> EventLog:
        """Where this learner's events go."""

    def speaks(self, rank: int) -> bool:
        """Whether this learner writes a log of its own and listens to signals."""
