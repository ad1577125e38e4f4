"""Checks of a run's settings and of its run directory, before training starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import slowdown
from roundelay.errors import UsageError
from roundelay.fleet.vote import gather, vote
from roundelay.launch.context import DistributedContext

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
    if config.resume not in ("no", "auto", "best") and not Path(config.resume).is_dir():
        raise UsageError(
            f"there is no checkpoint at {config.resume}", where="resume", hint="set resume=auto, or the path of a checkpoint"
        )
    if config.record_order and (has_checkpoints or config.resume not in ("no", "auto")):
        raise UsageError(
            "a resumed run cannot be recorded",
            where=f"record_order=true, resume={config.resume}",
            hint="set record_order=false, or start from the beginning with another run=…",
        )


def check_shared_directory(run: Path, context: DistributedContext, job: Any, timeout_s: float) -> None:
    """Raise the same error on all ranks unless all of them see the run directory of rank 0. Collective; blocks until a vote."""
    store, membership, rank, clock = job.store, job.membership, context.rank, context.runtime.clock
    path = run / ".token"
    if rank == 0:
        path.write_text(text := str(time.time_ns()))
        store.set("run-token/0", text)
    token = gather(store, "run-token/", [0], rank, membership, timeout_s, doing="start of the run", clock=clock)[0]
    try:
        visible = path.read_text() == token
    except OSError:
        visible = False
    error = UsageError(
        f"the run directory of rank 0 is not visible to rank {rank}",
        where=f"rank {rank} on {context.hosts[rank]}, run={run}",
        hint="put the run directory on a disk that all machines share",
    )
    vote(store, "run-directory", rank, context.size, None if visible else error, membership, timeout_s, clock=clock)
