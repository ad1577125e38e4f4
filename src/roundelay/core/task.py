"""What is trained: a module, its batches, its loss, and how it is judged.

A task is anything of this shape; it need not import Roundelay. `batch` must be a pure function of its arguments, so that
every learner, and every resumed run, sees the same samples at the same place of an epoch.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn


@runtime_checkable
class Task(Protocol):
    """Anything that can be trained."""

    @property
    def samples(self) -> int:
        """Training samples in one epoch."""

    def build(self) -> nn.Module:
        """The module, initialised; the same on every learner (the engine copies rank 0's weights to be sure)."""

    def batch(self, epoch: int, start: int, stop: int) -> Any:
        """The samples at places start <= place < stop of the epoch's order; 0 <= start < stop <= samples."""

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the batch's samples, ready for backward()."""

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        """Held-out figures over the part-th of `parts` equal shares: name -> (sum, count). 'loss' must be among them."""


def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of an epoch: a permutation drawn from (seed, epoch) alone."""
    return np.random.default_rng([seed, 0x0BDE, epoch]).permutation(samples)
