"""Two tasks in double precision, small enough for the mathematical model, and the model's inputs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundelay.data.epoch_order import epoch_order
from roundelay.theory import GradientFunction


@dataclass(frozen=True)
class Fit:
    """Least squares (hidden = 0), or a network with one tanh layer, which is not convex."""

    hidden: int = 0
    samples: int = 240
    features: int = 5
    seed: int = 0

    def build(self) -> nn.Module:
        if not self.hidden:
            return nn.Linear(self.features, 1).double()
        return nn.Sequential(nn.Linear(self.features, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1)).double()

    def _data(self) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(7)
        x = rng.standard_normal((self.samples, self.features))
        y = np.sin(x @ rng.standard_normal((self.features, 1)))
        return torch.from_numpy(x), torch.from_numpy(y)

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        indices = torch.from_numpy(epoch_order(self.seed, epoch, self.samples)[start:stop])
        x, y = self._data()
        return x[indices], y[indices]

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        return (module(batch[0]) - batch[1]).square().mean()

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[part::parts] for t in self._data())
        return {"loss": (float((module(x) - y).square().sum()), float(len(y)))}


def first_weights(task: Fit, size: int) -> np.ndarray:
    """Return W of the model: all learners start from the same weights."""
    torch.manual_seed(0)
    w = torch.cat([p.detach().reshape(-1) for p in task.build().parameters()]).numpy()
    return np.repeat(w[:, None], size, axis=1)


def gradient_of(task: Fit, batches: list[list[tuple[int, int, int]]]) -> GradientFunction:
    """Return g of the model: learner l's n-th gradient is on batches[l][n] = (epoch, start, stop)."""
    module = task.build()

    def gradient(learner: int, n: int, phi: np.ndarray) -> np.ndarray:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(np.ascontiguousarray(phi)), module.parameters())
        module.zero_grad()
        task.loss(module, task.batch(*batches[learner][n])).backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]).numpy()

    return gradient


def static_batches(task: Fit, size: int, batch: int, rounds: int) -> list[list[tuple[int, int, int]]]:
    """Return the batches that static sharding assigns, by learner."""
    per_epoch = task.samples // (size * batch)
    return [
        [
            (r // per_epoch, (r % per_epoch * size + rank) * batch, (r % per_epoch * size + rank + 1) * batch)
            for r in range(rounds)
        ]
        for rank in range(size)
    ]
