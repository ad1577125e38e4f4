"""Heartbeats: keys with a time to live. A rank whose key has expired in the store is declared failed.

Each beat of a rank makes a constant number of store calls, on a connection of its own: read whether there are new failures and
whether the job was aborted, renew the own key and, in turn with the other ranks, read all keys. The failures come first: a rank
that was suspended for longer than the time to live learns that it was declared failed (it is *fenced*) before it publishes or
takes anything.

A missing key means nothing if the store was silent or if this process was suspended: then no rank is declared failed for one
more time to live, in which live ranks renew their keys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from roundelay.core.contracts import Store
from roundelay.errors import DataError, Interrupted, PeerLost, RoundelayError
from roundelay.fleet.membership import ABORT, FIRST_INCARNATION, StoreMembership

HEARTBEAT_S = 0.5
"""Interval between two heartbeats of a rank."""
FAILURE_S = 12.0
"""Default time to live of a heartbeat."""
FROZEN_S = 2.0
"""A beat that starts or ends this much late means that this process was suspended or that the store was silent."""
READERS = 16
"""Ranks that read all heartbeats per interval, at most; so that the bytes read are linear in the ranks, too."""
HEARTBEAT = "heartbeat/"


class Heartbeats:
    """The heartbeats of one job, as one rank publishes and reads them. One thread calls `beat`; any thread may read.

    messages   rank -> its last heartbeat, as text
    fenced     why this rank was declared failed, or ""
    on_fenced  called once with the reason, on the thread that beats
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        failure_s: float = FAILURE_S,
        *,
        membership: StoreMembership | None = None,
        incarnation: int = FIRST_INCARNATION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._main = membership or StoreMembership(store)
        clone = getattr(store, "clone", None)
        self.store: Store = clone() if clone is not None else store
        self.membership = self._main.through(self.store)
        self.rank, self.size, self.failure_s, self.incarnation = rank, size, failure_s, incarnation
        self.messages: dict[int, str] = {}
        self.fenced = ""
        self.on_fenced: Callable[[str], None] | None = None
        self._clock = clock
        self._frozen_s = min(FROZEN_S, failure_s / 3)
        self._good_at = self._began_at = self._declare_after = clock()
        self._number = 0
        self._left = False
        self._error: RoundelayError | None = None

    @property
    def key(self) -> str:
        return f"{HEARTBEAT}{self.rank}"

    def beat(self, message: dict[str, Any]) -> None:
        """Publish one heartbeat and report the ranks whose heartbeats have expired. Three store calls, or two.

        Does not raise if the store fails: the error is kept for `raise_if_fenced` once it has lasted as long as a time to live,
        or at once if the server is known to be lost.
        """
        if self._left or self.fenced:
            return
        try:
            self._beat(message)
        except RoundelayError as error:
            if getattr(self.store, "lost", False) or self._clock() - self._good_at > self.failure_s:
                self._error = error

    def _beat(self, message: dict[str, Any]) -> None:
        began = self._clock()
        self.membership.refresh()
        if self._note_fence():
            return
        self.store.set(self.key, json.dumps(message), self.failure_s)
        heartbeats = self.store.list(HEARTBEAT) if self._reads() else None
        now = self._clock()
        if began - self._began_at > HEARTBEAT_S + self._frozen_s or now - began > self._frozen_s:
            self._declare_after = now + self.failure_s
        self._began_at, self._good_at, self._error = began, now, None
        self._number += 1
        if heartbeats is not None:
            self._compare(heartbeats, now)

    def _reads(self) -> bool:
        """Return whether this rank reads all heartbeats this time. Rank 0 always does, for the dashboard."""
        return self.rank == 0 or (self._number + self.rank) % -(-self.size // READERS) == 0

    def _compare(self, heartbeats: dict[str, str], now: float) -> None:
        current = {int(key[len(HEARTBEAT) :]): text for key, text in heartbeats.items()}
        if now >= self._declare_after:
            for rank in set(self.messages) - set(current) - {self.rank} - set(self.membership.cached):
                # one atomic operation: a rank that renews its key at this moment is not declared failed
                self.membership.report(
                    rank,
                    f"no heartbeat for {self.failure_s:.0f} s; last seen in {self.describe(rank)}",
                    by=self.rank,
                    if_missing=f"{HEARTBEAT}{rank}",
                )
        self.messages = self.messages | current

    def describe(self, rank: int) -> str:
        """Return what a rank did at its last heartbeat."""
        message = json.loads(self.messages.get(rank, "{}"))
        return f"phase {message.get('phase', 'unknown')} of step {message.get('step', '?')}"

    def _note_fence(self) -> bool:
        """Return whether the failures read last contain this incarnation of this rank."""
        reason = self.membership.failure_of(self.rank, self.incarnation)
        if reason is not None and not self.fenced:
            self.fenced = reason
            if self.on_fenced is not None:
                self.on_fenced(reason)
        return bool(self.fenced)

    def raise_if_fenced(self) -> None:
        """Raise PeerLost if this rank was declared failed, a rank has aborted the job, or the store is lost.

        Call it before taking new work.

        Without a store call, unless the last beat is older than the time to live: then the failures are read at once, because
        this process may have been suspended and its heartbeat thread may not have run yet.
        """
        if not self.fenced and self._error is not None:
            raise self._error
        if not self.fenced and self._clock() - self._good_at > self.failure_s:
            self._main.refresh()
            self._note_fence()
        if abort := self._main.abort:
            raise PeerLost(
                f"another rank stopped the run: {abort.splitlines()[0]}",
                where=f"rank {self.rank}",
                hint="see the message of that rank",
            )
        if self.fenced:
            raise PeerLost(
                f"this rank was declared failed by the other ranks ({self.fenced}); it leaves, and its work is done by them",
                where=f"rank {self.rank}",
                hint="check whether this machine was suspended, overloaded or cut off; raise failure_s if it often is",
            )

    def leave(self, error: BaseException | None = None) -> None:
        """Stop publishing. Call it once no other thread beats; a second call does nothing. Does not raise if the store is lost.

        Without an error, publish that this rank has left: its silence is no failure. The same after `Interrupted`, which is
        raised when all ranks have stopped together and have finished. After an error of its own, or a KeyboardInterrupt at any
        moment, report this rank as failed: the other ranks may wait for it, and it may own leases. A DataError aborts the job
        on all ranks. After the failure of a peer publish nothing: the heartbeat expires.
        """
        if self._left:
            return
        self._left = True
        with suppress(RoundelayError):
            if self.fenced or self._error is not None:
                pass
            elif error is None or isinstance(error, Interrupted):
                self.store.set(self.key, json.dumps({"left": True}))
            elif isinstance(error, KeyboardInterrupt):
                self.membership.report(self.rank, "interrupted", by=self.rank)
            elif not isinstance(error, PeerLost):
                if isinstance(error, DataError):
                    self.store.claim(ABORT, str(error))  # before the report: a rank that sees the failure sees the cause
                cause = (str(error).splitlines() or [""])[0]
                self.membership.report(self.rank, f"ended with {type(error).__name__}: {cause}", by=self.rank)
        if self.store is not self._main.store:
            getattr(self.store, "close", lambda: None)()
