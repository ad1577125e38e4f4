"""Train a task with the built-in loop, which handles epochs, checkpoints, evaluation and events.

    python examples/fit_a_task.py
    torchrun --nproc-per-node 2 examples/fit_a_task.py

A task is any class with these methods; it need not import Roundelay. The command line can train the same class:

    roundelay train FILE learners=2          with task = "fit_a_task:Spirals" in FILE
"""

import tempfile
from dataclasses import dataclass

import torch
from join_any_module import spirals
from torch import Tensor, nn

import roundelay


@dataclass
class Spirals:
    """Classify points on three arms of a spiral."""

    samples: int = 3000
    seed: int = 0

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        x, y = spirals(self.samples, seed=1).tensors
        return x[order[start:stop]], y[order[start:stop]]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[part::parts] for t in spirals(1000, seed=2).tensors)
        scores = module(x)
        loss = nn.functional.cross_entropy(scores, y, reduction="sum")
        return {"loss": (float(loss), len(y)), "accuracy": (float((scores.argmax(1) == y).sum()), len(y))}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as run:
        metrics = roundelay.fit(Spirals(), strategy="adpsgd", epochs=6, batch=16, lr=0.1, run=run, schedule="cosine")
        if metrics["rank"] == 0:
            print("held-out:", metrics["metrics"])
