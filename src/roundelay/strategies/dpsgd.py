"""Synchronous decentralized parallel SGD on a ring.   Lian et al. 2017; T_1 in Cui et al. 2021.

    w_i <- sum_j T_ij w_j - D(g_i(w_i))          T: weight 1/3 for itself and each neighbour

The neighbours' weights travel while the gradient is computed at the un-averaged w_i: what is mixed is exactly the model
the gradient was taken at, so nothing is stale and the transfer costs no time if it is shorter than the gradient.

Use it with equal learners when an all-reduce over many of them is too slow. Nothing to set. Weaknesses: a slow learner slows
its ring; the spectral gap shrinks like 1 / L^2; on a quadratic the stable rate is a third of that of `sync`, because
T_1 has an eigenvalue of -1/3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker


@dataclass
class DPSGD:
    """Synchronous neighbour averaging, hidden behind the gradient."""

    topology: str = "ring"

    equation: ClassVar[str] = "w_i <- sum_j T_ij w_j - D(g_i(w_i))"
    reference: ClassVar[str] = "Lian et al. 2017; Cui et al. 2021"
    advice: ClassVar[str] = "Equal learners, many of them, a network too slow for all-reduce."
    weakness: ClassVar[str] = "A slow learner slows its ring; the gap shrinks like 1/L^2; smaller stable rate."
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(
        sharding="static",
        deterministic=True,
        conserves_mean=True,
        contracts=True,
        survives_death=False,
        optimizer_state="keep",
        shares_weights=False,
    )

    def start(self, me: Worker) -> None:
        """Nothing to prepare."""

    def step(self, me: Worker) -> None:
        mixed = me.start_neighbor_average(me.w, self.topology)
        d = me.delta(me.grad())
        me.assign_(me.wait(mixed) - d)
