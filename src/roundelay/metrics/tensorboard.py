"""TensorBoard files of a run, in `tensorboard/` of its directory: the run's metrics against global samples.

    train/loss  train/lr        of the writing learner        valid/NAME    every held-out figure of the average model
    time/KIND                     share of its time by kind     spread/…      how far apart the learners are
    speed/samples_per_s           of all learners together      staleness/mean

The first living learner writes, whenever it writes its events. The records are tensorboard's own, written without its
file system layer: that one would import tensorflow where it is installed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundelay.engine.learner import Learner

FOLDER = "tensorboard"


class ScalarWriter:
    """A file of scalars; opened at the first one. Nothing is written without a folder."""

    def __init__(self, folder: Path | None, first: int = 0, now: Callable[[], float] = time.time) -> None:
        self._folder, self._first, self._now = folder, first, now
        self._writer: Any = None
        self._file: Any = None

    def open(self) -> None:
        """Also imports what writing takes: half a second that should not fall into training."""
        if self._folder is None or self._writer is not None:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self._folder / name, "ab", buffering=1 << 16)  # noqa: SIM115 - open as long as the run
        self._writer = RecordWriter(self._file)
        self._write(Event(wall_time=self._now(), file_version="brain.Event:2"))
        # what an earlier run wrote beyond the checkpoint that this one goes on from is not shown
        self._write(Event(wall_time=self._now(), step=self._first, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def scalars(self, position: int, values: Mapping[str, float | None]) -> None:
        """Metrics at this many global samples, now."""
        known = {tag: float(value) for tag, value in values.items() if value is not None}
        if self._folder is None or not known:
            return
        self.open()
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()])
        with suppress(OSError):  # a full disk stops the metrics, not the run
            self._write(Event(wall_time=self._now(), step=position, summary=summary))
            self._file.flush()

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None
            self._folder = None


class TensorBoardLogger:
    """Puts one learner's metrics on the board while it is the first of the living."""

    def __init__(self, learner: Learner, folder: Path | None) -> None:
        self._learner, self._folder, self._clock = learner, folder, learner.context.runtime.clock
        self._board: ScalarWriter | None = None
        self._before: tuple[float, int] | None = None

    def start(self, first: int) -> None:
        """`first`: the global samples that the run begins at."""
        if self._folder is None:
            return
        self._board = ScalarWriter(self._folder, first, self._learner.events.now)
        self._before = (self._clock(), first)
        self._learner.recorder.on_record = self.record
        if self._learner.rank == 0:
            self._board.open()

    def _writes(self) -> bool:
        return self._board is not None and self._learner.rank == min(self._learner.job.live_ranks())

    def record(self, metrics: Mapping[str, Any]) -> None:
        """What a learner has just written to the events."""
        now = (self._clock(), self._learner.position)
        before, self._before = self._before, now
        if self._board is None or before is None or not self._writes():
            return
        elapsed, stale = max(metrics["elapsed_s"], 1e-9), metrics["staleness"]
        updates = sum(stale.values())
        self._board.scalars(
            now[1],
            {
                "train/loss": metrics["loss"],
                "train/lr": metrics["lr"],
                "speed/samples_per_s": max(now[1] - before[1], 0) / max(now[0] - before[0], 1e-9),
                **{f"time/{kind}": metrics["seconds"].get(kind, 0.0) / elapsed for kind in ("data", "compute", "comm")},
                "staleness/mean": sum(int(k) * v for k, v in stale.items()) / updates if updates else None,
                "spread/pair_distance": metrics.get("pair_distance"),
            },
        )

    def on_evaluation(self, result: Mapping[str, Any]) -> None:
        """An evaluation of the average model."""
        if self._board is not None and self._writes():
            values = {f"valid/{name}": value for name, value in result["metrics"].items()}
            more = {"spread/learners": result.get("spread"), "spread/effective_rate": result.get("effective_rate")}
            self._board.scalars(result["position"], values | more)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
