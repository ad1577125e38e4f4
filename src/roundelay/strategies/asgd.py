"""Asynchronous SGD with a parameter server.   Downpour, Dean et al. 2012; the baseline that K-step averaging beats.

    W <- W - D(g(w)) / L,     w <- W          W: the published vector of learner 0; L learners

Use it as a baseline only. The server is no process of its own: learner 0's published vector is W, and learner 0 trains on
it too. Every update is applied at once, so the gradient behind it is stale by the updates that came between: about L - 1
of them; the measured staleness of every update is in the events. Weaknesses: learner 0's link carries every model twice
per step, and the rate that converges falls as L grows, which is why each update is divided by L.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Traits
from roundelay.strategies.worker import Worker

SERVER = 0


@dataclass
class ASGD:
    """Parameter server as a published vector, with measured staleness."""

    equation: ClassVar[str] = "W <- W - D(g(w)) / L,  w <- W"
    reference: ClassVar[str] = "Dean et al. 2012; Cong et al. 2017"
    advice: ClassVar[str] = "A baseline for comparison."
    weakness: ClassVar[str] = "Staleness of about L - 1, all traffic through one learner, smaller rates as L grows."
    saved: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(
        sharding="dynamic",
        deterministic=False,
        conserves_mean=False,  # w <- W overwrites
        contracts=True,
        survives_death=False,
        optimizer_state="keep",
        shares_weights=True,
    )

    def start(self, me: Worker) -> None:
        """Nothing to prepare: all learners begin with the same w."""

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad()) / me.size
        me.remote_add(SERVER, -d)
        if me.rank != SERVER:
            me.assign_(me.remote_get(SERVER))
