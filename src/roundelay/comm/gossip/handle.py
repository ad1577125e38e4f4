"""The strategy's handle on background gossip, and how all ranks leave it together."""

from __future__ import annotations

import time
from collections.abc import Sequence

from roundelay.comm.gossip.thread import GossipThread
from roundelay.core.contracts import Membership, Store

POLL_S = 0.02


class BackgroundGossip:
    """The background exchanges of one rank. `name` and `ranks` are those of the communicator that created it."""

    def __init__(
        self, thread: GossipThread, membership: Membership, store: Store, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        self._thread, self._membership, self._store = thread, membership, store
        self._ranks, self._rank, self._name = ranks, rank, name
        self.rounds = 0
        """Rounds that all ranks have completed; valid after finish()."""

    @property
    def exchanges(self) -> int:
        """Exchanges completed so far."""
        return self._thread.exchanges

    def notify_step(self) -> None:
        self._thread.notify_step()

    def pop_metrics(self) -> dict[str, float]:
        return self._thread.pop_metrics()

    def finish(self) -> None:
        """Collective: leave background gossip together, so that no rank stays in a half-finished round.

        1. Answer exchanges until every live rank is done.
        2. Stop initiating exchanges and publish the current round.
        3. Complete all rounds up to the highest current round.
        4. Wait until every live rank has done so, because closing earlier would break the last exchange of a partner.

        Raises the error of the gossip thread if it has failed.
        """
        self._publish("done", 1)
        self._gather("done")
        self._publish("round", self._thread.stop_initiating())
        last = max(self._gather("round"))
        self.rounds = last + 1
        self._thread.drain_to(last)
        self._publish("drained", 1)
        self._gather("drained")

    def _publish(self, what: str, value: int) -> None:
        self._store.set(f"{self._name}/{what}/{self._rank}", str(value))

    def _gather(self, what: str) -> list[int]:
        """Block until every live rank has published `what`; return the values."""
        values: dict[int, int] = {}
        while True:
            self._thread.raise_if_failed()
            failed = self._membership.failed_ranks()
            for member in range(len(self._ranks)):
                if member not in values and self._ranks[member] not in failed:
                    text = self._store.get(f"{self._name}/{what}/{member}")
                    if text is not None:
                        values[member] = int(text)
            if all(member in values or self._ranks[member] in failed for member in range(len(self._ranks))):
                return list(values.values())
            time.sleep(POLL_S)
