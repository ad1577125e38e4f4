"""The log of all accesses to shared vectors, from which an asynchronous run can be replayed.

Every read and write of a shared vector takes the next sequence number of that vector, under its lock. The rank that performs
the access logs the number. Together the logs of all ranks give the complete order of accesses to each vector, and that order is
all that timing decides in a run. Each rank appends fixed-size records to one file. A JSON file next to it describes the run and
says whether the log is complete.
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
    """Kind of an access. Fields of a record: op, vector, number, actor, round; of a STEP: op, epoch, start, stop, step info."""

    STEP = 1  # a rank begins a step on these samples
    READ = 2  # phi <- w
    UPDATE = 3  # w <- w + d
    ASSIGN = 4  # w <- x
    REMOTE_ADD = 5  # w <- w + d by the actor, one-sided
    REMOTE_GET = 6  # read by the actor, one-sided
    PAIR_AVERAGE = 7  # averaged in place with the actor's vector; logged once for each of the two vectors
    SNAPSHOT = 8  # copied for the actor in this round
    APPLY_HALF_DIFF = 9  # w <- w + (the actor's snapshot of this round - the own snapshot) / 2
    FINAL_READ = 10  # read for the final average


class UpdateLog:
    """The log of one rank, written by its main thread and its gossip thread: a record is one write to a buffered file."""

    def __init__(self, run: Path, rank: int, description: dict[str, Any]) -> None:
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self.rank, self._description = folder / f"rank-{rank:03d}", rank, description
        self._write_description(complete=False)
        self._file = open(self._path.with_suffix(".bin"), "wb", buffering=1 << 16)  # noqa: SIM115  # closed by close

    def append(self, op: Op, vector: int, number: int, actor: int, round: int = -1) -> None:
        """Log one access; `number` is the sequence number taken under the vector's lock."""
        self._append((op, vector, number, actor, round, 0, 0, 0))

    def step(self, epoch: int, start: int, stop: int, own: int, samples: int, global_samples: int, position: int) -> None:
        """Log the beginning of a step."""
        self._append((Op.STEP, epoch, start, stop, own, samples, global_samples, position))

    def _append(self, record: tuple[int, ...]) -> None:
        self._file.write(np.array(record, dtype="<i8").tobytes())

    def close(self, last: Tensor | None) -> None:
        """Mark the log as complete; `last` is this rank's vector in the final average, if it took part."""
        self._file.close()
        if last is not None:
            save_file({"w": last.detach().cpu().contiguous()}, str(self._path.with_suffix(".safetensors")))
        self._write_description(complete=True)

    def _write_description(self, **fields: Any) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({**self._description, "rank": self.rank, **fields}, default=str))
        os.replace(temporary, self._path.with_suffix(".json"))
