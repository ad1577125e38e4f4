"""Failed ranks, as recorded in the job's store.

A member is (rank, incarnation). The key `failed/{rank}` holds the incarnation that failed, the reason and the reporter. It is
written by one atomic operation of the store: a reporter that dies has reported everything or nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from roundelay.core.contracts import Store
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost

FAILURES = "failures"
"""Key that every report of a failure writes: waiting ranks poll this key only and read the reports when it changes."""
FAILED = "failed/"
ABORT = "abort"
"""Key with the error that ends the job on all ranks, whatever the strategy survives: bad data or a non-finite number."""
FIRST_INCARNATION = 1
EXPLAIN_S = 8.0
"""How long to wait for the report of a failure after a collective has failed."""


def failed_key(rank: int) -> str:
    """Return the key that exists if and only if the rank has failed. A transaction may require that it is missing."""
    return f"{FAILED}{rank}"


class _Reports:
    """The reports that the users of one store have read. They never go back: a reply that arrives late removes nothing."""

    def __init__(self) -> None:
        self.failed: dict[int, str] = {}
        self.incarnations: dict[int, int] = {}
        self.newest: str | None = None
        """Value of FAILURES before the reports were read last."""
        self.abort = ""
        self._lock = threading.Lock()

    def merge(self, notes: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
        """Add the reports of new members and of later incarnations; return all reasons. Replies may arrive in any order."""
        with self._lock:
            new = {rank: note for rank, note in notes.items() if note["incarnation"] > self.incarnations.get(rank, 0)}
            if new:  # new objects: readers hold no lock
                self.failed = self.failed | {rank: note["reason"] for rank, note in new.items()}
                self.incarnations = self.incarnations | {rank: note["incarnation"] for rank, note in new.items()}
            return self.failed


_reports_of: WeakKeyDictionary[Any, _Reports] = WeakKeyDictionary()
"""Store -> what was read from it last: the groups of one rank share it, so one call keeps all of them up to date."""


class StoreMembership:
    """The failed ranks of the whole job. Ranks are ranks of the job.

    Any thread may call any method; no lock is held during a store call.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._reports = _reports_of.setdefault(store, _Reports())

    def through(self, store: Store) -> StoreMembership:
        """Return the same membership over another connection; `cached` is common to both."""
        other = StoreMembership(store)
        other._reports = self._reports
        return other

    def report(
        self,
        rank: int,
        reason: str,
        *,
        by: int | None = None,
        incarnation: int = FIRST_INCARNATION,
        if_missing: str | None = None,
    ) -> bool:
        """Report a member as failed; return whether it is recorded now. The first report of a member is kept.

        One atomic store operation, repeated only if an earlier incarnation had been reported: at most once per incarnation, and
        each call has the deadline of the store. With `if_missing` nothing is
        recorded if that key exists: the heartbeat of a member that has come back.
        """
        key, previous = failed_key(rank), None
        note = json.dumps({"incarnation": incarnation, "reason": reason, "by": by})
        while True:
            expected = {key: previous} | ({if_missing: None} if if_missing is not None else {})
            current = self.store.compare_and_set(expected, {key: note, FAILURES: f"{rank}.{incarnation}"})
            if current is None:
                return True
            if if_missing is not None and current[if_missing] is not None:
                return False
            previous = current[key]
            if previous is not None and json.loads(previous)["incarnation"] >= incarnation:
                return True

    def failed_ranks(self) -> dict[int, str]:
        """Return the failed ranks with the reason of each. One store call."""
        notes = {int(key[len(FAILED) :]): json.loads(text) for key, text in self.store.list(FAILED).items()}
        return self._reports.merge(notes)

    def refresh(self) -> dict[int, str]:
        """Read whether the job was aborted, and new failures; return the failed ranks. One store call; two after a failure.

        FAILURES has another value after each report, because each member is recorded once.
        """
        texts = self.store.get_many([FAILURES, ABORT])
        self._reports.abort = texts[ABORT] or ""
        if texts[FAILURES] != self._reports.newest:
            self.failed_ranks()
            self._reports.newest = texts[FAILURES]
        return self._reports.failed

    @property
    def abort(self) -> str:
        """The error that ends the job on all ranks, as read last by `refresh`, or "". No store call."""
        return self._reports.abort

    @property
    def cached(self) -> dict[int, str]:
        """The failed ranks as read last by this rank: no store call. The heartbeat thread reads them at every beat."""
        return self._reports.failed

    def failure_of(self, rank: int, incarnation: int = FIRST_INCARNATION) -> str | None:
        """Return the reason if this incarnation, or a later one, is among the failures read last. No store call."""
        reports = self._reports
        return reports.failed.get(rank) if reports.incarnations.get(rank, 0) >= incarnation else None

    def error(self, ranks: Sequence[int], rank: int, doing: str) -> PeerLost | None:
        """Return the error that names the failed ranks among `ranks`, or None if there are none. One store call."""
        lost = {r: reason for r, reason in self.failed_ranks().items() if r in ranks and r != rank}
        if not lost:
            return None
        listed = ", ".join(f"rank {r} ({reason})" for r, reason in sorted(lost.items()))
        return PeerLost(
            f"{listed} was lost",
            where=f"rank {rank}, {doing}",
            hint="look at that rank's log; start again with resume=auto to continue from the last checkpoint",
        )

    def explain(self, error: BaseException, ranks: Sequence[int], rank: int, timeout_s: float = EXPLAIN_S) -> PeerLost:
        """Return the error of a failed collective among `ranks`: it names the failed ranks.

        Blocks at most `timeout_s`, because the report of a failure may arrive after the collective has failed.
        """
        lost = wait_until(lambda: self.error(ranks, rank, "in a collective"), timeout_s, poll_s=0.1)
        return lost or PeerLost(
            "a collective failed and no rank has been reported as failed",
            where=f"rank {rank}: {str(error).splitlines()[0]}",
            hint="look at the logs of the ranks that are silent; start again with resume=auto",
        )
