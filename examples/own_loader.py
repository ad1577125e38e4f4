"""Keep your own DataLoader, with one shard of any size per rank.

    python examples/own_loader.py
    torchrun --nproc-per-node 2 examples/own_loader.py

`join_uneven` lets loaders end at different times. With a synchronous strategy, as here, a rank whose loader has ended takes
part in the remaining steps with weight 0. With adpsgd it keeps answering exchanges until all ranks are done.
"""

from functools import partial

import torch
from join_any_module import spirals
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

import roundelay


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(x), y)

    with roundelay.Session(module, optimizer, strategy="sync") as session:
        # Rank 0 gets twice as much data as any other rank; all ranks compute the same split and use their own part.
        shares = [2 if rank == 0 else 1 for rank in range(session.size)]
        parts = random_split(spirals(3000, seed=1), [s / sum(shares) for s in shares], torch.Generator().manual_seed(3))
        loader = DataLoader(parts[session.rank], batch_size=16, shuffle=True)
        for _ in range(8):
            for x, y in session.join_uneven(loader):
                session.step(partial(loss, x, y), samples=len(x))

    x, y = spirals(1000, seed=2).tensors
    accuracy = (module(x).argmax(1) == y).float().mean()
    print(f"rank {session.rank} of {session.size}: {len(loader)} batches, {session.steps} steps, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
