"""Asynchronous decentralized parallel SGD.   Lian et al. 2018; on fixed and randomized rings: Cui et al. 2021.

    all the time, in the background:   w_i, w_j  <-  (w_i + w_j) / 2       for the partners of each round
    meanwhile:                         w_i       <-  w_i - D(g(phi))       phi = what w_i was when g began

Gradients never start or await a exchange; agents do. Both sides average the same two snapshots and add the difference, so
the mean over learners is conserved and an update that lands meanwhile is neither lost nor halved.

Use it when learners are uneven or the network is slow. Set topology: `ring` as published; `random_ring` from 8 learners
on, whose mixing does not weaken as learners are added; steps_per_exchange above 1 only when exchanges cost CPU that
training needs. Weaknesses: not repeatable to the bit, since timing decides; a gradient is stale by the exchanges and
moves that came while it was computed (measured, in the events).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker


@dataclass
class ADPSGD:
    """Gossip in the background, gradients at full speed."""

    topology: str = "ring"

    equation: ClassVar[str] = "background: w_i, w_j <- (w_i + w_j)/2;  meanwhile: w_i <- w_i - D(g(phi))"
    reference: ClassVar[str] = "Lian et al. 2018; Cui et al. 2021"
    advice: ClassVar[str] = "Uneven learners or slow networks. topology=random_ring from 8 learners on."
    weakness: ClassVar[str] = "Not repeatable to the bit; gradients are slightly stale (measured)."
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(
        sharding="dynamic",
        deterministic=False,
        conserves_mean=True,
        contracts=True,
        survives_death=True,
        optimizer_state="keep",
        shares_weights=True,
    )

    def start(self, me: Worker) -> None:
        me.gossip(self.topology)

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
