"""Straggler injection: `straggler="1:2.0"` makes rank 1 take twice its measured compute time, in its compute thread only."""

from __future__ import annotations

from roundelay.errors import UsageError


def slowdown(slow: str, size: int, rank: int) -> float:
    """How many times its own time this rank's gradients take."""
    factors: dict[int, float] = {}
    for part in filter(None, (p.strip() for p in slow.split(","))):
        try:
            who, factor = part.split(":")
            factors[int(who)] = float(factor)
        except ValueError as error:
            raise UsageError(f"'{part}' is not rank:factor", where="slow", hint='write straggler="1:2.0,3:1.5"') from error
    for number, times in factors.items():
        if not 0 <= number < size or times < 1.0:
            raise UsageError(
                f"straggler={slow} speaks of rank {number} with factor {times}",
                where="slow",
                hint=f"ranks are 0 to {size - 1}, factors at least 1",
            )
    return factors.get(rank, 1.0)
