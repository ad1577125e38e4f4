"""The order of all reads and writes of a run's shared vectors, logged so that the run can be replayed.

Every read and write of a shared vector takes the next number of that vector's counter, under its lock. The rank that performs
it logs the number. So the logs of all ranks together give the order of each vector without a gap. This order is all that
timing decides: with it the run can be replayed. Each rank has one binary file of fixed-size records, and a JSON file with the
settings of the run. The JSON file says `complete` once the run has finished without an error.
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
    """The operation of a record: (op, vector, number, actor, round); for a step (op, epoch, start, stop, samples...)."""

    STEP = 1  # a rank starts a step on these samples
    READ = 2  # phi <- w
    UPDATE = 3  # w <- w + d
    ASSIGN = 4  # w <- x
    REMOTE_ADD = 5  # w <- w + d by the actor, one-sided
    REMOTE_GET = 6  # x <- w by the actor, one-sided
    PAIR_AVERAGE = 7  # in-place average with the actor's vector; logged for both vectors
    SNAPSHOT = 8  # a copy for the actor, in this round
    APPLY_HALF_DIFF = 9  # w <- w + half the difference of the two snapshots of this round
    FINAL_READ = 10  # what goes into the final average


class UpdateLog:
    """Logs the operations of one rank. Thread-safe: a record is one write to a buffered file."""

    def __init__(self, run: Path, rank: int, header: dict[str, Any]) -> None:
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self.rank, self._header = folder / f"rank-{rank:03d}", rank, header
        self._write_header(complete=False)
        self._file = open(self._path.with_suffix(".bin"), "wb", buffering=1 << 16)  # noqa: SIM115  # closed by close()

    def append(self, op: Op, vector: int, number: int, actor: int, round: int = -1) -> None:
        """Log an operation on the shared vector of rank `vector`, performed by rank `actor`."""
        self._append((op, vector, number, actor, round, 0, 0, 0))

    def step(
        self, epoch: int, start: int, stop: int, local_samples: int, node_samples: int, global_samples: int, position: int
    ) -> None:
        """Log the start of a step on samples start <= index < stop of an epoch."""
        self._append((Op.STEP, epoch, start, stop, local_samples, node_samples, global_samples, position))

    def _append(self, record: tuple[int, ...]) -> None:
        self._file.write(np.array(record, dtype="<i8").tobytes())

    def close(self, last: Tensor | None) -> None:
        """Close the log of a run that finished. `last`: this rank's contribution to the final average, if any."""
        self._file.close()
        if last is not None:
            save_file({"w": last.detach().cpu().contiguous()}, str(self._path.with_suffix(".safetensors")))
        self._write_header(complete=True)

    def _write_header(self, complete: bool) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({**self._header, "rank": self.rank, "complete": complete}, default=str))
        os.replace(temporary, self._path.with_suffix(".json"))
