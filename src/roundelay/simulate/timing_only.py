"""A task of which only the size is known: its gradients take time and say nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class _NoLoss:
    """A loss whose backward leaves no gradient: nothing moves, everything takes its time."""

    def backward(self) -> None:
        """Takes no arithmetic."""

    def detach(self) -> float:
        return 0.0


class _OneNumber(nn.Module):
    """One element that stands for the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


@dataclass(frozen=True)
class TimingOnlyTask:
    """So many samples, no arithmetic."""

    samples: int
    nothing: _NoLoss = _NoLoss()  # noqa: RUF009 - it has no state

    def build(self) -> nn.Module:
        return _OneNumber()

    def batch(self, epoch: int, start: int, stop: int) -> int:
        return stop - start

    def loss(self, module: nn.Module, batch: int) -> Tensor:
        return self.nothing  # type: ignore[return-value]

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        return {"loss": (0.0, 1.0)}
