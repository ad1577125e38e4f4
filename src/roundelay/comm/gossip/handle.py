"""The strategy's handle on background gossip, and how all ranks leave it together."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.comm.gossip.thread import GossipThread
from roundelay.core.contracts import Membership, Store
from roundelay.core.wait import wait_until
from roundelay.fleet.membership import FAILURES
from roundelay.fleet.vote import poll_interval

POLL_S = 0.02


class BackgroundGossip:
    """The background exchanges of one rank. `name` and `ranks` are those of the communicator that created it."""

    def __init__(
        self, thread: GossipThread, membership: Membership, store: Store, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        self._thread, self._membership, self._store = thread, membership, store
        self._ranks, self._rank, self._name = ranks, rank, name
        self.rounds = 0
        """The highest round of any rank; valid after finish()."""

    @property
    def exchanges(self) -> int:
        """Exchanges completed so far."""
        return self._thread.exchanges

    def notify_step(self) -> None:
        self._thread.notify_step()

    def pop_metrics(self) -> dict[str, float]:
        return self._thread.pop_metrics()

    def finish(self) -> None:
        """Collective: leave background gossip together, so that no exchange stays half-finished.

        1. Answer exchanges until every live rank is done.
        2. Stop initiating exchanges, and complete those that have begun.
        3. Wait until every live rank has done so: closing earlier would break the last exchange of a partner.

        Failed ranks are not waited for. Raises the error of the gossip thread if it has failed.
        """
        self._publish("done", 1)
        self._gather("done")
        self._thread.stop_initiating()
        self._thread.drain()
        self._publish("drained", self._thread.rounds)
        self.rounds = max(self._gather("drained"))
        self._thread.let_peers_leave()

    def _publish(self, what: str, value: int) -> None:
        self._store.set(f"{self._name}/{what}/{self._rank}", str(value))

    def _gather(self, what: str) -> list[int]:
        """Block until every live rank has published `what`; return the values."""
        keys = [f"{self._name}/{what}/{member}" for member in range(len(self._ranks))]
        values: dict[str, str | None] = {}
        missing: list[int] = []

        def complete() -> bool:
            self._thread.raise_if_failed()
            values.update(self._store.get_many(keys))
            missing[:] = [member for member, key in enumerate(keys) if values[key] is None]
            if missing:
                failed = self._membership.failed_ranks()
                missing[:] = [member for member in missing if self._ranks[member] not in failed]
            return not missing

        wait_until(
            complete,
            float("inf"),
            poll_s=max(POLL_S, poll_interval(len(keys))),
            # one missing key suffices: with all of them each arrival would wake every rank
            sleep=lambda seconds: self._store.pause(seconds, keys[missing[-1]], FAILURES),
        )
        return [int(text) for text in values.values() if text is not None]
