"""The strategy's handle on background gossip, and how all ranks leave it together."""

from __future__ import annotations

import time
from collections.abc import Sequence

from roundelay.comm.gossip.thread import GossipThread
from roundelay.core.contracts import Membership, Store

POLL_S = 0.02


class BackgroundGossip:
    """The background exchanges of one learner, and how all leave them together."""

    def __init__(
        self,
        agent: GossipThread,
        membership: Membership,
        ranks: Sequence[int],
        rank: int,
        name: str,
        timeout_s: float,
        local_store: Store,
    ) -> None:
        self.agent, self.membership, self.ranks, self.rank, self.name = agent, membership, ranks, rank, name
        self.timeout_s, self.store = timeout_s, local_store
        self.rounds = 0
        """Rounds that everybody has played, known once all have left."""

    def notify_step(self) -> None:
        self.agent.notify_step()

    def pop_metrics(self) -> dict[str, float]:
        return self.agent.metrics()

    def finish(self) -> None:
        """The agent goes on answering until every living learner is done; then all stop asking, post the round they have
        entered, and play on to the highest of them, so that nobody is left in a half-finished round."""
        self.store.set(f"{self.name}/done/{self.rank}", "1")
        self._wait_for("done")
        self.store.set(f"{self.name}/entered/{self.rank}", str(self.agent.stop_asking()))
        entered = self._wait_for("entered")
        self.rounds = max(entered) + 1
        self.agent.play_to(max(entered))
        # Nobody may hang up while another still plays its last round.
        self.store.set(f"{self.name}/rested/{self.rank}", "1")
        self._wait_for("rested")

    def _wait_for(self, what: str) -> list[int]:
        said: dict[int, int] = {}
        while True:
            self.agent._check()
            dead = self.membership.failed_ranks()
            for member in range(len(self.ranks)):
                if member not in said and self.ranks[member] not in dead:
                    value = self.store.get(f"{self.name}/{what}/{member}")
                    if value is not None:
                        said[member] = int(value)
            if all(member in said or self.ranks[member] in dead for member in range(len(self.ranks))):
                return list(said.values())
            time.sleep(POLL_S)
