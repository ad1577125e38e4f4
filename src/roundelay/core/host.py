"""What a learner has beside the wire: a clock, dice, arithmetic, and hands that work in the background.

The training loop asks its host for these instead of the operating system, so the same loop runs on a real machine and in
virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from roundelay.core.events import EventLog

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class Ahead(Protocol[C_co]):
    """Work that is prepared while other work is done."""

    @property
    def last_s(self) -> float:
        """How long the last piece was waited for though it was claimed."""

    def __iter__(self) -> Generator[tuple[C_co, Any], None, None]: ...


class Host(Protocol):
    """One learner's host."""

    def clock(self) -> float:
        """Seconds, from any beginning."""

    def cpu_s(self) -> float:
        """CPU seconds this learner has used."""

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

    def ahead(self, claims: Iterable[C], prepare: Callable[[C], Any], samples: Callable[[C], int], loaders: int) -> Ahead[C]:
        """The claims with what `prepare` makes of each, claimed and made in the background by so many loaders."""

    def watch(self, look: Callable[[], None], hear: Callable[[], None], every_s: float) -> Callable[[], None]:
        """Calls `look` every so often in the background, or `hear` when somebody has died and that is known without looking.
        Returns what ends it."""

    def events(self, path: Path | None, rank: int) -> EventLog:
        """Where this learner's events go."""

    def speaks(self, rank: int) -> bool:
        """Whether this learner writes a log of its own and listens to signals."""
