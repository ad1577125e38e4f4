"""Keep your own DataLoader: shards of any size, one per learner.

    python examples/own_loader.py
    torchrun --nproc-per-node 2 examples/own_loader.py

`until_all_done` lets loaders end at different times. With a strategy that waits for everybody, as here, a learner whose
loader has ended joins the others' steps with weight 0; with adpsgd its agent goes on meeting the others'. Nobody hangs.
"""

import torch
from join_any_module import spirals
from torch import nn
from torch.utils.data import DataLoader, Subset

import roundelay


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    with roundelay.join(module, optimizer, strategy="sync", wire="auto") as learner:
        # An uneven cut on purpose: learner 0 has twice as much as each of the others.
        cuts = torch.linspace(0, 3000, learner.size + 2).int().tolist()
        mine = range(cuts[learner.rank + 1] if learner.rank else 0, cuts[learner.rank + 2])
        loader = DataLoader(Subset(spirals(3000, seed=1), mine), batch_size=16, shuffle=True)
        for epoch in range(12):
            for x, y in learner.until_all_done(loader):
                last = learner.step(lambda: loss(module(x), y), samples=len(x))  # noqa: B023 - called at once
            print(f"rank {learner.rank} epoch {epoch}: {learner.steps} steps, loss of the last batch {last:.3f}")

    x, y = spirals(1000, seed=2).tensors
    right = (module(x).argmax(1) == y).float().mean()
    print(f"rank {learner.rank} of {learner.size}: {len(mine)} samples, accuracy {right:.3f}")


if __name__ == "__main__":
    main()
