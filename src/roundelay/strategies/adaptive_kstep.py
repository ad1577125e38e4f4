"""K-step averaging with adaptive K.   Our rule; Cong et al. 2017 adapt K by measures that are not published.

    every step:      w <- w - a D(g(w))
    every K steps:   w <- sum_j n_j w_j / sum_j n_j                         n_j: samples since the last average
                     q = mean_j |w_j - w|^2 / rate                          rate: the learning rate, times a
                     K <- K * clip(C / q, 1/2, 2),  in [K_min, K_max]       C: the mean of q in the first `calibrate` averages

With learning rate r and gradient noise s, K local steps spread the ranks like a random walk: spread^2 ~ K r^2 s^2. So
q = spread^2 / r is what one average has to undo per unit of progress. Early in training gradients are large and noisy in
proportion, and q stays near C: averages remain frequent. As the rate decays and gradients settle, q falls like K r s^2, so
K grows. If q > 2 C although K = K_min, the ranks drift apart faster than averages can undo: then a = sqrt(C / q), and a
returns to 1 by a tenth per average. `reject` as in kstep.

Use it like kstep when no single K suits the whole run. Set K as the first value, and K_max to what the validation loss
allows. Weaknesses: as kstep; the first `calibrate` averages decide what counts as a normal spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.blocks import AveragingBlocks, all_gather_scalar, average_optimizer_state, is_accepted
from roundelay.strategies.worker import Worker


@dataclass
class AdaptiveKStep(Strategy):
    """K local steps, then an average; K follows the spread between ranks."""

    K: int = 8
    K_min: int = 1
    K_max: int = 64
    calibrate: int = 4
    reject: float = 1.0
    state: Literal["average", "keep", "reset"] = "average"
    sharding: Literal["static", "dynamic"] = "static"

    equation = "as kstep, with K <- K clip(C / q, 1/2, 2),  q = mean_j |w_j - w|^2 / rate"
    reference = "after Cong et al. 2017"
    advice = "As kstep, when no single K suits the whole run."
    weakness = "As kstep; the first averages decide what counts as a normal spread."
    saved = ("K", "a", "C", "averages", "loss_sum", "blocks")

    @property
    def traits(self) -> Traits:
        return Traits(
            sharding=self.sharding,
            deterministic=self.sharding == "static",
            optimizer_state="average",
            sample_weighting="average",
        )

    def start(self, me: Worker) -> None:
        self.a, self.C, self.averages, self.loss_sum = 1.0, 0.0, 0, 0.0
        self.blocks = AveragingBlocks(dynamic=self.sharding == "dynamic")

    def step(self, me: Worker) -> None:
        while self.blocks.ends_before_step(me, self.K):
            self.average(me)
        g = me.grad()
        me.add_(-self.a * me.delta(g))
        self.loss_sum += g.samples * me.loss if g.samples else 0.0
        if self.blocks.ends_after_step(self.K):
            self.average(me)

    def finish(self, me: Worker) -> None:
        while self.blocks.must_still_join(me, self.K):
            self.average(me)

    def average(self, me: Worker) -> None:
        if me.size == 1:
            return  # one rank has nothing to average: plain SGD
        n = float(me.samples_since_mean) * is_accepted(me, self.loss_sum, self.reject)
        before = me.w.clone()
        w = me.mean(me.w, weight=n)
        self.adapt(me, spread2=float((before - w).square().sum(dtype=torch.float64)))
        me.assign_(w)
        average_optimizer_state(me, self.state, n)
        self.blocks.steps, self.loss_sum, me.samples_since_mean = 0, 0.0, 0

    def adapt(self, me: Worker, spread2: float) -> None:
        rate = me.lr * self.a
        q = float(all_gather_scalar(me, spread2).mean()) / max(rate, 1e-30)
        self.averages += 1
        if self.averages <= self.calibrate:
            self.C += q / self.calibrate
            return
        if self.C == 0:
            return  # the ranks have never been apart: there is no spread to compare with
        ratio = self.C / max(q, 1e-30)
        K = self.K
        self.K = min(max(round(K * min(max(ratio, 0.5), 2.0)), self.K_min), self.K_max)
        drifts_apart = K == self.K_min and ratio < 0.5
        self.a = sqrt(ratio) if drifts_apart else min(1.0, self.a * 1.1)
