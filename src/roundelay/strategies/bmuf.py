"""Blockwise model-update filtering.   Chen & Huo 2016.

    every step:      w <- w - D(g(w))
    every K steps:   G <- mean_j w_j - W_g          the progress of the block
                     D <- eta D + zeta G            filtered by a block momentum
                     W <- W + D
                     W_g <- W                       classical
                     W_g <- W + eta D               Nesterov
                     w <- W_g, local momentum reset

Default eta = 1 - 1/L, so that zeta / (1 - eta) = L makes up for the division by L in the average. Local momentum is reset at
the end of each block, because it points away from a model that has been replaced.

Use it instead of kstep with many ranks. Set K: the filter lengthens every step L-fold, resetting the local momentum mu
shortens it. With mu = 0.9 they cancel at about K L = 16, and then the learning rate means the same as elsewhere. Larger K
needs a smaller rate and a run of many hundred blocks, since the filter averages over 1 / (1 - eta) = L of them. Lower K or
eta if the loss oscillates from block to block. Weaknesses: stragglers, as kstep; with large eta the model keeps moving for
1 / (1 - eta) blocks after the gradient has turned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.blocks import AveragingBlocks
from roundelay.strategies.worker import Worker


@dataclass
class BMUF(Strategy):
    """K local steps, then a block update filtered by momentum."""

    K: int = 8
    eta: float | None = None
    zeta: float = 1.0
    nesterov: bool = True
    sharding: Literal["static", "dynamic"] = "static"

    equation = "G = mean_j w_j - W_g;  D <- eta D + zeta G;  W <- W + D;  W_g = W + eta D"
    reference = "Chen & Huo 2016"
    advice = "As kstep, with more ranks and longer blocks."
    weakness = "Stragglers, as kstep; large eta overshoots when the gradient turns."
    saved = ("W", "D", "blocks")

    @property
    def traits(self) -> Traits:
        return Traits(
            sharding=self.sharding,
            deterministic=self.sharding == "static",
            conserves_mean=self.eta == 0.0 and self.zeta == 1.0,  # block momentum needs equal weights at the start
            optimizer_state="reset",
            sample_weighting="average",
        )

    def start(self, me: Worker) -> None:
        self.W, self.D = me.w.clone(), torch.zeros_like(me.w)
        self.blocks = AveragingBlocks(dynamic=self.sharding == "dynamic")

    def step(self, me: Worker) -> None:
        while self.blocks.ends_before_step(me, self.K):
            self.end_block(me)
        me.add_(-me.delta(me.grad()))
        if self.blocks.ends_after_step(self.K):
            self.end_block(me)

    def finish(self, me: Worker) -> None:
        while self.blocks.must_still_join(me, self.K):
            self.end_block(me)

    def end_block(self, me: Worker) -> None:
        if me.size == 1:
            return  # one rank has nothing to filter: plain SGD
        eta = 1 - 1 / me.size if self.eta is None else self.eta
        ahead = eta if self.nesterov else 0.0
        G = me.mean(me.w, weight=float(me.samples_since_mean)).sub_(self.W).sub_(self.D, alpha=ahead)  # mean_j w_j - W_g
        self.D.mul_(eta).add_(G, alpha=self.zeta)
        self.W.add_(self.D)
        me.assign_(torch.add(self.W, self.D, alpha=ahead))  # w <- W_g
        me.reset_state()
        self.blocks.steps, me.samples_since_mean = 0, 0
