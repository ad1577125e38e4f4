"""Learning-rate schedules over global samples: a factor on every learning rate, the same for every strategy.

constant      1
cosine        (1 + cos(pi t)) / 2     t: the completed fraction of the run, after the warm-up
sqrt2_decay   1; after `anneal_after_epochs` epochs multiplied by 1/sqrt(2) per epoch (Zhang et al. 2019)

Each may start with a linear warm-up from `warmup_from` to 1 over the first `warmup_epochs` epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roundelay.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class LrSchedule:
    """The factor on the learning rate as a function of global samples. `samples`: per epoch; `total`: of the run."""

    kind: str
    samples: int
    total: int
    warmup_epochs: float = 0.0
    anneal_after_epochs: float = 10.0
    warmup_from: float = 0.1

    def __call__(self, position: int) -> float:
        epochs = position / self.samples
        factor = SHAPES[self.kind](self, position, epochs)
        if epochs < self.warmup_epochs:
            factor *= self.warmup_from + (1 - self.warmup_from) * epochs / self.warmup_epochs
        return factor

    def _cosine(self, position: int, epochs: float) -> float:
        start = min(self.warmup_epochs * self.samples, self.total - 1)
        t = min(max((position - start) / max(self.total - start, 1), 0.0), 1.0)
        return 0.5 * (1 + math.cos(math.pi * t))

    def _sqrt2_decay(self, position: int, epochs: float) -> float:
        return (
            0.5 ** (0.5 * max(0, math.floor(epochs - self.anneal_after_epochs) + 1))
            if epochs >= self.anneal_after_epochs
            else 1.0
        )


SHAPES: dict[str, Callable[[LrSchedule, int, float], float]] = {
    "constant": lambda lr_schedule, position, epochs: 1.0,
    "cosine": LrSchedule._cosine,
    "sqrt2_decay": LrSchedule._sqrt2_decay,
}


def lr_schedule(kind: str, samples: int, total: int, warmup_epochs: float, anneal_after_epochs: float) -> LrSchedule:
    """Return a schedule. Raises UsageError for an unknown kind."""
    if kind not in SHAPES:
        raise UsageError(f"unknown schedule '{kind}'", where="schedule", hint=did_you_mean(kind, SHAPES))
    return LrSchedule(kind, samples, total, warmup_epochs, anneal_after_epochs)
