"""Hierarchical training.   H-ADPSGD: Zhang et al. 2019; HYBRID in the paper before it.

    inside node m:    g_m = sum_i n_i g_i(w_m) / sum_i n_i          synchronous, over its ranks i
    between nodes:    any other strategy, with g_m and w_m in place of g and w

A node acts as one big worker. It has one w and one optimizer state, held by its leader (its first rank), and only leaders
communicate with other nodes. `hierarchical(adpsgd)` is H-ADPSGD.

Use it with several ranks per node. Each exchange sends one model per node over the network instead of one per rank, and the
ring is shorter, which mixes better. Nodes come from the launcher; set simulate_nodes=N to split one machine for a test.
Weaknesses: a slow rank slows its node; the batch of a node is the sum of its ranks' batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundelay.strategies.base import Strategy, Traits
from roundelay.strategies.worker import Worker


@dataclass
class Hierarchical(Strategy):
    """Synchronous inside a node, `outer` between nodes."""

    outer: Strategy

    equation = "g_m = sum_i n_i g_i(w_m) / sum_i n_i inside a node;  between nodes: the outer strategy"
    reference = "Zhang et al. 2019"
    advice = "Several ranks per node: hierarchical(adpsgd) is H-ADPSGD."
    weakness = "A slow rank slows its node."

    @property
    def traits(self) -> Traits:
        return replace(self.outer.traits, hierarchical=True)

    def start(self, me: Worker) -> None:
        if me.is_node_leader:
            self.outer.start(me)

    def step(self, me: Worker) -> None:
        if me.is_node_leader:
            self.outer.step(me)
        else:
            me.run_follower_step()
