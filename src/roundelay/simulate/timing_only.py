"""The task of timing-only mode: a number of samples, no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class _ZeroLoss:
    """A loss of 0 whose backward pass leaves no gradient."""

    def backward(self) -> None:
        """Do nothing."""

    def detach(self) -> float:
        return 0.0


class _OneParameter(nn.Module):
    """A module with one parameter in place of a whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


@dataclass(frozen=True)
class TimingOnlyTask:
    """A task with `samples` samples whose gradients take modeled time and are empty."""

    samples: int
    zero: _ZeroLoss = _ZeroLoss()

    def build(self) -> nn.Module:
        return _OneParameter()

    def batch(self, epoch: int, start: int, stop: int) -> int:
        return stop - start

    def loss(self, module: nn.Module, batch: int) -> Tensor:
        return self.zero  # type: ignore[return-value]

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        return {"loss": (0.0, 1.0)}
