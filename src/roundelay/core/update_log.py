"""The history of a run's published vectors: who read, moved and averaged what, in which order.

Every read and write of a published vector takes the next number of that vector's counter, under its lock. Whoever does it
notes the number down here, so the notes of all learners together give every vector's order without a gap, and that order is
all that timing has decided: with it the run can be done again. One file of fixed-size records per learner, appended to; a
card beside it says what was run and, once the run has ended well, that the record is whole.
"""

from __future__ import annotations

import json
import os
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

FOLDER = "record"
FIELDS = 8


class Op(IntEnum):
    """What was done. A record is: kind, vector, number, actor, round; of a step: kind, epoch, start, stop, and its share."""

    STEP = 1  # a learner begins a step on this piece of the data
    READ = 2  # phi <- w
    UPDATE = 3  # w <- w + d
    ASSIGN = 4  # w <- x
    REMOTE_ADD = 5  # by the actor, one-sided
    REMOTE_GET = 6  # by the actor, one-sided
    PAIR_AVERAGE = 7  # averaged in place with the actor's vector; noted for both vectors
    SNAPSHOT = 8  # taken for the actor in this round
    APPLY_HALF_DIFF = 9  # half the difference between the actor's snapshot of this round and one's own was added
    FINAL_READ = 10  # what goes into the closing average


class UpdateLog:
    """Notes what one learner and its agent do. Safe for both threads: a record is one call of a buffered file."""

    def __init__(self, run: Path, rank: int, card: dict[str, Any]) -> None:
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self.rank, self._card = folder / f"rank-{rank:03d}", rank, card
        self._write_card(complete=False)
        self._file = open(self._path.with_suffix(".bin"), "wb", buffering=1 << 16)  # noqa: SIM115  # closed by close

    def append(self, op: Op, vector: int, number: int, actor: int, round: int = -1) -> None:
        self._append((op, vector, number, actor, round, 0, 0, 0))

    def step(self, epoch: int, start: int, stop: int, own: int, samples: int, global_samples: int, position: int) -> None:
        self._append((Op.STEP, epoch, start, stop, own, samples, global_samples, position))

    def _append(self, record: tuple[int, ...]) -> None:
        self._file.write(np.array(record, dtype="<i8").tobytes())

    def close(self, last: Tensor | None) -> None:
        """The run has ended well; `last` is what this learner brought to the closing average, if it brought anything."""
        self._file.close()
        if last is not None:
            save_file({"w": last.detach().cpu().contiguous()}, str(self._path.with_suffix(".safetensors")))
        self._write_card(complete=True)

    def _write_card(self, **end: Any) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({**self._card, "rank": self.rank, **end}, default=str))
        os.replace(fresh, self._path.with_suffix(".json"))
