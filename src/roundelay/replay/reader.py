"""Read the recorded order of a run: the steps of every learner, and the operations on every shared vector."""

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
from roundelay.errors import DataError, reading
from roundelay.strategies.step import StepInfo

RECORD_AGAIN = "record the run again: roundelay train … record_order=true"


class LogEntry(NamedTuple):
    """One operation on a shared vector."""

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
    """Everything in a run that depended on timing."""

    card: dict[str, Any]
    steps: list[list[StepRecord]]
    """Steps by rank of the job."""
    orders: list[list[LogEntry]]
    """Operations by vector; vectors are numbered by rank among the ranks that share one."""
    last: list[Tensor]
    """Every vector as it entered the final average."""

    @property
    def events(self) -> int:
        return sum(map(len, self.orders))


def read_run_log(run: Path) -> RunLog:
    """Read the log in a run directory. Raises DataError if it is missing, incomplete or inconsistent."""
    folder = run / FOLDER
    if not folder.is_dir():
        raise DataError("the run has no recorded order", where=str(run), hint="train with record_order=true")
    with reading("the recorded order", folder, RECORD_AGAIN):
        return _read_run_log(folder)


def _read_run_log(folder: Path) -> RunLog:
    card = _card(folder, 0)
    _check_card(card, folder)
    size, total = int(card["size"]), int(card["total"])
    steps: list[list[StepRecord]] = []
    entries: list[np.ndarray] = []
    for rank in range(size):
        other = _card(folder, rank)
        for key in ("size", "settings", "parameters", "total"):
            if other[key] != card[key]:
                raise DataError(
                    f"the logs of rank 0 and rank {rank} belong to different runs: {key} differs",
                    where=str(folder),
                    hint=RECORD_AGAIN,
                )
        rows = _read(folder / f"rank-{rank:03d}.bin")
        is_step = rows[:, 0] == Op.STEP
        steps.append(
            [
                StepRecord(int(r[1]), int(r[2]), int(r[3]), StepInfo(int(r[4]), int(r[5]), int(r[6]), int(r[7]), total))
                for r in rows[is_step]
            ]
        )
        entries.append(rows[~is_step])
    log = RunLog(card, steps, _orders(np.concatenate(entries), folder), _last(folder, card))
    _check_ranges(log)
    return log


def _check_ranges(log: RunLog) -> None:
    """Raise ValueError if a step refers to samples, or an operation to a vector, that the run did not have."""
    for step in (step for steps in log.steps for step in steps):
        if step.epoch < 0 or not 0 <= step.start <= step.stop <= log.card["samples"]:
            raise ValueError(f"a step has the samples {step.start} to {step.stop} of epoch {step.epoch}")
    for actor in {entry.actor for order in log.orders for entry in order}:
        if not 0 <= actor < len(log.orders):
            raise ValueError(f"an operation has the actor {actor} of {len(log.orders)}")


def _card(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank-{rank:03d}.json"
    try:
        card: dict[str, Any] = json.loads(path.read_text())
        complete = card["complete"] and card["format"] == 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the log of rank {rank} is missing or broken", where=str(path), hint=RECORD_AGAIN) from error
    if not complete:
        raise DataError(
            f"the log of rank {rank} is incomplete: the run did not end normally", where=str(path), hint=RECORD_AGAIN
        )
    return card


MAX_RANKS = 100_000
COUNTS = ("size", "total", "parameters", "samples", "threads")


def _check_card(card: dict[str, Any], folder: Path) -> None:
    """Raise DataError if a field of rank 0's card has a wrong type or an impossible value."""
    size, leaders, machines = card.get("size"), card.get("leaders"), card.get("machines")
    batches, threads = card.get("batches"), card.get("threads")
    counts = [card.get(key) for key in COUNTS]
    valid = (
        all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 62 for n in counts)
        and isinstance(size, int) and size <= MAX_RANKS
        and isinstance(threads, int) and threads <= 4096
        and isinstance(leaders, list) and len(leaders) > 0 and all(r in range(size) for r in leaders)
        and len(set(leaders)) == len(leaders)
        and isinstance(machines, list) and len(machines) == size
        and isinstance(batches, list) and all(isinstance(b, int) and 0 <= b < 1 << 62 for b in batches)
        and isinstance(card.get("settings"), dict) and isinstance(card.get("device"), str)
    )  # fmt: skip
    if not valid:
        raise DataError("the header of the log is broken", where=str(folder / "rank-000.json"), hint=RECORD_AGAIN)


def _read(path: Path) -> np.ndarray:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"the log cannot be read: {error.strerror}", where=str(path), hint=RECORD_AGAIN) from error
    if len(data) % (8 * FIELDS):
        raise DataError("the log is truncated in the middle of an entry", where=str(path), hint=RECORD_AGAIN)
    rows = np.frombuffer(data, dtype="<i8").reshape(-1, FIELDS)
    if not np.isin(rows[:, 0], [int(k) for k in Op]).all():
        raise DataError("the log contains an unknown operation", where=str(path), hint=RECORD_AGAIN)
    return rows


def _orders(entries: np.ndarray, folder: Path) -> list[list[LogEntry]]:
    """Return the operations of every vector in order. Their numbers must be 1, 2, 3, … and include a FINAL_READ."""
    orders: list[list[LogEntry]] = []
    for vector in range(int(entries[:, 1].max()) + 1 if len(entries) else 0):
        mine = entries[entries[:, 1] == vector]
        mine = mine[np.argsort(mine[:, 2], kind="stable")]
        gaps = np.flatnonzero(mine[:, 2] != np.arange(1, len(mine) + 1))
        if len(gaps) or not len(mine) or not (mine[:, 0] == Op.FINAL_READ).any():
            missing = int(gaps[0]) + 1 if len(gaps) else len(mine) + 1
            raise DataError(
                f"the log is incomplete: entry {missing} of vector {vector} is missing", where=str(folder), hint=RECORD_AGAIN
            )
        orders.append([LogEntry(Op(int(r[0])), int(r[3]), int(r[4])) for r in mine])
    return orders


def _last(folder: Path, card: dict[str, Any]) -> list[Tensor]:
    weights = []
    for rank in card["leaders"]:
        path = folder / f"rank-{rank:03d}.safetensors"
        try:
            weights.append(load_file(str(path))["w"])
        except (OSError, KeyError, SafetensorError) as error:
            raise DataError(
                f"the last weights of rank {rank} are missing or broken", where=str(path), hint=RECORD_AGAIN
            ) from error
    return weights
