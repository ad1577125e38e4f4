"""Hierarchical training.   H-ADPSGD: Zhang et al. 2019; HYBRID in the paper before it.

    inside machine m:    g_m = sum_i n_i g_i(w_m) / sum_i n_i          synchronous, over its members i
    between machines:    any other strategy, with g_m and w_m in the place of g and w

A machine is one big worker: it has one w and one optimizer state, held by its first rank, and only first ranks talk to other
machines. `hierarchical(adpsgd)` is H-ADPSGD.

Use it with several learners per machine: one model per machine and exchange crosses the network instead of one per learner, and
the ring is shorter, which mixes better. Set machines=N to split one machine for a test; otherwise the launcher's machines
count. Weaknesses: a slow learner slows its machine; the machine's batch is the sum of its members'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker


@dataclass
class Hierarchical:
    """Synchronous inside a machine, `outer` between machines."""

    outer: Strategy

    equation: ClassVar[str] = "g_m = sum_i n_i g_i(w_m) / sum_i n_i inside a machine;  between machines: the outer strategy"
    reference: ClassVar[str] = "Zhang et al. 2019"
    advice: ClassVar[str] = "Several learners per machine: hierarchical(adpsgd) is H-ADPSGD."
    weakness: ClassVar[str] = "A slow learner slows its machine."

    @property
    def traits(self) -> Traits:
        return self.outer.traits

    @property
    def saved(self) -> tuple[str, ...]:
        return ()

    def start(self, me: Worker) -> None:
        if me.is_node_leader:
            self.outer.start(me)

    def step(self, me: Worker) -> None:
        if me.is_node_leader:
            self.outer.step(me)
        else:
            me.run_follower_step()
