"""The record of a run, read back: what every learner did, and the order of events around every vector."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from roundelay.core.update_log import FIELDS, FOLDER, Op
from roundelay.errors import DataError
from roundelay.strategies.step import StepInfo

AGAIN = "record the run again: roundelay train … record=true"


class LogEntry(NamedTuple):
    """One event of one vector's update_log."""

    kind: Op
    actor: int
    round: int


class StepRecord(NamedTuple):
    """The data of one step of one learner."""

    epoch: int
    start: int
    stop: int
    step_info: StepInfo


@dataclass(frozen=True)
class RunLog:
    """Everything that timing has decided in a run."""

    card: dict[str, Any]
    steps: list[list[StepRecord]]
    """By rank of the job."""
    orders: list[list[LogEntry]]
    """By vector: by rank among those who publish one."""
    last: list[Tensor]
    """What every vector was when it went into the closing average."""

    @property
    def events(self) -> int:
        return sum(map(len, self.orders))


def read_run_log(run: Path) -> RunLog:
    """The record in a run directory; one that is not whole is an error."""
    folder = run / FOLDER
    if not folder.is_dir():
        raise DataError("this run has no record", where=str(run), hint="train with record=true to get one")
    card = _card(folder, 0)
    size, total = int(card["size"]), int(card["total"])
    steps: list[list[StepRecord]] = []
    notes: list[np.ndarray] = []
    for rank in range(size):
        other = _card(folder, rank)
        for key in ("size", "settings", "parameters", "total"):
            if other[key] != card[key]:
                raise DataError(
                    f"the records of rank 0 and rank {rank} belong to different runs: {key} differs",
                    where=str(folder),
                    hint=AGAIN,
                )
        found = _read(folder / f"rank-{rank:03d}.bin")
        is_step = found[:, 0] == Op.STEP
        steps.append(
            [
                StepRecord(int(r[1]), int(r[2]), int(r[3]), StepInfo(int(r[4]), int(r[5]), int(r[6]), int(r[7]), total))
                for r in found[is_step]
            ]
        )
        notes.append(found[~is_step])
    return RunLog(card, steps, _orders(np.concatenate(notes), folder), _last(folder, card))


def _card(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank-{rank:03d}.json"
    try:
        card: dict[str, Any] = json.loads(path.read_text())
        complete = card["complete"] and card["format"] == 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the record of rank {rank} is missing or broken", where=str(path), hint=AGAIN) from error
    if not complete:
        raise DataError(f"the record of rank {rank} is cut off: the run did not come to its end", where=str(path), hint=AGAIN)
    return card


def _read(path: Path) -> np.ndarray:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"the record cannot be read: {error.strerror}", where=str(path), hint=AGAIN) from error
    if len(data) % (8 * FIELDS):
        raise DataError("the record is cut off in the middle of an event", where=str(path), hint=AGAIN)
    found = np.frombuffer(data, dtype="<i8").reshape(-1, FIELDS)
    if not np.isin(found[:, 0], [int(k) for k in Op]).all():
        raise DataError("the record holds an event of an unknown kind", where=str(path), hint=AGAIN)
    return found


def _orders(notes: np.ndarray, folder: Path) -> list[list[LogEntry]]:
    """Every vector's events by their numbers, which must run from 1 without a gap and end in its LAST."""
    orders: list[list[LogEntry]] = []
    for vector in range(int(notes[:, 1].max()) + 1 if len(notes) else 0):
        mine = notes[notes[:, 1] == vector]
        mine = mine[np.argsort(mine[:, 2], kind="stable")]
        gaps = np.flatnonzero(mine[:, 2] != np.arange(1, len(mine) + 1))
        if len(gaps) or not len(mine) or not (mine[:, 0] == Op.FINAL_READ).any():
            missing = int(gaps[0]) + 1 if len(gaps) else len(mine) + 1
            raise DataError(
                f"the record is cut off: event {missing} of vector {vector} is missing", where=str(folder), hint=AGAIN
            )
        orders.append([LogEntry(Op(int(r[0])), int(r[3]), int(r[4])) for r in mine])
    return orders


def _last(folder: Path, card: dict[str, Any]) -> list[Tensor]:
    found = []
    for rank in card["leaders"]:
        path = folder / f"rank-{rank:03d}.safetensors"
        try:
            found.append(load_file(str(path))["w"])
        except (OSError, KeyError, SafetensorError) as error:
            raise DataError(f"the last weights of rank {rank} are missing or broken", where=str(path), hint=AGAIN) from error
    return found
