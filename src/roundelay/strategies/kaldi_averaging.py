"""Model averaging as Kaldi's nnet2 and nnet3 scripts do it.   Povey, Zhang & Khudanpur 2014.

    every step:                    w <- w - D(g(w))
    every K steps:                 w <- sum_j n_j w_j / sum_j n_j        n_j: samples since the last average
    the first best_first times:    w <- w_b                              b: the replica with the best loss
    at the end:                    w <- mean of the last `combine` averages

A replica whose recent loss exceeds the best one by more than `reject` is left out of the average (n_j = 0). The best replica
replaces the first averages because averaging hurts while a model changes fast. Kaldi optimizes the weights of the final
combination; here they are equal.

Use it as kstep, to compare with Kaldi or to train with `optimizer=ngsgd`. For long runs set K to the number of minibatches of
a Kaldi job, combine=20 and state="reset", as Kaldi does. With best_first=0 and combine=0 it is `kstep`. Weaknesses: as kstep;
`combine` needs static sharding and a known end of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import torch

from roundelay.errors import UsageError
from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.blocks import AveragingBlocks, average_optimizer_state, gather_losses, is_accepted
from roundelay.strategies.worker import Worker


@dataclass
class KaldiAveraging(Strategy):
    """K local steps, then an average; at first the best replica, at the end the mean of the last averages."""

    K: int = 8
    reject: float = 1.0
    best_first: int = 1
    combine: int = 4
    state: Literal["average", "keep", "reset"] = "average"
    sharding: Literal["static", "dynamic"] = "static"

    equation = "every K steps: w <- mean_j w_j (at first the best w_j);  at the end: w <- mean of the last averages"
    reference = "Povey, Zhang & Khudanpur 2014"
    advice = "As kstep, to compare with Kaldi. Long runs: combine=20, state=reset."
    weakness = "As kstep; combine needs static sharding."
    saved = ("loss_sum", "blocks", "averages", "combined", "combined_count", "total")

    def __post_init__(self) -> None:
        if self.combine and self.sharding == "dynamic":
            raise UsageError(
                f"combine must be 0 with sharding='dynamic' (got {self.combine}): ranks do not end their last blocks together",
                where="strategy_options.combine",
                hint="set sharding='static', or combine=0",
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            sharding=self.sharding,
            deterministic=self.sharding == "static",
            conserves_mean=self.best_first == 0,
            optimizer_state="average",
            sample_weighting="average",
        )

    def start(self, me: Worker) -> None:
        self.loss_sum = 0.0
        self.blocks = AveragingBlocks(dynamic=self.sharding == "dynamic")
        self.averages, self.combined_count, self.total = 0, 0, 0
        self.combined = torch.zeros_like(me.w) if self.combine else torch.zeros(1)

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
        if self.combined_count and me.size > 1:
            if self.blocks.steps:  # the last block was shorter than K
                self.combined, self.combined_count = self.combined + me.mean(me.w), self.combined_count + 1
            me.assign_(self.combined / self.combined_count)

    def average(self, me: Worker) -> None:
        if me.size == 1:
            return  # one rank has nothing to average: plain SGD
        if self.averages < self.best_first:
            accepted = int(gather_losses(me, self.loss_sum).argmin()) == me.rank
        else:
            accepted = is_accepted(me, self.loss_sum, self.reject)
        n = float(me.samples_since_mean) * accepted
        w = me.mean(me.w, weight=n)
        me.assign_(w)
        self.averages += 1
        left = self.averages_left(me)
        if me.step_info.total != self.total:  # a finished run was extended: its last averages may still be to come
            self.total = me.step_info.total
            if left + self.combined_count >= self.combine:
                self.combined, self.combined_count = torch.zeros_like(self.combined), 0
        if left < self.combine:
            self.combined, self.combined_count = self.combined + w, self.combined_count + 1
        elif self.combined_count:  # batches became smaller, so the end is further away than it seemed
            self.combined, self.combined_count = torch.zeros_like(self.combined), 0
        average_optimizer_state(me, self.state, n)
        self.blocks.steps, self.loss_sum, me.samples_since_mean = 0, 0.0, 0

    def averages_left(self, me: Worker) -> float:
        """Return the number of averages after this one; infinite if the end of the run is unknown."""
        if not me.step_info.total:
            return inf
        left = me.step_info.total - me.step_info.position - me.step_info.global_samples
        return ceil(max(left, 0) / (self.K * max(me.step_info.global_samples, 1)))
