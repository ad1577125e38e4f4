"""Numbers and axes: ticks at round values, and numbers as short as they can be without losing what matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KILO = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(x: float | None, digits: int = 4) -> str:
    """With so many significant digits: 0.1403, 7,426."""
    if x is None or math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == int(x) and abs(x) < 1e15:
        return f"{int(x):,}".replace("-", "−")
    if x and (abs(x) < 1e-3 or abs(x) >= 1e9):
        return f"{x:.{digits - 2}e}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    return f"{x:,.{decimals}f}".replace("-", "−")


def short(x: float) -> str:
    """For ticks: 24k, 0.25, 1e−4."""
    for size, letter in KILO:
        if abs(x) >= size:
            return f"{x / size:.4g}{letter}".replace("-", "−")
    if x and abs(x) < 1e-3:
        mantissa, exponent = f"{x:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    return f"{x:.6g}".replace("-", "−")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that lie between."""
    if not high > low:
        return [low]
    raw = (high - low) / max(wanted, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Powers of ten; with few of them also twice and five times; within one of them any round values."""
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in range(first, last + 1) for m in parts]
        inside = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
        if len(inside) <= wanted + 2:
            return inside if len(inside) > 2 else round_ticks(low, high, wanted)
    every = math.ceil(len(inside) / wanted)
    return inside[::every]


@dataclass(frozen=True)
class Axis:
    """Maps values to places between `begin` and `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, x: float) -> float:
        if self.log:
            share = math.log(x / self.low) / math.log(self.high / self.low)
        else:
            share = (x - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, wanted: int = 5) -> list[float]:
        return log_ticks(self.low, self.high, wanted) if self.log else round_ticks(self.low, self.high, wanted)


def axis(values: Sequence[float], begin: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """Just wide enough for all values, with a little air; from 0 on where asked to."""
    low, high = min(values), max(values)
    if log:
        if high / low < 1.5:
            low, high = low / 1.3, high * 1.3
        air = (high / low) ** 0.04
        return Axis(low / air, high * air, begin, end, True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    air = 0.05 * (high - low)
    return Axis(low if zero and low == 0 else low - air, high if zero and high == 0 else high + air, begin, end)
