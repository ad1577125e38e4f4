"""Check that memory suffices before something large is read: an error can name the utterance, the OOM killer cannot."""

from __future__ import annotations

import math
from pathlib import Path

from roundelay.errors import DataError

SMALL = 1 << 27
"""Bytes up to which requests are not checked, so that short utterances cost nothing."""


def available_bytes() -> float:
    """Return the memory that the system can allocate now, or infinity if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return math.inf


def require(needed: float, what: str, where: str) -> None:
    """Raise DataError if fewer than `needed` bytes are available for `what`."""
    if needed > SMALL and needed > (free := available_bytes()):
        raise DataError(
            f"{what} would take {needed / 1e9:.1f} GB of memory ({free / 1e9:.1f} GB are free)",
            where=where,
            hint="cut the utterance into segments, or use a machine with more memory",
        )
