"""Where a block of K steps ends.

turn: after K steps of one's own, which is the same moment for everybody.
race: after K rounds' worth of global samples, so that a fast learner does more steps of the block than a slow one; a
learner knows the block is over when the samples it sharding next lie beyond its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.strategies.worker import Worker


@dataclass
class AveragingBlocks:
    """Counts steps or samples until the next rendezvous."""

    race: bool
    since: int = 0
    end: int = 0

    def ends_before_step(self, me: Worker, K: int) -> bool:
        """race: whether this step's samples lie beyond the block. Then everybody meets before the gradient."""
        if not self.race:
            return False
        if self.end == 0:
            self.end = me.step_info.start_of_run + K * me.step_info.global_samples
        if me.step_info.position < self.end:
            return False
        self.end += K * me.step_info.global_samples
        return True

    def ends_after_step(self, K: int) -> bool:
        """turn: whether this was the block's last step."""
        self.since += 1
        return not self.race and self.since >= K

    def must_still_join(self, me: Worker, K: int) -> bool:
        """race, when there is no more work: whether others still wait at the end of a block."""
        if not self.race or me.step_info.global_samples == 0:
            return False
        if self.end == 0:
            self.end = me.step_info.start_of_run + K * me.step_info.global_samples
        if self.end >= me.step_info.total:
            return False
        self.end += K * me.step_info.global_samples
        return True
