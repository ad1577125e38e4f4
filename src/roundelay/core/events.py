"""The events of a run: one JSON object per line, appended by every learner to one file.

start        once per start or resume: what runs where, with which versions, and who averages with whom
steps        per learner, about once a second: steps, samples, samples/s, loss, rate, seconds by kind, staleness counts,
             meetings, bytes
evaluation   held-out figures of the average model, with the spread between learners it was made from
checkpoint   a checkpoint became complete
lost         a learner died;   stall    everybody waits for a rank;   summary   figures of the whole run per learner
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events; a line is one write, so the lines of several processes do not mix."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self.rank = rank
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def now(self) -> float:
        """The time that events bear."""
        return time.time()

    def write(self, event: str, **figures: Any) -> None:
        if self._fd >= 0:
            line = json.dumps({"event": event, "time": round(self.now(), 4), "rank": self.rank, **figures})
            with suppress(OSError):  # a full disk: figures are not worth a run; the next checkpoint says what to do
                os.write(self._fd, (line + "\n").encode())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file; a last line that was cut off by a crash is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
