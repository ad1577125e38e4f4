"""Who is still there, and whom everybody waits for.

Every learner shows a sign of life about once a second: what it is doing and since when. A rank whose sign has not changed
for LOST_S is reported as lost; a watchdog that was itself held up (a crowded machine, a sleeping laptop) has no right to
judge, and gives the others their time anew. Where learners wait in a rendezvous for long, the first living rank says for whom.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from roundelay.core.contracts import EventWriter
from roundelay.launch.context import DistributedContext
from roundelay.strategies.worker import Worker

HEARTBEAT_S = 0.5
LOST_S = 6.0
FROZEN_S = 2.0
STALL_S = 10.0
SHOWN = ("steps", "samples", "samples_per_s", "loss", "lr", "seconds", "elapsed_s", "staleness", "pair_distance")


def shown(last: dict[str, Any]) -> dict[str, Any]:
    """The part of a learner's metrics that goes with its sign of life, to be seen by whoever watches."""
    return {key: last[key] for key in SHOWN if key in last}


class HeartbeatMonitor:
    """A thread beside the learner; it only reads, reports and warns."""

    def __init__(
        self,
        worker: Worker,
        job: Any,
        context: DistributedContext,
        events: EventWriter,
        timeout_s: float,
        last: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.worker, self.job, self.context, self.events, self.timeout_s = worker, job, context, events, timeout_s
        self.last = last
        self.dead: dict[int, str] = {}
        self._end: Callable[[], None] | None = None
        self._seen: dict[int, tuple[str, float]] = {}
        self._warned_at = 0.0
        self._looked = time.monotonic()
        self._blind = self._left = False

    def start(self) -> None:
        if self.context.size > 1:
            self._end = self.context.runtime.start_periodic(self._look, self.hear, HEARTBEAT_S)

    def stop(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            self._left = True
            if not self._blind:
                self.job.store.set(f"beat/{self.context.rank}", json.dumps({"left": True}))
            end()

    def _look(self) -> None:
        if self._blind or self._left:
            return
        try:
            self.beat()
        except Exception as error:  # the store is gone: the job is ending, and the learner finds out by itself
            self._blind = True
            self.events.write("watchdog", error=str(error).splitlines()[0])

    def beat(self) -> None:
        """One sign of life, and one look at the others'."""
        store, now = self.job.store, time.monotonic()
        if now - self._looked > FROZEN_S:  # who was asleep (a suspended or crowded machine) cannot say that others were silent
            self._seen = {rank: (sign, now) for rank, (sign, _) in self._seen.items()}
        self._looked = now
        phase, step = self.worker.phase, self.worker.k
        store.set(
            f"beat/{self.context.rank}",
            json.dumps({"phase": phase, "step": step, "beat": time.time(), "last": shown(self.last())}),
        )
        for rank in range(self.context.size):
            if rank == self.context.rank or rank in self.dead:
                continue
            sign = store.get(f"beat/{rank}")
            if sign is not None and (rank not in self._seen or self._seen[rank][0] != sign):
                self._seen[rank] = (sign, now)
            elif rank in self._seen and now - self._seen[rank][1] > LOST_S and not json.loads(sign or "{}").get("left"):
                self.job.membership.report(rank, f"no sign of life for {LOST_S:.0f} s; its last: {self._describe(rank)}")
        self.hear()
        self._look_for_a_stall(now)

    def hear(self) -> None:
        """Takes note of who has been reported dead."""
        for rank, why in self.job.membership.failed_ranks().items():
            if rank not in self.dead:
                self.dead[rank] = why
                self.events.write("lost", lost=rank, why=why)
                if self.context.rank == min(set(range(self.context.size)) - set(self.dead), default=-1):
                    print(f"roundelay: rank {rank} is lost: {why}", file=sys.stderr, flush=True)

    def metrics(self) -> list[dict[str, Any]]:
        """What the others that are alive wrote last, as their signs of life say."""
        signs = {rank: json.loads(sign) for rank, (sign, _) in list(self._seen.items()) if rank not in self.dead}
        return [{"rank": rank, **said["last"]} for rank, said in sorted(signs.items()) if said.get("last")]

    def _describe(self, rank: int) -> str:
        said = json.loads(self._seen[rank][0]) if rank in self._seen else {}
        return f"{said.get('phase', 'unknown')} in step {said.get('step', '?')}"

    def _look_for_a_stall(self, now: float) -> None:
        """Everybody but a few sits in communication: name those few."""
        since = self.worker.phase_since
        if self.worker.phase != "comm" or self.context.runtime.clock() - since < STALL_S or now - self._warned_at < STALL_S:
            return
        others = {r: json.loads(sign) for r, (sign, _) in self._seen.items() if r not in self.dead}
        late = sorted(r for r, said in others.items() if said.get("phase") != "comm" and not said.get("left"))
        late = late or sorted(r for r in others if others[r].get("step", 0) == min(o.get("step", 0) for o in others.values()))
        if late and self.context.rank == min(set(range(self.context.size)) - set(self.dead) - set(late), default=-1):
            self._warned_at = now
            named = "; ".join(f"rank {r}: {self._describe(r)}" for r in late)
            self.events.write("stall", waiting_for=late, waited_s=round(self.context.runtime.clock() - since, 1))
            print(
                f"roundelay: everybody has waited {self.context.runtime.clock() - since:.0f} s for {named}. "
                f"The run stops at timeout_s={self.timeout_s:.0f} and can be resumed.",
                file=sys.stderr,
                flush=True,
            )
