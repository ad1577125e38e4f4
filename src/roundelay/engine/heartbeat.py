"""Heartbeats: each rank publishes its phase and step, and checks the heartbeats of all other ranks.

A rank whose heartbeat has not changed for LOST_S is reported as failed. If this process was itself suspended for more than
FROZEN_S, the deadlines of all other ranks are reset instead. A rank is checked only after its first heartbeat. If a collective
takes longer than STALL_S, the lowest-numbered waiting rank logs which ranks hold it up.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from roundelay.core.contracts import EventWriter
from roundelay.launch.context import DistributedContext
from roundelay.strategies.worker import Worker

HEARTBEAT_S = 0.5
"""Interval between two heartbeats of a rank."""
LOST_S = 6.0
"""A heartbeat is late, and its rank is reported as failed, after this time without a change."""
FROZEN_S = 2.0
"""A gap of this length between two own heartbeats means that this process was suspended."""
STALL_S = 10.0
"""A collective that takes longer is reported as a stall."""
PUBLISHED = ("steps", "samples", "samples_per_s", "loss", "lr", "seconds", "elapsed_s", "staleness", "pair_distance")
"""Metrics that a heartbeat carries, for the dashboard of rank 0."""

logger = logging.getLogger(__name__)


class HeartbeatMonitor:
    """Publish and check heartbeats in a background thread of the runtime. It never touches weights or gradients.

    latest   returns the rank's latest metrics
    failed   ranks reported as failed so far, with the reason
    """

    def __init__(
        self,
        worker: Worker,
        job: Any,
        context: DistributedContext,
        events: EventWriter,
        timeout_s: float,
        latest: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.worker, self.job, self.context, self.events, self.timeout_s = worker, job, context, events, timeout_s
        self.latest = latest
        self.failed: dict[int, str] = {}
        self._stop: Callable[[], None] | None = None
        self._seen: dict[int, tuple[str, float]] = {}
        self._warned_at = 0.0
        self._checked_at = time.monotonic()
        self._store_lost = self._stopped = False

    def start(self) -> None:
        if self.context.size > 1:
            self._stop = self.context.runtime.start_periodic(self._poll, self.read_failures, HEARTBEAT_S)

    def stop(self) -> None:
        """Publish that this rank has left, and stop the thread."""
        stop, self._stop = self._stop, None
        if stop is not None:
            self._stopped = True
            if not self._store_lost:
                self.job.store.set(f"heartbeat/{self.context.rank}", json.dumps({"left": True}))
            stop()

    def _poll(self) -> None:
        if self._store_lost or self._stopped:
            return
        try:
            self.heartbeat()
        except Exception as error:  # assume that the store is gone and stop publishing; the learner's own calls fail too
            self._store_lost = True
            self.events.write("watchdog", error=str(error).splitlines()[0])

    def heartbeat(self) -> None:
        """Publish one heartbeat, check those of the other ranks, and report failures and stalls."""
        store, now = self.job.store, time.monotonic()
        if now - self._checked_at > FROZEN_S:
            self._seen = {rank: (message, now) for rank, (message, _) in self._seen.items()}
        self._checked_at = now
        metrics = self.latest()
        message = {
            "phase": self.worker.phase,
            "step": self.worker.k,
            "time": time.time(),
            "latest": {key: metrics[key] for key in PUBLISHED if key in metrics},
        }
        store.set(f"heartbeat/{self.context.rank}", json.dumps(message))
        for rank in range(self.context.size):
            if rank == self.context.rank or rank in self.failed:
                continue
            text = store.get(f"heartbeat/{rank}")
            if text is not None and (rank not in self._seen or self._seen[rank][0] != text):
                self._seen[rank] = (text, now)
            elif rank in self._seen and now - self._seen[rank][1] > LOST_S and not json.loads(text or "{}").get("left"):
                self.job.membership.report(rank, f"no heartbeat for {LOST_S:.0f} s; last seen in {self._describe(rank)}")
        self.read_failures()
        self._check_for_stall(now)

    def read_failures(self) -> None:
        """Read the failed ranks from the membership. New ones are written as events; the lowest live rank logs them."""
        for rank, why in self.job.membership.failed_ranks().items():
            if rank not in self.failed:
                self.failed[rank] = why
                self.events.write("lost", lost=rank, why=why)
                if self.context.rank == min(self._live_ranks(), default=-1):
                    logger.warning("rank %d is lost: %s", rank, why)

    def _live_ranks(self) -> set[int]:
        return set(range(self.context.size)) - set(self.failed)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the latest metrics of the other live ranks, by rank."""
        messages = {rank: json.loads(text) for rank, (text, _) in list(self._seen.items()) if rank not in self.failed}
        return [{"rank": rank, **message["latest"]} for rank, message in sorted(messages.items()) if message.get("latest")]

    def _describe(self, rank: int) -> str:
        message = json.loads(self._seen[rank][0]) if rank in self._seen else {}
        return f"phase {message.get('phase', 'unknown')} of step {message.get('step', '?')}"

    def _check_for_stall(self, now: float) -> None:
        """Log which ranks hold up a collective, at most once per STALL_S. Only the lowest-numbered waiting rank does so."""
        since = self.worker.phase_since
        if self.worker.phase != "comm" or self.context.runtime.clock() - since < STALL_S or now - self._warned_at < STALL_S:
            return
        peers = {r: json.loads(text) for r, (text, _) in self._seen.items() if r not in self.failed}
        late = sorted(r for r, peer in peers.items() if peer.get("phase") != "comm" and not peer.get("left"))
        late = late or sorted(r for r in peers if peers[r].get("step", 0) == min(p.get("step", 0) for p in peers.values()))
        if late and self.context.rank == min(self._live_ranks() - set(late), default=-1):
            self._warned_at = now
            waited_s = self.context.runtime.clock() - since
            self.events.write("stall", waiting_for=late, waited_s=round(waited_s, 1))
            logger.warning(
                "waited %.0f s for %s. The run stops at timeout_s=%.0f and can be resumed.",
                waited_s,
                "; ".join(f"rank {r} ({self._describe(r)})" for r in late),
                self.timeout_s,
            )
