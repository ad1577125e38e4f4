"""Diagonal GMMs, one per pdf, in flat arrays: scores, statistics, re-estimation and component splitting.

Scores are one matrix product over the requested components. Statistics assign each frame to the pdf that it is aligned to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, Any]

LOG_2PI = float(np.log(2 * np.pi))
# Constants of the exponential: smallest exponent of a normal float, and a polynomial for 2 ** x on [0, 1] (Chebyshev nodes).
ONE, LOG2_E, LEAST_POWER = np.float32(1.0), np.float32(np.log2(np.e)), np.float32(-126.0)
C1, C2, C3, C4, C5 = (np.float32(c) for c in (0.693151712, 0.240159273, 0.0558186732, 0.00899100117, 0.00187931547))
# Frames scored at a time: bounds the memory of the component scores.
SLICE = 512
# Matrix products are split into tiles too small for BLAS to use several threads. Threads that wait for each other make a loaded
# machine many times slower, and the last bit must not depend on their number.
TILE = 64
SMALL_PRODUCT = 250_000

_compiled: Any = numba.njit(nogil=True, cache=True)


@_compiled
def _sum_components(parts, first, out):  # type: ignore[no-untyped-def]
    """Compute log-sum-exp over the components of each pdf.

    Loops run along frames, so that the compiler vectorizes them. The exponential is 2 ** whole * polynomial(fraction), with a
    relative error of about 1e-6.
    """
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
    """Accumulated zeroth, first and second moments of each component, and the log likelihood of the frames."""

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
    """The mixtures of all pdfs; pdf p has components `first[p]:first[p + 1]`."""

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
        """Return mixtures of one Gaussian each, from rows of means and variances."""
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
        """Return log likelihoods, float32 [T, len(pdfs)]; of all pdfs by default."""
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
        """Accumulate statistics of frames x [T, dim], where frame t is aligned to pdfs[t]."""
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
        """Return the most likely component of each frame's pdf, int32 [T]."""
        out = np.empty(len(x), np.int32)
        x = np.ascontiguousarray(x, np.float32)
        _best_components(x, pdfs, self.first, self._constant, self.mean, self._precision, out)
        return out

    def updated(self, statistics: GmmStatistics, floor: Array, min_frames: float = 10.0) -> Gmm:
        """Return maximum-likelihood estimates with floored variances; drop components with fewer than `min_frames` frames.

        The component with the most frames of each pdf always stays, with its old values if it has fewer than `min_frames`.
        """
        keep = statistics.occupancy >= min_frames
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

    def grown(self, occupancy: Array, total: int, *, power: float = 0.25, min_frames: float = 20.0, seed: int = 0) -> Gmm:
        """Split the components of the largest weight until there are about `total`.

        A pdf gets components in proportion to occupancy ** power, and at most one per `min_frames` frames.
        """
        sizes = np.diff(self.first)
        targets = np.maximum(sizes, _components_by_pdf(occupancy, sizes, total, power, min_frames))
        rng = np.random.default_rng(seed)
        first, weight, mean, variance = [0], [], [], []
        for p in range(self.pdfs):
            own = slice(self.first[p], self.first[p + 1])
            w, m, v = list(self.weight[own]), list(self.mean[own]), list(self.variance[own])
            while len(w) < targets[p]:
                k = int(np.argmax(w))
                w[k] *= 0.5
                shift = 0.1 * np.sqrt(v[k]) * rng.standard_normal(self.dim).astype(np.float32)
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
        """Return the parameters by name, for files."""
        return {"gmm.first": self.first, "gmm.weight": self.weight, "gmm.mean": self.mean, "gmm.variance": self.variance}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> Gmm:
        return cls(*(arrays[f"gmm.{name}"] for name in ("first", "weight", "mean", "variance")))


def _components_by_pdf(occupancy: Array, sizes: Array, total: int, power: float, min_frames: float) -> Array:
    """Return the components of each pdf: the largest multiple of occupancy ** power whose sum is at most the total."""
    weight = np.power(np.maximum(occupancy, 0.0), power)
    cap = np.maximum(1, np.floor(occupancy / min_frames)).astype(np.int64)
    low, high = 0.0, float(total) / max(float(weight[weight > 0].min(initial=1.0)), 1e-9)
    for _ in range(60):
        middle = 0.5 * (low + high)
        number = np.maximum(np.minimum(np.floor(weight * middle).astype(np.int64), cap), sizes)
        low, high = (middle, high) if number.sum() <= total else (low, middle)
    return np.maximum(np.minimum(np.floor(weight * low).astype(np.int64), cap), 1)
