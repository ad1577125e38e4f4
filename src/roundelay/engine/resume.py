"""Resume a run: rank 0 chooses the checkpoint, and all ranks restore that one or none.

Rank 0 claims its choice in the store, with the checksum of the manifest: a read error or an outdated folder listing on another
rank must not send that rank to another checkpoint. A vote follows. Checkpoints of later positions belong to a continuation that
the run leaves; rank 0 then renames them to abandoned-samples-…, so that they are neither resumed from nor counted or deleted.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from roundelay.engine.checkpoint import Checkpoints
from roundelay.engine.manifest import BEST, best, folder_name, latest, read_best, read_manifest, verify
from roundelay.engine.sharding import Span
from roundelay.errors import DataError, RoundelayError
from roundelay.fleet.vote import gather, refuse, vote

CHOICE = "resume/"
VOTE = "resume"
READ_S = 600.0
"""Time in which a rank must have read the checkpoint, if that is more than timeout_s: all its files are verified."""
ABANDONED = "abandoned-"
"""Prefix of the folders of checkpoints later than the one that a run was resumed from."""
HINT = "check that all machines see the same run directory, then set resume=auto again"


def resume(setting: str, checkpoints: Checkpoints, timeout_s: float, log: logging.Logger) -> tuple[int, list[Span]]:
    """Restore the checkpoint that the setting `resume` names; return its position and the ranges before it that are not done.

    Collective; blocks until all ranks have read the checkpoint. Returns (0, []) if resume=auto finds none. Raises the same
    error on all ranks if rank 0 finds no usable checkpoint, or if a rank cannot read the one that rank 0 has chosen.
    """
    context = checkpoints.learner.context
    job: Any = checkpoints.learner.job
    rank, store, clock, limit_s = context.rank, job.store, context.runtime.clock, max(timeout_s, READ_S)
    if rank == 0:
        try:
            path = choose(setting, checkpoints.folder, log)
            choice = None if path is None else {"path": str(path), "sha256": read_manifest(path)["sha256"]}
        except RoundelayError as error:
            raise refuse(store, VOTE, error) from error
        store.claim(f"{CHOICE}0", json.dumps(choice))
    texts = gather(store, CHOICE, [0], rank, job.membership, limit_s, doing="resume", vote_name=VOTE, clock=clock)
    if (choice := json.loads(texts[0])) is None:
        log.info("no checkpoint yet: starting from the beginning")
        return 0, []
    path, failure = Path(choice["path"]), None
    first, missing_ranges = 0, list[Span]()
    try:
        if read_manifest(path)["sha256"] != choice["sha256"]:
            raise DataError("the checkpoint must be the one that rank 0 reads (got another one)", where=str(path), hint=HINT)
        first, missing_ranges = checkpoints.restore(path)
    except RoundelayError as error:
        failure = error if rank == 0 else _on_another_rank(error, path, rank, context.hosts[rank])
    vote(store, VOTE, rank, context.size, failure, job.membership, limit_s, clock=clock)
    if rank == 0:
        set_later_aside(checkpoints.folder, path, log)
    log.info(f"resuming from {path.name}: {first} samples are done")
    return first, missing_ranges


def choose(setting: str, folder: Path, log: logging.Logger) -> Path | None:
    """Return the intact checkpoint that the setting `resume` names, or None. Raises DataError if it is damaged or missing."""
    if setting == "auto":
        return latest(folder, log.warning)
    path = best(folder) if setting == "best" else Path(setting)
    verify(path)
    return path


def _on_another_rank(error: RoundelayError, path: Path, rank: int, host: str) -> DataError:
    where = error.where if str(path) in error.where else f"{path}, {error.where}"
    return DataError(error.message, where=f"rank {rank} on {host}, {where}", hint=HINT)


def set_later_aside(folder: Path, chosen: Path, log: logging.Logger) -> None:
    """Rename the checkpoints in `folder` that are later than `chosen`, and best.json if it names one of them. On one rank.

    Raises DataError if they cannot be renamed: the next resume=auto would take the latest of them.
    """
    name = folder_name(read_manifest(chosen)["position"])
    continues = chosen.name == name and chosen.resolve().parent == folder.resolve()
    later = sorted(
        path
        for path in folder.glob("samples-*")
        if path.is_dir() and (path.name > name or (path.name == name and not continues))
    )
    if not later:
        return
    note = read_best(folder)
    names = [path.name for path in later]
    try:
        if note is not None and folder_name(note["position"]) in names:
            _set_aside(folder / BEST)
        for path in later:
            _set_aside(path)
    except OSError as error:
        raise DataError(
            f"renaming the later checkpoints failed: {error.strerror}",
            where=str(folder),
            hint=f"move the checkpoints after {name} to another folder",
        ) from error
    log.info(f"{', '.join(names)}: later than {chosen.name}, renamed to {ABANDONED}…")


def _set_aside(path: Path) -> None:
    """Rename a file or folder to `abandoned-` and its name, or with a number if that exists."""
    target, number = path.with_name(f"{ABANDONED}{path.name}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{ABANDONED}{number}-{path.name}")
    path.rename(target)
