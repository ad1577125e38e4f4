"""Asynchronous SGD with a parameter server.   Downpour: Dean et al. 2012; the baseline that K-step averaging beats.

    W <- W - D(g(w)) / L,     w <- W          W: the shared vector of rank 0; L ranks

Use it as a baseline only. The server is not a process: W is the shared vector of rank 0, and rank 0 trains on it too. Every
update is applied at once, so its gradient is stale by the updates in between, about L - 1 of them. The measured staleness
of every update is in the events. Weaknesses: the link of rank 0 carries every model twice per step, and the learning rate
that converges falls as L grows, which is why each update is divided by L.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker

SERVER = 0


@dataclass
class ASGD(Strategy):
    """Parameter server as a shared vector, with measured staleness."""

    equation = "W <- W - D(g(w)) / L,  w <- W"
    reference = "Dean et al. 2012; Cong et al. 2017"
    advice = "A baseline for comparison."
    weakness = "Staleness of about L - 1, all traffic through one rank, smaller learning rates as L grows."
    traits = Traits(
        sharding="dynamic",
        deterministic=False,
        conserves_mean=False,  # w <- W overwrites
        shares_weights=True,
        averaging="server",
    )

    def step(self, me: Worker) -> None:
        d = me.delta(me.grad()) / me.size
        me.remote_add(SERVER, -d)
        if me.rank != SERVER:
            me.assign_(me.remote_get(SERVER))
