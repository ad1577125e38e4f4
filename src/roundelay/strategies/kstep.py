"""K-step averaging.   KAVG: Zhou & Cong 2018; for acoustic models Cong et al. 2017; Kaldi's averaging is the same loop.

    every step:      w <- w - D(g(w))
    every K steps:   w <- sum_j n_j w_j / sum_j n_j        n_j: samples since the last average

A replica whose recent loss exceeds the best one's by more than `reject` is left out of the average (n_j = 0), as Kaldi does.

As Kaldi runs it: `best_first` averages take the best replica instead of the mean, because averaging hurts while a model
changes fast; `combine` makes the final model the mean of that many last averages (Kaldi optimizes their weights; here they are
equal).

Adaptive K (our rule; the 2017 paper's measures are not published). With rate a and gradient noise s, K local steps spread
the learners like a random walk: spread^2 ~ K a^2 s^2, so q = spread^2 / a is what one averaging has to mend per unit of
progress. The first `calibrate` averages run at K and measure q = C. From then on

    K <- K * clip(C / q, 1/2, 2),   within [K_min, K_max]

Early, gradients are large and noisy in proportion and q stays near C: averages remain frequent. As the rate decays and
gradients settle q falls like K a s^2, so K grows: rarely late. If q > 2 C although K = K_min, the learners are running
apart faster than averaging can mend: the local rate is multiplied by sqrt(C / q) until q is back.

Use it on slow networks with equally fast learners: traffic falls K-fold. Set K = 4 to 16; turn it down when the held-out loss
lags `sync`, up when communication dominates. Weaknesses: a steady straggler still sets the pace (use sharding="dynamic" so
that it takes fewer batches per average); large K lets replicas drift.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, sqrt
from typing import ClassVar, Literal

import torch

from roundelay.errors import UsageError
from roundelay.strategies.base import Traits
from roundelay.strategies.blocks import AveragingBlocks
from roundelay.strategies.worker import Worker


@dataclass
class KStep:
    """K local steps, then an average."""

    K: int = 8
    adaptive: bool = False
    K_min: int = 1
    K_max: int = 64
    calibrate: int = 4
    reject: float = 1.0
    best_first: int = 0
    combine: int = 0
    state: Literal["average", "keep", "reset"] = "average"
    sharding: Literal["static", "dynamic"] = "static"

    equation: ClassVar[str] = "w <- w - D(g(w));  every K steps: w <- mean_j w_j"
    reference: ClassVar[str] = "Zhou & Cong 2018; Cong et al. 2017"
    advice: ClassVar[str] = "Slow network, equal learners. K = 4 to 16, or adaptive=true."
    weakness: ClassVar[str] = "A steady straggler sets the pace; large K lets the replicas drift apart."
    saved: ClassVar[tuple[str, ...]] = (
        "K", "gain", "target", "averages", "loss_sum", "blocks", "done", "combined", "combined_count",
    )  # fmt: skip
    _traits: ClassVar[Traits] = Traits(
        sharding="static",
        deterministic=True,
        conserves_mean=True,
        contracts=True,
        survives_death=False,
        optimizer_state="average",
        shares_weights=False,
        sample_weighting="average",
    )

    def __post_init__(self) -> None:
        if self.combine and self.sharding == "dynamic":
            raise UsageError(
                "learners that race do not end their last blocks together",
                where="combine",
                hint="use sharding='static', or combine=0",
            )

    @property
    def traits(self) -> Traits:
        return replace(self._traits, sharding=self.sharding, deterministic=self.sharding == "static")

    def start(self, me: Worker) -> None:
        self.gain, self.target, self.averages, self.loss_sum = 1.0, 0.0, 0, 0.0
        self.blocks = AveragingBlocks(race=self.sharding == "dynamic")
        self.done, self.combined_count = 0, 0
        self.combined = torch.zeros_like(me.w) if self.combine else torch.zeros(1)

    def step(self, me: Worker) -> None:
        while self.blocks.ends_before_step(me, self.K):
            self.average(me)
        g = me.grad()
        me.add_(-self.gain * me.delta(g))
        self.loss_sum += g.samples * me.loss if g.samples else 0.0
        if self.blocks.ends_after_step(self.K):
            self.average(me)

    def finish(self, me: Worker) -> None:
        while self.blocks.must_still_join(me, self.K):
            self.average(me)
        if self.combined_count and me.size > 1:
            if self.blocks.since:  # a last block that was shorter than K
                self.combined, self.combined_count = self.combined + me.mean(me.w), self.combined_count + 1
            me.assign_(self.combined / self.combined_count)

    def average(self, me: Worker) -> None:
        if me.size == 1:
            return  # alone there is nobody to agree with: plain SGD
        n = float(me.samples_since_mean) * self.accepted(me)
        before = me.w.clone() if self.adaptive else None
        w = me.mean(me.w, weight=n)
        if before is not None:
            self.adapt(me, spread2=float((before - w).square().sum(dtype=torch.float64)))
        me.assign_(w)
        self.done += 1
        if self.averages_left(me) < self.combine:
            self.combined, self.combined_count = self.combined + w, self.combined_count + 1
        elif self.combined_count:  # a finished run goes on: these were not the last ones
            self.combined, self.combined_count = torch.zeros_like(self.combined), 0
        if self.state == "reset":
            me.reset_state()
        elif self.state == "average" and (s := me.state).numel():
            me.load_state(me.mean(s, weight=n))
        self.blocks.since, self.loss_sum, me.samples_since_mean = 0, 0.0, 0

    def accepted(self, me: Worker) -> bool:
        """Whether this replica's objective is near enough to the best one's."""
        if self.reject <= 0 and self.done >= self.best_first:
            return True
        # a replica without a sample in this block has nothing to show, and must not pass for the best
        loss = self.loss_sum / me.samples_since_mean if me.samples_since_mean else float("inf")
        losses = gathered(me, loss if isfinite(loss) else 1e30)
        if self.done < self.best_first:
            return int(losses.argmin()) == me.rank
        return bool(losses[me.rank] <= losses.min() + self.reject)

    def averages_left(self, me: Worker) -> float:
        """Averages that are still to come after this one; infinite where nobody knows when the run ends."""
        if not me.step_info.total:
            return inf
        left = me.step_info.total - me.step_info.position - me.step_info.global_samples
        return ceil(max(left, 0) / (self.K * max(me.step_info.global_samples, 1)))

    def adapt(self, me: Worker, spread2: float) -> None:
        rate = me.lr * self.gain
        q = float(gathered(me, spread2).mean()) / max(rate, 1e-30)
        self.averages += 1
        if self.averages <= self.calibrate:
            self.target += q / self.calibrate
            return
        if self.target == 0:
            return  # the learners have never been apart: there is nothing to steer by
        ratio = self.target / max(q, 1e-30)
        K, wanted = self.K, round(self.K * min(max(ratio, 0.5), 2.0))
        self.K = min(max(wanted, self.K_min), self.K_max)
        run_apart = K == self.K_min and ratio < 0.5
        self.gain = sqrt(ratio) if run_apart else min(1.0, self.gain * 1.1)


def gathered(me: Worker, value: float) -> torch.Tensor:
    """Everybody's value, by rank: the mean of one-hot vectors, L times over."""
    mine = torch.zeros(me.size, dtype=torch.float64)
    mine[me.rank] = value
    return me.size * me.mean(mine)
