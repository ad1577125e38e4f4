"""Delay-by-one.   Cui et al. 2021, equation (1) with T = T_u.

    w_i <- mean_j w_j - D(g_i(w_i))          the mean is computed while g is computed at the un-averaged w_i

This is our reading of the paper. The mean over ranks is not stale: each rank only sees the last step of the other ranks one
step late.

Use it with equally fast ranks and large batches: communication is hidden, mixing is perfect. There is nothing to set.
Weaknesses: a slow rank slows all ranks; on a quadratic the stable rate is half of that of `sync`.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.strategies.base import Strategy
from roundelay.strategies.worker import Worker


@dataclass
class DelayByOne(Strategy):
    """Global average of the weights, hidden behind the gradient."""

    equation = "w_i <- mean_j w_j - D(g_i(w_i))"
    reference = "Cui et al. 2021"
    advice = "Equally fast ranks, large batches: communication is hidden, mixing is perfect."
    weakness = "A slow rank slows all ranks; half the stable rate of sync on a quadratic."

    def step(self, me: Worker) -> None:
        mean = me.start_mean(me.w)
        d = me.delta(me.grad())
        me.assign_(me.wait(mean) - d)
