"""Train any torch module on a dataset that the ranks share.

    python examples/join_any_module.py
    torchrun --nproc-per-node 2 examples/join_any_module.py

With one process this is plain SGD. Under torchrun the ranks average their models in the background, and each batch goes to the
first rank that is free, so together they see every sample once per epoch.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import roundelay


def spirals(samples: int, seed: int) -> TensorDataset:
    """Return points on three arms of a spiral; the class is the arm."""
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

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(x), y)

    with roundelay.Session(module, optimizer, strategy="adpsgd") as session:
        for batch in session.loader(spirals(3000, seed=1), batch_size=16, epochs=12):
            session.step(partial(loss, batch.x, batch.y), samples=len(batch))

    # All ranks now hold the average of their models.
    x, y = spirals(1000, seed=2).tensors
    accuracy = (module(x).argmax(1) == y).float().mean()
    print(f"rank {session.rank} of {session.size}: {session.steps} steps, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
