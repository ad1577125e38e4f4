"""What fits into memory, asked before something large is read or computed: an error can name the utterance, a kill cannot."""

from __future__ import annotations

import math
from pathlib import Path

from roundelay.errors import DataError

SMALL = 1 << 27
"""Bytes that are asked for without looking: so that looking costs nothing where utterances are short."""


def available_bytes() -> float:
    """What the system can give away now; infinite where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return math.inf


def require(needed: float, what: str, where: str) -> None:
    """DataError if there is less memory than that."""
    if needed > SMALL and needed > (free := available_bytes()):
        raise DataError(
            f"{what} would take {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free",
            where=where,
            hint="cut it into segments, or use a machine with more memory",
        )
