"""Events of a run: one JSON object per line, appended by all ranks to one file, `events.jsonl` of the run directory.

`FIELDS` describes every event and every field. The reference page is generated from it, and a test compares real runs with it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


class EventLog:
    """Append events to a file. Each line is one write, so lines of several processes do not interleave."""

    def __init__(self, path: Path | None, rank: int) -> None:
        """Open the file; without a path, `write` does nothing."""
        self.rank = rank
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def now(self) -> float:
        """Return the time stamped on events."""
        return time.time()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Write errors such as a full disk are ignored; the next checkpoint reports them."""
        if self._fd >= 0:
            line = json.dumps({"event": event, "time": round(self.now(), 4), "rank": self.rank, **fields})
            with suppress(OSError):
                os.write(self._fd, (line + "\n").encode())

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # first: a thread that still writes must not reach a file that gets the same number
        if fd >= 0:
            os.close(fd)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file. Lines that are not JSON objects, such as the last one after a crash, are skipped."""
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


ALWAYS = {
    "event": "name of the event",
    "time": "seconds since 1970; in a simulation, virtual seconds",
    "rank": "rank that wrote the event",
}

FIELDS: dict[str, dict[str, str]] = {
    "start": {
        "strategy": "name of the strategy; rank 0 writes this event at every start and resume",
        "learners": "number of learners",
        "hosts": "host name of every learner, by rank",
        "parameters": "number of trainable parameters",
        "batches": "samples per step of every learner, by rank; not written by a Session",
        "first": "global samples done before this start; not written by a Session",
        "total": "global samples at which the run ends; not written by a Session",
        "samples": "samples in one epoch; not written by a Session",
        "environment": "versions, processor, cores, memory, command and folder of rank 0",
        "mixing": "which learners average with each other: kind, mixing matrix, spectral gap",
    },
    "steps": {
        "step": "steps of this learner since the run began; a resumed run continues the count",
        "steps": "steps since this learner's previous steps event",
        "samples": "samples since the previous steps event",
        "samples_per_s": "samples per second of this learner since the previous steps event",
        "loss": "mean training loss of the batches since the previous steps event; null if there were none",
        "lr": "learning rate",
        "position": "global samples before the learner's latest step",
        "seconds": "seconds by kind since the previous steps event: data (waiting for a batch), compute (forward, backward), "
        "update (writing shared weights), comm (waiting for other ranks), save (checkpoints), eval (evaluation)",
        "loader_s": "seconds of data during which a leased batch was not prepared yet",
        "elapsed_s": "wall-clock seconds since the previous steps event",
        "cpu_s": "CPU seconds of the process and all its threads since it began; in a simulation, seconds of its gradients",
        "staleness": 'number of gradients per staleness since the previous steps event, such as {"0": 148, "1": 19}',
        "exchanges": "gossip exchanges since the previous steps event",
        "bytes": "payload bytes this learner sent since the previous steps event",
        "pair_distance": "mean of |w_i - w_j| / |w_i| over the exchanges, from a sample of elements; absent without exchanges",
        "exchange_s": "mean seconds from the start of an exchange to its end; absent without exchanges",
        "exchange_gaps": "number of steps by the gradients in a row without an exchange that end with them, such as "
        '{"0": 148, "1": 19}; absent without gossip',
        "longest_gap": "most gradients in a row without an exchange, since this process began; absent without gossip",
    },
    "evaluation": {
        "position": "global samples at which the average model was taken",
        "metrics": "means of the metrics that the task's evaluate returns, by name; loss is one of them",
        "final": "true for the evaluation at the end of the run",
        "seconds": "seconds of evaluation, summed over the learners",
        "spread": "sqrt(mean |w_l - mean|^2) / |mean| of the checkpoint; absent in the final evaluation",
        "effective_rate": "mean of <g_l, g> / |g|^2 over the learners; absent in the final evaluation and with one learner",
    },
    "checkpoint": {
        "position": "global samples at which the checkpoint was taken",
        "path": "folder of the checkpoint inside ckpt/",
        "spread": "sqrt(mean |w_l - mean|^2) / |mean| of the learners' weights",
    },
    "lost": {
        "lost": "rank that failed",
        "why": "how the failure was detected; every surviving learner writes this event",
    },
    "suspected": {
        "suspected": "live ranks with which this rank's exchanges fail at the moment; written when the list changes",
    },
    "stall": {
        "waiting_for": "ranks that the other ranks wait for",
        "waited_s": "seconds the writing rank had waited when it wrote the event",
    },
    "summary": {
        "steps": "steps of this learner in this run",
        "samples": "samples of this learner in this run",
        "exchanges": "gossip exchanges of this learner in this run",
        "bytes": "payload bytes this learner sent in this run",
        "compute_s": "seconds of forward and backward passes",
        "data_s": "seconds of waiting for batches",
        "update_s": "seconds of writing shared weights",
        "comm_s": "seconds of waiting for other ranks",
        "save_s": "seconds of writing checkpoints",
        "eval_s": "seconds of evaluation",
        "loader_s": "seconds of data_s during which a leased batch was not prepared yet",
        "elapsed_s": "wall-clock seconds of the run",
        "samples_per_s": "samples per second of this learner over the run",
        "own_s": "sum of compute_s, data_s and update_s",
        "waiting_s": "same as comm_s",
        "staleness_mean": "mean staleness of this learner's gradients",
        "staleness": "number of gradients per staleness over the run",
        "exchange_gaps": "number of steps by the gradients in a row without an exchange, over the run",
        "exchanges_per_gradient": "exchanges divided by steps; absent without gossip",
        "longest_gap": "most gradients in a row without an exchange; absent without gossip",
        "gap_p99": "99 % of the runs of gradients without an exchange are at most this long, counting a run of length 0 where "
        "an exchange follows every gradient; absent without gossip",
    },
    "run": {
        "slowest_rank": "rank, own_s and waiting_s of the learner with the largest own_s per step",
        "metrics": "metrics of the final evaluation",
    },
    "watchdog": {"error": "why this rank was declared failed by the other ranks, after which it leaves"},
}
"""Description of every field of every event."""
