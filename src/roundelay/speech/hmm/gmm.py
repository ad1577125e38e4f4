"""Diagonal Gaussian mixtures, one per pdf, in flat arrays: scores, statistics, re-estimation and growth by splitting.

Scores are one matrix product over the components asked for; statistics take each frame to the pdf that it is aligned to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, Any]

LOG_2PI = float(np.log(2 * np.pi))
# The exponential's constants: smallest exponent of a normal float, and 2 ** x on [0, 1] as a polynomial (Chebyshev nodes).
ONE, LOG2_E, LEAST_POWER = np.float32(1.0), np.float32(np.log2(np.e)), np.float32(-126.0)
C1, C2, C3, C4, C5 = (np.float32(c) for c in (0.693151712, 0.240159273, 0.0558186732, 0.00899100117, 0.00187931547))
# Frames scored at a time when all pdfs are wanted: bounds the memory of the component scores.
SLICE = 512
# Products are cut into tiles so small that BLAS never shares one out between threads: threads that wait for one another make
# a loaded machine many times slower, and the last bit must not depend on them.
TILE = 64
SMALL_PRODUCT = 250_000

_compiled: Any = numba.njit(nogil=True, cache=True)


@_compiled
def _sum_components(parts, first, out):  # type: ignore[no-untyped-def]
    """Log of the sum of exponentials over each pdf's components. Loops run along frames, so that the compiler makes vector
    instructions of them; the exponential is 2 ** whole * polynomial(fraction), good to one part in a million."""
    width, tall = parts.shape[2], parts.shape[3]
    top = np.empty(tall, np.float32)
    total = np.empty(tall, np.float32)
    fraction = np.empty(tall, np.float32)
    bits = np.empty(tall, np.int32)
    power = bits.view(np.float32)
    for strip in range(parts.shape[1]):
        count = min(tall, out.shape[0] - strip * tall)
        for p in range(first.size - 1):
            top[:] = parts[first[p] // width, strip, first[p] % width]
            for g in range(first[p] + 1, first[p + 1]):
                row = parts[g // width, strip, g % width]
                for t in range(tall):
                    top[t] = row[t] if row[t] > top[t] else top[t]
            total[:] = 0.0
            for g in range(first[p], first[p + 1]):
                row = parts[g // width, strip, g % width]
                for t in range(tall):
                    y = (row[t] - top[t]) * LOG2_E
                    y = y if y > LEAST_POWER else LEAST_POWER
                    whole = np.floor(y)
                    x = y - whole
                    fraction[t] = ONE + x * (C1 + x * (C2 + x * (C3 + x * (C4 + x * C5))))
                    bits[t] = (np.int32(whole) + np.int32(127)) << np.int32(23)
                for t in range(tall):
                    total[t] += fraction[t] * power[t]
            for t in range(count):
                out[strip * tall + t, p] = top[t] + np.log(total[t])


@_compiled
def _accumulate(x, pdfs, first, constant, mean, precision, occupancy, linear, square):  # type: ignore[no-untyped-def]
    dim = x.shape[1]
    most = 0
    for p in range(first.size - 1):
        most = max(most, first[p + 1] - first[p])
    part = np.empty(most, np.float32)
    total = 0.0
    for t in range(x.shape[0]):
        begin, end = first[pdfs[t]], first[pdfs[t] + 1]
        top = np.float32(-np.inf)
        for g in range(begin, end):
            distance = np.float32(0.0)
            for d in range(dim):
                away = x[t, d] - mean[g, d]
                distance += away * away * precision[g, d]
            part[g - begin] = constant[g] - np.float32(0.5) * distance
            top = max(top, part[g - begin])
        mass = np.float32(0.0)
        for g in range(begin, end):
            part[g - begin] = np.exp(part[g - begin] - top)
            mass += part[g - begin]
        total += top + np.log(mass)
        for g in range(begin, end):
            share = part[g - begin] / mass
            if share > np.float32(1e-4):
                occupancy[g] += share
                for d in range(dim):
                    weighted = share * x[t, d]
                    linear[g, d] += weighted
                    square[g, d] += weighted * x[t, d]
    return total


@_compiled
def _best_components(x, pdfs, first, constant, mean, precision, out):  # type: ignore[no-untyped-def]
    for t in range(x.shape[0]):
        top = np.float32(-np.inf)
        for g in range(first[pdfs[t]], first[pdfs[t] + 1]):
            distance = np.float32(0.0)
            for d in range(x.shape[1]):
                away = x[t, d] - mean[g, d]
                distance += away * away * precision[g, d]
            value = constant[g] - np.float32(0.5) * distance
            if value > top:
                top = value
                out[t] = g


@dataclass
class GmmStatistics:
    """Zeroth, first and second moments per component, and the log likelihood of the frames that gave them."""

    occupancy: Array  # float64 [components]
    linear: Array  # float64 [components, dim]
    square: Array  # float64 [components, dim]
    loglike: float = 0.0
    frames: int = 0

    @classmethod
    def empty(cls, components: int, dim: int) -> GmmStatistics:
        return cls(np.zeros(components), np.zeros((components, dim)), np.zeros((components, dim)))

    def add(self, other: GmmStatistics) -> None:
        self.occupancy += other.occupancy
        self.linear += other.linear
        self.square += other.square
        self.loglike += other.loglike
        self.frames += other.frames


class Gmm:
    """The mixtures of all pdfs; pdf p owns components `first[p]:first[p + 1]`."""

    def __init__(self, first: Array, weight: Array, mean: Array, variance: Array) -> None:
        self.first = np.ascontiguousarray(first, np.int32)
        self.weight = np.ascontiguousarray(weight, np.float32)
        self.mean = np.ascontiguousarray(mean, np.float32)
        self.variance = np.ascontiguousarray(variance, np.float32)
        self._prepare()

    def _prepare(self) -> None:
        precision = 1.0 / self.variance.astype(np.float64)
        mean = self.mean.astype(np.float64)
        norm = np.log(self.weight, dtype=np.float64) - 0.5 * (self.dim * LOG_2PI - np.log(precision).sum(1))
        self._precision = precision.astype(np.float32)
        self._constant = norm.astype(np.float32)
        affine = (norm - 0.5 * (mean * mean * precision).sum(1))[:, None]
        self._rows = np.hstack([affine, mean * precision, -0.5 * precision]).astype(np.float32)

    @classmethod
    def single(cls, mean: Array, variance: Array) -> Gmm:
        """One Gaussian per row."""
        pdfs = len(mean)
        return cls(np.arange(pdfs + 1), np.ones(pdfs), mean, variance)

    @property
    def pdfs(self) -> int:
        return len(self.first) - 1

    @property
    def components(self) -> int:
        return len(self.weight)

    @property
    def dim(self) -> int:
        return int(self.mean.shape[1])

    def scores(self, x: Array, pdfs: Array | None = None) -> Array:
        """Log likelihoods float32 [T, len(pdfs)] (all pdfs where none are named)."""
        if pdfs is None:
            rows, first = self._rows, self.first
        else:
            sizes = self.first[pdfs + 1] - self.first[pdfs]
            first = np.zeros(len(pdfs) + 1, np.int32)
            np.cumsum(sizes, out=first[1:])
            rows = self._rows[np.arange(first[-1]) + np.repeat(self.first[pdfs] - first[:-1], sizes)]
        width = 1 + 2 * self.dim
        tall = max(1, SMALL_PRODUCT // (TILE * width))
        padded = np.zeros((-(-len(x) // tall) * tall, width), np.float32)
        padded[: len(x), 0] = 1.0
        padded[: len(x), 1 : 1 + self.dim] = x
        np.multiply(x, x, out=padded[: len(x), 1 + self.dim :])
        frames = padded.reshape(-1, tall, width)
        components = np.zeros((-(-len(rows) // TILE) * TILE, width), np.float32)
        components[: len(rows)] = rows
        tiles = components.reshape(-1, 1, TILE, width)
        out = np.empty((len(x), len(first) - 1), np.float32)
        at_once = max(1, SLICE // tall)
        for begin in range(0, len(frames), at_once):
            parts = tiles @ frames[begin : begin + at_once].swapaxes(1, 2)
            _sum_components(parts, first, out[begin * tall : (begin + at_once) * tall])
        return out

    def accumulate(self, x: Array, pdfs: Array, into: GmmStatistics) -> None:
        """Adds frames x [T, dim], frame t belonging to pdfs[t]."""
        into.loglike += _accumulate(
            np.ascontiguousarray(x, np.float32),
            pdfs,
            self.first,
            self._constant,
            self.mean,
            self._precision,
            into.occupancy,
            into.linear,
            into.square,
        )
        into.frames += len(x)

    def best_components(self, x: Array, pdfs: Array) -> Array:
        """The component of its pdf that explains each frame best, int32 [T]."""
        out = np.empty(len(x), np.int32)
        x = np.ascontiguousarray(x, np.float32)
        _best_components(x, pdfs, self.first, self._constant, self.mean, self._precision, out)
        return out

    def updated(self, statistics: GmmStatistics, floor: Array, least: float = 10.0) -> Gmm:
        """Maximum likelihood with floored variances; components that saw fewer than `least` frames go.

        A pdf's best-fed component always stays, with its old values if it saw too little to estimate from.
        """
        keep = statistics.occupancy >= least
        poor = np.zeros(self.components, bool)
        for p in np.flatnonzero(np.add.reduceat(keep, self.first[:-1]) == 0):
            best = self.first[p] + int(np.argmax(statistics.occupancy[self.first[p] : self.first[p + 1]]))
            keep[best] = poor[best] = True
        count = np.where(poor, 1.0, np.maximum(statistics.occupancy, 1e-10))[:, None]
        mean = statistics.linear / count
        variance = np.maximum(statistics.square / count - mean * mean, floor)
        mean[poor], variance[poor] = self.mean[poor], self.variance[poor]
        weight = np.where(keep, np.maximum(statistics.occupancy, 1e-3), 0.0)
        sizes = np.add.reduceat(keep, self.first[:-1])
        weight /= np.repeat(np.add.reduceat(weight, self.first[:-1]), np.diff(self.first))
        first = np.concatenate([[0], np.cumsum(sizes)])
        return Gmm(first, weight[keep], mean[keep], variance[keep])

    def grown(self, occupancy: Array, total: int, *, power: float = 0.25, least: float = 20.0, seed: int = 0) -> Gmm:
        """Splits the heaviest components until about `total` stand.

        Shares follow pdf occupancy ** power, so that frequent pdfs get more, and no component is left under `least` frames.
        """
        sizes = np.diff(self.first)
        wanted = np.maximum(sizes, _shares(occupancy, sizes, total, power, least))
        random = np.random.default_rng(seed)
        first, weight, mean, variance = [0], [], [], []
        for p in range(self.pdfs):
            own = slice(self.first[p], self.first[p + 1])
            w, m, v = list(self.weight[own]), list(self.mean[own]), list(self.variance[own])
            while len(w) < wanted[p]:
                k = int(np.argmax(w))
                w[k] *= 0.5
                shift = 0.1 * np.sqrt(v[k]) * random.standard_normal(self.dim).astype(np.float32)
                w.append(w[k])
                m.append(m[k] - shift)
                v.append(v[k])
                m[k] = m[k] + shift
            first.append(first[-1] + len(w))
            weight += w
            mean += m
            variance += v
        return Gmm(np.array(first), np.array(weight), np.array(mean), np.array(variance))

    def arrays(self) -> dict[str, Array]:
        return {"gmm.first": self.first, "gmm.weight": self.weight, "gmm.mean": self.mean, "gmm.variance": self.variance}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> Gmm:
        return cls(*(arrays[f"gmm.{name}"] for name in ("first", "weight", "mean", "variance")))


def _shares(occupancy: Array, sizes: Array, total: int, power: float, least: float) -> Array:
    """Components per pdf: the largest multiple of occupancy ** power that keeps within the total."""
    wish = np.power(np.maximum(occupancy, 0.0), power)
    cap = np.maximum(1, np.floor(occupancy / least)).astype(np.int64)
    low, high = 0.0, float(total) / max(float(wish[wish > 0].min(initial=1.0)), 1e-9)
    for _ in range(60):
        middle = 0.5 * (low + high)
        number = np.maximum(np.minimum(np.floor(wish * middle).astype(np.int64), cap), sizes)
        low, high = (middle, high) if number.sum() <= total else (low, middle)
    return np.maximum(np.minimum(np.floor(wish * low).astype(np.int64), cap), 1)
