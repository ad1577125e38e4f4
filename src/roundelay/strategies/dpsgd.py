"""Synchronous decentralized parallel SGD on a ring.   Lian et al. 2017; T_1 in Cui et al. 2021.

    w_i <- sum_j T_ij w_j - D(g_i(w_i))          T: weight 1/3 for the rank itself and for each neighbor

The weights of the neighbors are transferred while the gradient is computed at the un-averaged w_i. The mixed model is exactly
the one at which the gradient is taken, so nothing is stale. The transfer is free if it is shorter than the gradient.

Use it with equally fast ranks when an all-reduce over many of them is too slow. There is nothing to set. Weaknesses: a slow
rank slows its ring; the spectral gap shrinks like 1 / L^2; on a quadratic the stable rate is a third of that of `sync`,
because T_1 has an eigenvalue of -1/3.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker


@dataclass
class DPSGD(Strategy):
    """Synchronous neighbor averaging, hidden behind the gradient."""

    topology: str = "ring"

    equation = "w_i <- sum_j T_ij w_j - D(g_i(w_i))"
    reference = "Lian et al. 2017; Cui et al. 2021"
    advice = "Many equally fast ranks, a network too slow for all-reduce."
    weakness = "A slow rank slows its ring; the gap shrinks like 1/L^2; smaller stable rate."
    traits = Traits(averaging="neighbors")

    def step(self, me: Worker) -> None:
        mixed = me.start_neighbor_average(me.w, self.topology)
        d = me.delta(me.grad())
        me.assign_(me.wait(mixed) - d)
