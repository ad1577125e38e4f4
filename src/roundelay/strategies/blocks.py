"""What strategies that average every K steps share: the end of a block, the rejection of replicas, the optimizer state.

static sharding: a block ends after K steps, which is the same moment on all ranks.
dynamic sharding: a block ends after K rounds' worth of global samples, so a fast rank takes more of its steps than a slow one.
A rank detects the end when the samples of its next lease lie beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from roundelay.strategies.worker import Worker


@dataclass
class AveragingBlocks:
    """Counts steps (static sharding) or samples (dynamic sharding) until the next average."""

    dynamic: bool
    steps: int = 0
    """Steps of this rank since the last average."""
    end: int = 0
    """Global samples at the end of the block; 0 before the first step, and with static sharding."""

    def ends_before_step(self, me: Worker, K: int) -> bool:
        """Return True if this step's samples lie beyond the block (dynamic). Then average, and call it again."""
        if not self.dynamic:
            return False
        if self.end == 0:
            self.end = me.step_info.start_of_run + K * me.step_info.global_samples
        if me.step_info.position < self.end:
            return False
        self.end += K * me.step_info.global_samples
        return True

    def ends_after_step(self, K: int) -> bool:
        """Count a step; return True if it was the last of its block (static)."""
        self.steps += 1
        return not self.dynamic and self.steps >= K

    def must_still_join(self, me: Worker, K: int) -> bool:
        """Return True if other ranks still average before the run ends (dynamic). Call it when there is no more work."""
        if not self.dynamic or me.step_info.global_samples == 0:
            return False
        if self.end == 0:
            self.end = me.step_info.start_of_run + K * me.step_info.global_samples
        if self.end >= me.step_info.total:
            return False
        self.end += K * me.step_info.global_samples
        return True


def all_gather_scalar(me: Worker, value: float) -> torch.Tensor:
    """Return the values of all ranks, by rank: L times the mean of one-hot vectors. Collective; blocks."""
    one_hot = torch.zeros(me.size, dtype=torch.float64)
    one_hot[me.rank] = value
    return me.size * me.mean(one_hot)


def gather_losses(me: Worker, loss_sum: float) -> torch.Tensor:
    """Return the mean loss of every rank since the last average. Collective; blocks.

    A rank without samples, or with a loss that is not finite, counts as the worst.
    """
    loss = loss_sum / me.samples_since_mean if me.samples_since_mean else float("inf")
    return all_gather_scalar(me, loss if isfinite(loss) else 1e30)


def is_accepted(me: Worker, loss_sum: float, reject: float) -> bool:
    """Return True if this rank's loss exceeds the best one by at most `reject`. Collective, unless reject <= 0 accepts all."""
    if reject <= 0:
        return True
    losses = gather_losses(me, loss_sum)
    return bool(losses[me.rank] <= losses.min() + reject)


def average_optimizer_state(me: Worker, rule: str, weight: float) -> None:
    """Average, keep or reset the local optimizer's state after an average of the weights. Collective if rule is 'average'."""
    if rule == "reset":
        me.reset_state()
    elif rule == "average" and (state := me.state).numel():
        me.load_state(me.mean(state, weight=weight))
