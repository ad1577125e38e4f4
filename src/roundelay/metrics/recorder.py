"""Metrics of one learner, written to the run's events about once per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from roundelay.core.contracts import Communicator, EventWriter, Runtime
from roundelay.metrics.gaps import quantile, run_lengths
from roundelay.strategies.worker import Worker


class MetricsRecorder:
    """Count the steps of one learner and write a `steps` event every `every_s` seconds. For the learner's thread only.

    latest      fields of the last event; empty before the first one
    on_record   called with these fields after every event
    """

    def __init__(self, worker: Worker, job: Communicator, events: EventWriter, every_s: float, runtime: Runtime) -> None:
        self.worker, self.job, self.events, self.every_s, self.runtime = worker, job, events, every_s, runtime
        self.clock = runtime.clock
        self.samples = 0
        self.total: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.gaps: Counter[int] = Counter()
        self._steps = 0
        self._losses = (0.0, 0)
        self._since = self._began = self.clock()
        self._bytes = 0
        self.latest: dict[str, Any] = {}
        self.on_record: Callable[[dict[str, Any]], None] | None = None

    def start(self) -> None:
        """Start the clock of the run."""
        self._since = self._began = self.clock()

    def on_step(self) -> None:
        """Count one step; call it after every step."""
        self._steps += 1
        if self.worker.step_info.local_samples:
            self._losses = (self._losses[0] + self.worker.loss, self._losses[1] + 1)
        if self.clock() - self._since >= self.every_s:
            self.record()

    def record(self) -> None:
        """Write a `steps` event for the time since the previous one, unless nothing happened."""
        now = self.clock()
        worker, timer, elapsed = self.worker, self.worker.step_timer, max(now - self._since, 1e-9)
        if not self._steps and not timer.seconds:
            return
        gossip = worker.gossip_handle.pop_metrics() if worker.gossip_handle is not None else {}
        sent = self.job.bytes_sent() + (worker.comm.bytes_sent() if worker.comm is not self.job else 0)
        if worker.node is not None and worker.node is not worker.comm:
            sent += worker.node.bytes_sent()
        exchanges = gossip.get("exchanges", 0.0)
        self.latest = {
            "step": worker.k,
            "steps": self._steps,
            "samples": self.samples,
            "samples_per_s": round(self.samples / elapsed, 3),
            "loss": round(self._losses[0] / self._losses[1], 6) if self._losses[1] else None,
            "lr": worker.lr,
            "position": worker.step_info.position,
            "seconds": {kind: round(s, 5) for kind, s in timer.seconds.items() if kind != "loader"},  # part of data
            "loader_s": round(timer.seconds.get("loader", 0.0), 5),
            "elapsed_s": round(elapsed, 5),
            "cpu_s": round(self.runtime.cpu_s(), 4),
            "staleness": {str(k): v for k, v in sorted(timer.staleness.items())},
            "exchanges": int(exchanges),
            "bytes": sent - self._bytes,
        }
        if timer.gaps:
            self.latest["exchange_gaps"] = {str(k): v for k, v in sorted(timer.gaps.items())}
            self.latest["longest_gap"] = max(*timer.gaps, *self.gaps, 0)
        if exchanges:
            self.latest["pair_distance"] = gossip["distance"] / exchanges
            self.latest["exchange_s"] = round(gossip["exchange_s"] / exchanges, 6)
        self.events.write("steps", **self.latest)
        if self.on_record is not None:
            self.on_record(self.latest)
        self.total.update({f"{kind}_s": s for kind, s in timer.seconds.items()})
        self.total.update(steps=self._steps, samples=self.samples, exchanges=int(exchanges), bytes=sent - self._bytes)
        self.staleness.update(timer.staleness)
        self.gaps.update(timer.gaps)
        timer.seconds.clear()
        timer.staleness.clear()
        timer.gaps.clear()
        self._steps, self.samples, self._losses = 0, 0, (0.0, 0)
        self._since, self._bytes = now, sent

    def summary(self) -> dict[str, Any]:
        """Return the metrics of the whole run, as the `summary` event holds them."""
        elapsed = self.clock() - self._began
        updates = max(sum(self.staleness.values()), 1)
        own = sum(self.total[k] for k in ("compute_s", "data_s", "update_s"))
        fields = {
            **{k: round(v, 4) for k, v in self.total.items()},
            "elapsed_s": round(elapsed, 4),
            "samples_per_s": round(self.total["samples"] / max(elapsed, 1e-9), 3),
            "own_s": round(own, 4),
            "waiting_s": round(self.total["comm_s"], 4),
            "staleness_mean": round(sum(k * v for k, v in self.staleness.items()) / updates, 4),
            "staleness": {str(k): v for k, v in sorted(self.staleness.items())},
            "exchange_gaps": {str(k): v for k, v in sorted(self.gaps.items())},
        }
        if self.gaps:
            fields["exchanges_per_gradient"] = round(self.total["exchanges"] / sum(self.gaps.values()), 4)
            fields["longest_gap"] = max(self.gaps)
            fields["gap_p99"] = quantile(run_lengths(self.gaps), 0.99)
        return fields
