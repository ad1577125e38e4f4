"""The events of a run: one JSON object per line, appended by every learner to one file.

start        once per start or resume: what runs where, with which versions, and who averages with whom
steps        per learner, about once a second: steps, samples, samples/s, loss, rate, seconds by kind, staleness counts,
             exchanges, bytes
evaluation   held-out metrics of the average model, with the spread between learners it was made from
checkpoint   a checkpoint became complete
lost         a learner died;   stall    everybody waits for a rank;   summary   metrics of the whole run per learner
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
    """Appends events; a line is one write, so the lines of several processes do not mix."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self.rank = rank
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def now(self) -> float:
        """The time that events bear."""
        return time.time()

    def write(self, event: str, **metrics: Any) -> None:
        if self._fd >= 0:
            line = json.dumps({"event": event, "time": round(self.now(), 4), "rank": self.rank, **metrics})
            with suppress(OSError):  # a full disk: metrics are not worth a run; the next checkpoint says what to do
                os.write(self._fd, (line + "\n").encode())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file; a last line that was cut off by a crash is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


ALWAYS = {"event": "what kind it is", "time": "seconds since 1970", "rank": "who wrote it"}

# Every field of every event. The reference page of the documentation is made of this; a test holds real runs to it.
FIELDS: dict[str, dict[str, str]] = {
    "start": {
        "strategy": "by rank 0, whenever the run starts or resumes: its name",
        "learners": "how many",
        "hosts": "the machine of every learner",
        "parameters": "of the model",
        "batches": "samples per step of every learner; this and the next three only with a loop of ours",
        "first": "global samples at which it begins",
        "total": "global samples at which it ends",
        "samples": "of an epoch",
        "environment": "versions, processor, cores, memory, the command",
        "mixing": "who averages with whom, the mixing matrix, the spectral gap",
    },
    "steps": {
        "step": "steps of this learner in all (a resumed run goes on counting)",
        "steps": "steps since its last such event",
        "samples": "samples since",
        "samples_per_s": "of this learner",
        "loss": "mean training loss of its batches; null if it had none",
        "lr": "learning rate",
        "position": "global samples before its last step",
        "seconds": "by kind: data (waiting for the next batch), compute (forward and backward), update (writing a published "
        "w), comm (waiting for others), save, judge",
        "loader_s": "the part of data in which a claimed batch was not prepared yet",
        "elapsed_s": "wall seconds since",
        "cpu_s": "CPU seconds of the process, all its threads, in all; in virtual time: what its gradients took",
        "staleness": 'how many gradients were applied with which staleness, as {"0": 148, "1": 19}',
        "exchanges": "exchanges of its agent since",
        "bytes": "payload this learner has put on its backend since",
        "pair_distance": "only with exchanges: mean of |w_i - w_j| / |w_i| that they found, from a sample of elements",
        "exchange_s": "only with exchanges: mean seconds from entering a round to its end",
    },
    "evaluation": {
        "position": "global samples it belongs to",
        "metrics": "what the task's evaluate names, loss among them, as means",
        "final": "whether it is the model the run ends with",
        "seconds": "summed over the learners",
        "spread": "sqrt(mean |w_l - mean|^2) / |mean| of the checkpoint; not in the final one",
        "effective_rate": "mean of <g_l, g> / |g|^2; not in the final one, nor with one learner",
    },
    "checkpoint": {
        "position": "global samples it belongs to",
        "path": "its folder in ckpt/",
        "spread": "as in evaluation",
    },
    "lost": {"lost": "the rank that died", "why": "how it was noticed; written by every learner that hears of it"},
    "stall": {"waiting_for": "the ranks that everybody waits for", "waited_s": "so far"},
    "summary": {
        "steps": "per learner, at the end of its run",
        "samples": "in all",
        "exchanges": "in all",
        "bytes": "in all",
        "compute_s": "seconds by kind, likewise data_s, update_s, comm_s, save_s, eval_s",
        "data_s": "",
        "update_s": "",
        "comm_s": "",
        "save_s": "",
        "eval_s": "",
        "loader_s": "as in steps, in all",
        "elapsed_s": "wall seconds",
        "samples_per_s": "of this learner",
        "own_s": "compute, data and update",
        "waiting_s": "comm",
        "staleness_mean": "over its gradients",
        "staleness": "counts, as in steps",
    },
    "run": {
        "slowest_rank": "rank, own_s and waiting_s of the learner with the most seconds of its own",
        "metrics": "the final ones",
    },
    "watchdog": {"error": "the watchdog of that rank ended early because the store was gone"},
}
