"""Failed ranks, as recorded in the job's store."""

from __future__ import annotations

import json
from collections.abc import Sequence

from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost

FAILURES = "failures"
"""Key of the counter of failed ranks; it changes with every new failure."""
EXPLAIN_S = 8.0
"""How long to wait for the report of a failure after a collective has failed."""


class StoreMembership:
    """The failed ranks of the whole job. Ranks are ranks of the job. Any thread may call any method."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._failed: dict[int, str] = {}
        self._read = 0

    def report(self, rank: int, reason: str) -> None:
        """Report a rank as failed. The first report of a rank is kept."""
        if rank not in self.failed_ranks() and self.store.add(f"reported/{rank}", 1) == 1:
            number = self.store.add(FAILURES, 1)
            self.store.set(f"failure/{number}", json.dumps({"rank": rank, "reason": reason}))

    def failed_ranks(self) -> dict[int, str]:
        """Return the failed ranks with the reason of each."""
        failures = int(self.store.get(FAILURES) or 0)
        while self._read < failures:
            text = self.store.get(f"failure/{self._read + 1}")
            if text is None:
                break  # counted, but not written yet
            failure = json.loads(text)
            self._failed[failure["rank"]] = failure["reason"]
            self._read += 1
        return self._failed

    def explain(self, error: BaseException, ranks: Sequence[int], rank: int, timeout_s: float = EXPLAIN_S) -> PeerLost:
        """Return the error of a failed collective among `ranks`: it names the failed ranks.

        Blocks at most `timeout_s`, because the report of a failure may arrive after the collective has failed.
        """

        def failed_members() -> dict[int, str]:
            return {r: reason for r, reason in self.failed_ranks().items() if r in ranks}

        if lost := wait_until(failed_members, timeout_s, poll_s=0.1):
            listed = ", ".join(f"rank {r} ({reason})" for r, reason in sorted(lost.items()))
            return PeerLost(
                f"{listed} was lost",
                where=f"rank {rank}, in a collective",
                hint="look at that rank's log; start again with resume=auto to continue from the last checkpoint",
            )
        return PeerLost(
            "a collective failed and no rank has been reported as failed",
            where=f"rank {rank}: {str(error).splitlines()[0]}",
            hint="look at the logs of the ranks that are silent; start again with resume=auto",
        )
