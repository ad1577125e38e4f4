"""K-step averaging.   KAVG: Zhou & Cong 2018; for acoustic models: Cong et al. 2017.

    every step:      w <- w - D(g(w))
    every K steps:   w <- sum_j n_j w_j / sum_j n_j        n_j: samples since the last average

A replica whose recent loss exceeds the best one by more than `reject` is left out of the average (n_j = 0).

Use it on slow networks with equally fast ranks: traffic falls K-fold. Set K = 4 to 16. Lower K if the validation loss lags
behind `sync`; raise it if communication dominates. `adaptive_kstep` chooses K by itself, `kaldi_averaging` adds what Kaldi
does in the first and last averages. Weaknesses: a steady straggler still sets the pace (use sharding="dynamic", so that it
takes fewer batches per average); large K lets replicas drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.blocks import AveragingBlocks, average_optimizer_state, is_accepted
from roundelay.strategies.worker import Worker


@dataclass
class KStep(Strategy):
    """K local steps, then an average."""

    K: int = 8
    reject: float = 1.0
    state: Literal["average", "keep", "reset"] = "average"
    sharding: Literal["static", "dynamic"] = "static"

    equation = "w <- w - D(g(w));  every K steps: w <- mean_j w_j"
    reference = "Zhou & Cong 2018; Cong et al. 2017"
    advice = "Slow network, equally fast ranks. K = 4 to 16."
    weakness = "A steady straggler sets the pace; large K lets the replicas drift apart."
    saved = ("loss_sum", "blocks")

    @property
    def traits(self) -> Traits:
        return Traits(
            sharding=self.sharding,
            deterministic=self.sharding == "static",
            optimizer_state="average",
            sample_weighting="average",
        )

    def start(self, me: Worker) -> None:
        self.loss_sum = 0.0
        self.blocks = AveragingBlocks(dynamic=self.sharding == "dynamic")

    def step(self, me: Worker) -> None:
        while self.blocks.ends_before_step(me, self.K):
            self.average(me)
        g = me.grad()
        me.add_(-me.delta(g))
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
        me.assign_(me.mean(me.w, weight=n))
        average_optimizer_state(me, self.state, n)
        self.blocks.steps, self.loss_sum, me.samples_since_mean = 0, 0.0, 0
