"""TensorBoard files of a run, in `tensorboard/` of its directory. All scalars are plotted against global samples.

    train/loss  train/lr        of the learner that writes      valid/NAME        evaluation metrics of the average model
    time/KIND                   its time by kind, as fractions  spread/…          distance between the learners' models
    speed/samples_per_s         of all learners together        staleness/mean    mean staleness of its gradients

The lowest live rank writes whenever it writes its events. TensorBoard is an optional dependency: without it a warning is logged
once and nothing is written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundelay.engine.learner import Learner

FOLDER = "tensorboard"
FLUSH_S = 10

logger = logging.getLogger(__name__)


@cache
def summary_writer_class() -> Any:
    """Import and return torch's SummaryWriter; None, after one warning, if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("TensorBoard files are not written: install roundelay[tensorboard], or set tensorboard=false")
        return None
    _report_write_errors_briefly()
    return SummaryWriter


def _report_write_errors_briefly() -> None:
    """Replace the traceback of TensorBoard's writer thread by a warning: a full disk ends these files, not the run."""
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard."):
            logger.warning("TensorBoard files are no longer written: %s", args.exc_value)
        else:
            previous(args)

    threading.excepthook = hook


class ScalarWriter:
    """Write scalars to one TensorBoard file, opened by `open` or the first scalar. Without a folder, do nothing.

    first   global samples at which this run starts; later records of an earlier run in the same folder are hidden
    now     returns the time stamped on records; virtual time in a simulation
    """

    def __init__(self, folder: Path | None, first: int = 0, now: Callable[[], float] = time.time) -> None:
        self._folder, self._first, self._now = folder, first, now
        self._writer: Any = None

    def open(self) -> None:
        """Import TensorBoard and create the file. It takes about a second, so call it before training starts."""
        if self._folder is None or self._writer is not None:
            return
        summary_writer = summary_writer_class()
        if summary_writer is None:
            self._folder = None
            return
        self._writer = summary_writer(str(self._folder), purge_step=self._first, flush_secs=FLUSH_S)

    def scalars(self, position: int, values: Mapping[str, float | None]) -> None:
        """Write the values that are not None at `position` global samples. A disk that is full ends the file silently."""
        scalars = {tag: float(value) for tag, value in values.items() if value is not None}
        if self._folder is None or not scalars:
            return
        self.open()
        if self._writer is None:
            return
        walltime = self._now()
        try:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, position, walltime=walltime)
        except OSError:
            self.close()

    def close(self) -> None:
        """Flush and close the file. Later scalars are dropped."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
        self._writer = self._folder = None


class TensorBoardLogger:
    """Write one learner's metrics while it is the lowest live rank."""

    def __init__(self, learner: Learner, folder: Path | None) -> None:
        self._learner, self._folder, self._clock = learner, folder, learner.context.runtime.clock
        self._writer: ScalarWriter | None = None
        self._previous: tuple[float, int] | None = None

    def start(self, first: int) -> None:
        """Subscribe to the learner's metrics. `first`: global samples at which the run starts."""
        if self._folder is None:
            return
        self._writer = ScalarWriter(self._folder, first, self._learner.events.now)
        self._previous = (self._clock(), first)
        self._learner.recorder.on_record = self.record
        if self._learner.rank == 0:
            self._writer.open()

    def _is_lowest_live_rank(self) -> bool:
        return self._learner.rank == min(self._learner.job.live_ranks())

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of one `steps` event."""
        current = (self._clock(), self._learner.position)
        previous, self._previous = self._previous, current
        if self._writer is None or previous is None or not self._is_lowest_live_rank():
            return
        elapsed, staleness = max(metrics["elapsed_s"], 1e-9), metrics["staleness"]
        updates = sum(staleness.values())
        self._writer.scalars(
            current[1],
            {
                "train/loss": metrics["loss"],
                "train/lr": metrics["lr"],
                "speed/samples_per_s": max(current[1] - previous[1], 0) / max(current[0] - previous[0], 1e-9),
                **{f"time/{kind}": metrics["seconds"].get(kind, 0.0) / elapsed for kind in ("data", "compute", "comm")},
                "staleness/mean": sum(int(k) * v for k, v in staleness.items()) / updates if updates else None,
                "spread/pair_distance": metrics.get("pair_distance"),
            },
        )

    def on_evaluation(self, result: Mapping[str, Any]) -> None:
        """Write the metrics of one `evaluation` event."""
        if self._writer is not None and self._is_lowest_live_rank():
            values = {f"valid/{name}": value for name, value in result["metrics"].items()}
            spread = {"spread/learners": result.get("spread"), "spread/effective_rate": result.get("effective_rate")}
            self._writer.scalars(result["position"], values | spread)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
