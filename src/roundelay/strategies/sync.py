"""Synchronous centralized parallel SGD (all-reduce).   SC-PSGD in Cui et al. 2021; the T = T_u case of W' = W T - a g.

    w <- w - D(mean_j g_j(w))          the same w on all ranks; buckets of the mean are reduced during backward

Use it when all ranks are equally fast and the network is fast: it is exactly SGD with the global batch. There is nothing to
set. Weaknesses: every step takes as long as that of the slowest rank, plus the part of the all-reduce that backward cannot
hide. Very large global batches degrade before those of the decentralized strategies do.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker


@dataclass
class Sync(Strategy):
    """All-reduce of gradients, overlapped with backward."""

    equation = "w <- w - D(mean_j g_j(w))"
    reference = "SC-PSGD; Cui et al. 2021"
    advice = "Equally fast ranks, fast network: exactly SGD with the global batch."
    weakness = "Every step waits for the slowest rank and for the all-reduce."
    traits = Traits(
        contracts=False,  # ranks start equal and stay equal
        optimizer_state="shared",
        sample_weighting="average",
    )

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.mean_grad()))
