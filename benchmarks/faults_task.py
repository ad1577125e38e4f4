"""A counted task for fault injection: the example task, with a record of every batch and of every evaluation.

Each process appends to a file of its own, one line per record and one write per line, so a killed process loses nothing:

    kind rank epoch start stop wall-clock monotonic

`batch` is written when a gradient begins, `graded` when it is done, `evaluate` and `evaluated` around an evaluation, `build`
when the model has been built. Both clocks are those of the machine, so the records of all processes can be compared.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from roundelay.testing.tasks import BidirectionalLstm, SyntheticFrames, frame_loss

_files: dict[tuple[str, int], int] = {}
"""Open descriptors by folder and process: a forked process opens its own file."""


def note(folder: str, kind: str, epoch: int = -1, start: int = -1, stop: int = -1) -> None:
    """Append a record. Does nothing without a folder."""
    if not folder:
        return
    key = (folder, os.getpid())
    if key not in _files:
        os.makedirs(folder, exist_ok=True)
        _files[key] = os.open(f"{folder}/{key[1]}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    rank = os.environ.get("RANK", "-1")
    line = f"{kind} {rank} {epoch} {start} {stop} {time.time():.6f} {time.monotonic():.6f}\n"
    os.write(_files[key], line.encode())


class PaddedLstm(BidirectionalLstm):
    """The example network with a table of weights, used once per frame, that makes the model as large as asked."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int, padding: int) -> None:
        super().__init__(features, hidden, layers, classes)
        self.padding = nn.Parameter(torch.zeros(max(1, padding // classes), classes))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = super().forward(x)
        return scores + self.padding[0]


@dataclass(frozen=True, kw_only=True)
class CountedFrames(SyntheticFrames):
    """`SyntheticFrames` with records.

    records        folder of the records; empty: none
    sleep_s        seconds that a gradient sleeps, besides its computation
    slow           "rank:seconds" of another sleep for one rank, such as "3:0.9"
    evaluate_s     seconds that an evaluation sleeps at its end
    model_bytes    size of the model; 0: that of the example
    """

    records: str = ""
    sleep_s: float = 0.0
    slow: str = ""
    evaluate_s: float = 0.0
    model_bytes: int = 0

    def build(self) -> nn.Module:
        note(self.records, "build")
        classes = self.classes or 3 * self.phones
        own = sum(p.numel() for p in super().build().parameters())
        padding = self.model_bytes // 4 - own
        if padding <= 0:
            return super().build()
        return PaddedLstm(self.features, self.hidden, self.layers, classes, padding)

    def batch(self, epoch: int, start: int, stop: int) -> Any:
        x, y = super().batch(epoch, start, stop)
        return x, y, torch.tensor([epoch, start, stop])

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        x, y, place = batch
        epoch, start, stop = (int(n) for n in place)
        note(self.records, "batch", epoch, start, stop)
        seconds = self._sleep_s()
        if seconds:
            time.sleep(seconds)
        loss = frame_loss(module, (x, y))
        if loss.requires_grad and self.records:
            # the gradient of the recurrent weights is the last but one that backward computes
            last = next(p for p in module.parameters())
            handles: list[Any] = []

            def graded(_: Tensor) -> None:
                handles[0].remove()
                note(self.records, "graded", epoch, start, stop)

            handles.append(last.register_post_accumulate_grad_hook(graded))
        return loss

    def _sleep_s(self) -> float:
        rank, colon, seconds = self.slow.partition(":")
        return float(seconds) if colon and rank == os.environ.get("RANK") else self.sleep_s

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        note(self.records, "evaluate", part, parts)
        metrics = super().evaluate(module, part, parts)
        time.sleep(self.evaluate_s)
        note(self.records, "evaluated", part, parts)
        return metrics


class TaskRecord(NamedTuple):
    """One line of a record file."""

    pid: int
    kind: str
    rank: int
    epoch: int
    start: int
    stop: int
    wall: float
    monotonic: float


def read_records(folder: Path) -> list[TaskRecord]:
    """Return all records of a run in the order of time."""
    rows = []
    for path in folder.glob("*.txt"):
        for line in path.read_text().splitlines():
            f = line.split()
            if len(f) == 7:
                rows.append(
                    TaskRecord(int(path.stem), f[0], int(f[1]), int(f[2]), int(f[3]), int(f[4]), float(f[5]), float(f[6]))
                )
    return sorted(rows, key=lambda row: row.monotonic)


def count_samples(
    records: list[TaskRecord], samples: int, epochs: float, batch: int, failed: dict[int, float] | None = None
) -> dict[str, int]:
    """Count the places of a run by how they were trained.

    never         no gradient of them was finished
    only_failed   finished only by a rank after it had been declared failed; `failed` holds rank -> wall-clock second
    twice         finished more than once

    Records of more than `batch` samples are those of an evaluation that computes gradients; they do not count.
    """
    total = round(samples * epochs)
    done, valid = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    for row in records:
        if row.kind == "graded" and row.stop - row.start <= batch:
            span = slice(row.epoch * samples + row.start, min(row.epoch * samples + row.stop, total))
            done[span] += 1
            if row.wall <= (failed or {}).get(row.rank, float("inf")):
                valid[span] += 1
    return {
        "places": total,
        "never": int((done == 0).sum()),
        "only_failed": int(((done > 0) & (valid == 0)).sum()),
        "twice": int((done > 1).sum()),
    }
