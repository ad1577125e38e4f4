"""Asynchronous decentralized parallel SGD.   Lian et al. 2018; on fixed and randomized rings: Cui et al. 2021.

    in the background:   w_i, w_j  <-  (w_i + w_j) / 2       for the pairs of each gossip round
    meanwhile:           w_i       <-  w_i - D(g(phi))       phi: w_i when the computation of g began

A background thread runs the exchanges; a gradient never waits for one. Between nodes each side adds half the difference of the
two snapshots to its w; on one node both vectors are averaged in place, under their locks. Either way the mean over ranks is
conserved, and an update that lands meanwhile is neither lost nor halved.

Use it when ranks are uneven or the network is slow. Set topology=ring to match the papers, and
topology=random_ring for 8 ranks or more, because its mixing does not weaken as ranks are added. Set steps_per_exchange above 1
only if exchanges cost CPU time that training needs. Weaknesses: results depend on timing, so they are not reproducible to the
bit. A gradient is stale by the exchanges and updates that happened while it was computed (recorded in events.jsonl).
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker


@dataclass
class ADPSGD(Strategy):
    """Gossip in the background, gradients at full speed."""

    topology: str = "ring"

    equation = "background: w_i, w_j <- (w_i + w_j)/2;  meanwhile: w_i <- w_i - D(g(phi))"
    reference = "Lian et al. 2018; Cui et al. 2021"
    advice = "Uneven ranks or slow networks. topology=random_ring for 8 ranks or more."
    weakness = "Not reproducible to the bit; gradients are slightly stale (measured)."
    traits = Traits(
        sharding="dynamic",
        deterministic=False,
        survives_failures=True,
        shares_weights=True,
        averaging="pairs",
    )

    def start(self, me: Worker) -> None:
        me.gossip(self.topology)

    def step(self, me: Worker) -> None:
        me.add_(-me.delta(me.grad()))
