"""Any torch module, a dataset, and the learners share the work.

    python examples/join_any_module.py
    torchrun --nproc-per-node 2 examples/join_any_module.py

Started alone this is plain SGD. Under torchrun the learners average with their neighbours in the background, and each
batch goes to whoever is free, so every sample is seen once per epoch by somebody.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import roundelay


def spirals(samples: int, seed: int) -> TensorDataset:
    """Points on three arms of a spiral; the class is the arm."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (samples,), generator=generator)
    along = torch.rand(samples, generator=generator)
    angle = 2.1 * arm + 3.5 * along + 0.1 * torch.randn(samples, generator=generator)
    return TensorDataset(torch.stack([along * angle.cos(), along * angle.sin()], 1), arm)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    with roundelay.join(module, optimizer, strategy="adpsgd") as learner:
        for batch in learner.claim(spirals(3000, seed=1), batch=16, epochs=12):
            learner.step(lambda: loss(module(batch.x), batch.y), samples=len(batch))  # noqa: B023 - called at once

    # Everybody now holds the average of all learners' models.
    x, y = spirals(1000, seed=2).tensors
    right = (module(x).argmax(1) == y).float().mean()
    print(f"rank {learner.rank} of {learner.size}: {learner.steps} steps, accuracy {right:.3f}")


if __name__ == "__main__":
    main()
