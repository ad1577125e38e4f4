"""Synchronous centralized parallel SGD (all-reduce).   SC-PSGD in Cui et al. 2021; the T = T_u case of W' = W T - a g.

    w <- w - D(mean_j g_j(w))          the same w everywhere; buckets of the mean travel during backward

Use it when all learners are equally fast and the network is quick: it is exactly SGD with the global batch. Nothing to
set. Weaknesses: every step lasts as long as the slowest learner's, plus the part of the all-reduce that backward cannot
hide; very large global batches degrade before those of the decentralized strategies do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker


@dataclass
class Sync:
    """All-reduce of gradients, overlapped with backward."""

    equation: ClassVar[str] = "w <- w - D(mean_j g_j(w))"
    reference: ClassVar[str] = "SC-PSGD; Cui et al. 2021"
    advice: ClassVar[str] = "Equal learners, quick network: exactly SGD with the global batch."
    weakness: ClassVar[str] = "Every step waits for the slowest learner and for the all-reduce."
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(
        sharding="static",
        deterministic=True,
        conserves_mean=True,
        contracts=False,  # learners are equal from the start and stay so
        survives_death=False,
        optimizer_state="shared",
        shares_weights=False,
        sample_weighting="average",
    )

    def start(self, me: Worker) -> None:
        """Nothing to prepare."""

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.mean_grad()))
