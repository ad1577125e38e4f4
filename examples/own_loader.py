"""Keep your own DataLoader: shards of any size, one per learner.

    python examples/own_loader.py
    torchrun --nproc-per-node 2 examples/own_loader.py

`until_all_done` lets loaders end at different times. With a strategy that waits for everybody, as here, a learner whose
loader has ended joins the others' steps with weight 0; with adpsgd its agent goes on exchange the others'. Nobody hangs.
"""

import torch
from join_any_module import spirals
from torch import nn
from torch.utils.data import DataLoader, random_split

import roundelay


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    with roundelay.join(module, optimizer, strategy="sync") as learner:
        # Learner 0 gets twice as much as any other; every learner makes the same cut, and takes its own piece.
        shares = [2 if rank == 0 else 1 for rank in range(learner.size)]
        cut = random_split(spirals(3000, seed=1), [s / sum(shares) for s in shares], torch.Generator().manual_seed(3))
        loader = DataLoader(cut[learner.rank], batch_size=16, shuffle=True)
        for _ in range(8):
            for x, y in learner.until_all_done(loader):
                learner.step(lambda: loss(module(x), y), samples=len(x))  # noqa: B023 - called at once

    x, y = spirals(1000, seed=2).tensors
    right = (module(x).argmax(1) == y).float().mean()
    print(f"rank {learner.rank} of {learner.size}: {len(loader)} batches, {learner.steps} steps, accuracy {right:.3f}")


if __name__ == "__main__":
    main()
