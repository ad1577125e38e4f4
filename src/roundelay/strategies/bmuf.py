"""Blockwise model-update filtering.   Chen & Huo 2016.

    every step:      w <- w - D(g(w))
    every K steps:   G <- mean_j w_j - W_g          what the block achieved, seen from where it started
                     D <- eta D + zeta G            filtered by a block momentum
                     W <- W + D
                     W_g <- W                       classical
                     W_g <- W + eta D               Nesterov
                     w <- W_g, local momentum forgotten

Default eta = 1 - 1/L, so that zeta / (1 - eta) = L makes up for the division by L in the average. Local momentum is reset
at each block: what it remembers points away from a model that is no longer there.

Use it in place of kstep with many learners. Set K: the filter lengthens every step L-fold, resetting the local momentum mu
shortens it; with mu = 0.9 they cancel at about K L = 16, and then the rate means what it means elsewhere. Larger K needs a
smaller rate, and a run of many hundred blocks, since the filter remembers 1 / (1 - eta) = L of them. Turn K or eta down when
the loss oscillates from block to block. Weaknesses: as kstep with stragglers; with large eta
the model runs on for 1 / (1 - eta) blocks after the gradient has turned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from roundelay.strategies.base import Traits
from roundelay.strategies.blocks import AveragingBlocks
from roundelay.strategies.worker import Worker


@dataclass
class BMUF:
    """K local steps, then a block update filtered by momentum."""

    K: int = 8
    eta: float | None = None
    zeta: float = 1.0
    nesterov: bool = True
    sharding: Literal["static", "dynamic"] = "static"

    equation: ClassVar[str] = "G = mean_j w_j - W_g;  D <- eta D + zeta G;  W <- W + D;  W_g = W + eta D"
    reference: ClassVar[str] = "Chen & Huo 2016"
    advice: ClassVar[str] = "As kstep, with more learners and longer blocks."
    weakness: ClassVar[str] = "Stragglers as kstep; large eta overshoots when the gradient turns."
    saved: ClassVar[tuple[str, ...]] = ("W", "D", "blocks")
    _traits: ClassVar[Traits] = Traits(
        sharding="static",
        deterministic=True,
        conserves_mean=True,
        contracts=True,
        survives_death=False,
        optimizer_state="reset",
        shares_weights=False,
        sample_weighting="average",
    )

    @property
    def traits(self) -> Traits:
        return replace(self._traits, sharding=self.sharding, deterministic=self.sharding == "static")

    def start(self, me: Worker) -> None:
        self.W, self.D = me.w.clone(), torch.zeros_like(me.w)
        self.blocks = AveragingBlocks(race=self.sharding == "dynamic")

    def step(self, me: Worker) -> None:
        while self.blocks.ends_before_step(me, self.K):
            self.block(me)
        me.add_(-me.delta(me.grad()))
        if self.blocks.ends_after_step(self.K):
            self.block(me)

    def finish(self, me: Worker) -> None:
        while self.blocks.must_still_join(me, self.K):
            self.block(me)

    def block(self, me: Worker) -> None:
        if me.size == 1:
            return  # alone there is nothing to filter: plain SGD
        eta = 1 - 1 / me.size if self.eta is None else self.eta
        ahead = eta if self.nesterov else 0.0
        G = me.mean(me.w, weight=float(me.samples_since_mean)).sub_(self.W).sub_(self.D, alpha=ahead)  # mean_j w_j - W_g
        self.D.mul_(eta).add_(G, alpha=self.zeta)
        self.W.add_(self.D)
        me.assign_(torch.add(self.W, self.D, alpha=ahead))  # w <- W_g
        me.reset_state()
        self.blocks.since, me.samples_since_mean = 0, 0
