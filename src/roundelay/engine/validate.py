"""Checks of a run's settings against its run directory, before anything is written."""

from __future__ import annotations

from pathlib import Path

from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import slowdown
from roundelay.errors import UsageError

CHECKPOINT_FOLDER = "ckpt"


def validate_run(config: TrainConfig, size: int) -> None:
    """Raise a UsageError if the run directory or the settings exclude this run. Nothing is written."""
    slowdown(config.straggler, size, 0)
    if config.run_dir is None:
        if config.resume != "no":
            raise UsageError("resume needs a run directory", where=f"resume={config.resume}", hint="set run=DIR")
        if config.record_order:
            raise UsageError("record_order needs a run directory", where="record_order=true", hint="set run=DIR")
        return
    has_checkpoints = any((config.run_dir / CHECKPOINT_FOLDER).glob("samples-*"))
    if config.resume == "no" and has_checkpoints:
        raise UsageError(
            "the run directory already contains checkpoints",
            where=f"run={config.run}",
            hint="set resume=auto to continue from the latest one, or choose another run=…",
        )
    if config.resume not in ("no", "auto") and not Path(config.resume).is_dir():
        raise UsageError(
            f"there is no checkpoint at {config.resume}", where="resume", hint="set resume=auto, or the path of a checkpoint"
        )
    if config.record_order and (has_checkpoints or config.resume not in ("no", "auto")):
        raise UsageError(
            "a resumed run cannot be recorded",
            where=f"record_order=true, resume={config.resume}",
            hint="set record_order=false, or start from the beginning with another run=…",
        )
