"""The heartbeat thread of a learner: publish phase, step and metrics, follow failures, warn about stalls.

A rank is declared failed by `roundelay.fleet.heartbeat`, by expiry in the store only. If a collective takes longer than
STALL_S, the lowest-numbered waiting rank logs which ranks hold it up.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from roundelay.core.contracts import EventWriter
from roundelay.fleet.heartbeat import FAILURE_S, HEARTBEAT_S, Heartbeats
from roundelay.launch.context import DistributedContext
from roundelay.strategies.worker import Worker

SUSPECT_S = 3.0
"""A live partner with which exchanges fail for this time is reported as suspected."""
STALL_S = 10.0
"""A collective that takes longer is reported as a stall."""
PUBLISHED = (
    "steps", "samples", "samples_per_s", "loss", "lr", "seconds", "elapsed_s", "staleness", "pair_distance", "exchanges",
    "longest_gap",
)  # fmt: skip
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
        latest: Callable[[], dict[str, Any]] = dict,
        failure_s: float = FAILURE_S,
    ) -> None:
        self.worker, self.job, self.context, self.events = worker, job, context, events
        self.latest = latest
        self.failed: dict[int, str] = {}
        self._heartbeats = context.heartbeats or Heartbeats(
            job.store, context.rank, context.size, failure_s, membership=job.membership
        )
        self._stop: Callable[[], None] | None = None
        self._warned_at = 0.0
        self._silent: dict[int, float] = {}
        """Rank -> since when exchanges with it fail."""
        self._suspected: list[int] = []

    def start(self) -> None:
        """Start the thread. It takes over from the one that has published heartbeats since the start of the process."""
        if self.context.size > 1:
            self.context.stop_heartbeats()
            self._heartbeats.on_fenced = self._note_fence
            self._stop = self.context.runtime.start_periodic(self.heartbeat, self.read_failures, HEARTBEAT_S)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the thread and leave, after `error` as a failed rank. A second call does nothing."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
            self._note_failures(self.job.membership.cached)
            self._heartbeats.leave(error)

    def raise_if_fenced(self) -> None:
        """Raise PeerLost if this rank was declared failed, a rank has aborted the job or the store is lost.

        Call it before each step; it is cheap.
        """
        if self._stop is not None:
            self._heartbeats.raise_if_fenced()

    def heartbeat(self) -> None:
        """Publish one heartbeat, check those of the other ranks, and report failures and stalls."""
        metrics = self.latest()
        self._heartbeats.beat(
            {
                "phase": self.worker.phase,
                "step": self.worker.k,
                "time": time.time(),
                "latest": {key: metrics[key] for key in PUBLISHED if key in metrics},
            }
        )
        self._note_failures(self.job.membership.cached)
        self._note_suspicions(time.monotonic())
        self._check_for_stall(time.monotonic())

    def read_failures(self) -> None:
        """Read the failed ranks from the store."""
        self._note_failures(self.job.membership.failed_ranks())

    def _note_failures(self, failed: dict[int, str]) -> None:
        """Write new failures as events; the lowest live rank logs them."""
        for rank, why in failed.items():
            if rank not in self.failed:
                self.failed[rank] = why
                self.events.write("lost", lost=rank, why=why)
                if self.context.rank == min(self._live_ranks(), default=-1):
                    logger.warning("rank %d is lost: %s", rank, why)

    def _note_suspicions(self, now: float) -> None:
        """Write an event and log when exchanges with a live partner have failed for SUSPECT_S, and when they work again."""
        comm = self.worker.comm
        silent = [comm.ranks[peer] for peer in comm.silent_peers() if comm.ranks[peer] not in self.failed]
        self._silent = {rank: self._silent.get(rank, now) for rank in silent}
        suspected = sorted(rank for rank, since in self._silent.items() if now - since >= SUSPECT_S)
        if suspected == self._suspected:
            return
        self.events.write("suspected", suspected=suspected)
        for rank in sorted(set(suspected) - set(self._suspected)):
            logger.warning("no exchange with rank %d for %.0f s: its rounds are skipped; both ranks continue", rank, SUSPECT_S)
        for rank in sorted(set(self._suspected) - set(suspected) - set(self.failed)):
            logger.info("exchanges with rank %d work again", rank)
        self._suspected = suspected

    def _note_fence(self, reason: str) -> None:
        self.events.write("watchdog", error=f"this rank was declared failed: {reason}")
        logger.warning("this rank was declared failed by the other ranks: %s", reason)

    def _live_ranks(self) -> set[int]:
        return set(range(self.context.size)) - set(self.failed)

    def _peers(self) -> dict[int, dict[str, Any]]:
        """Return the last heartbeats of the other live ranks."""
        messages = self._heartbeats.messages
        return {r: json.loads(text) for r, text in messages.items() if r != self.context.rank and r not in self.failed}

    def metrics(self) -> list[dict[str, Any]]:
        """Return the latest metrics of the other live ranks, by rank."""
        return [{"rank": rank, **peer["latest"]} for rank, peer in sorted(self._peers().items()) if peer.get("latest")]

    def _check_for_stall(self, now: float) -> None:
        """Log which ranks hold up a collective, at most once per STALL_S. Only the lowest-numbered waiting rank does so."""
        since = self.worker.phase_since
        if self.worker.phase != "comm" or self.context.runtime.clock() - since < STALL_S or now - self._warned_at < STALL_S:
            return
        peers = self._peers()
        late = sorted(r for r, peer in peers.items() if peer.get("phase") != "comm" and not peer.get("left"))
        late = late or sorted(r for r in peers if peers[r].get("step", 0) == min(p.get("step", 0) for p in peers.values()))
        if late and self.context.rank == min(self._live_ranks() - set(late), default=-1):
            self._warned_at = now
            waited_s = self.context.runtime.clock() - since
            self.events.write("stall", waiting_for=late, waited_s=round(waited_s, 1))
            logger.warning(
                "waited %.0f s for %s. A rank without heartbeats is declared failed after %.0f s.",
                waited_s,
                "; ".join(f"rank {r} ({self._heartbeats.describe(r)})" for r in late),
                self._heartbeats.failure_s,
            )
