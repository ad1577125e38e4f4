"""Collate stored examples into a batch: decompress, change the speed, add noise, compute deltas, pad.

This is one compiled pass that releases the GIL, so loaders run while a learner trains. Deltas are summed in the same order as
in `roundelay.speech.features.fbank`, so an archive of one-byte features gives the same bits as the feature store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numba
import numpy as np

from roundelay.data.archive import IGNORE, ArchiveBlock, Layout

_compiled: Any = numba.njit(nogil=True, cache=True)
PERTURB_SEED = 0x5EED


@dataclass(frozen=True)
class Perturbation:
    """Random changes of examples, a pure function of (seed, epoch, example).

    speed   largest relative tempo change: 0.1 plays examples at 0.9 to 1.1 times their speed. Frames are interpolated, so the
            pitch stays; speed perturbation of recordings is a setting of the recipe.
    noise   standard deviation of Gaussian noise on the static features, in units of their standard deviation
    """

    speed: float = 0.0
    noise: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.speed or self.noise)

    def draw(self, seed: int, epoch: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the speed and the noise seed of every example."""
        key = np.uint64((seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + PERTURB_SEED) & (2**64 - 1))
        with np.errstate(over="ignore"):
            first = _splitmix64(numbers.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + key)
            second = _splitmix64(first)
        uniform = (first >> np.uint64(11)).astype(np.float64) / 2**53
        return 1.0 + self.speed * (2 * uniform - 1), (second >> np.uint64(33)).astype(np.int64)


def _splitmix64(z: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=8)
def delta_filters(order: int) -> np.ndarray:
    """Return float32 [order + 1, 4 * order + 1]: filter weights of each delta order over frames -2 * order to 2 * order."""
    slope = np.arange(-2, 3) / 10.0
    filters = np.zeros((order + 1, 4 * order + 1), np.float32)
    row = np.ones(1)
    for k in range(order + 1):
        filters[k, 2 * (order - k) : 2 * (order - k) + len(row)] = row.astype(np.float32)
        row = np.convolve(row, slope)
    return filters


@_compiled
def _collate(
    values,
    ranges,
    targets,
    head,
    value_starts,
    target_starts,
    rows,
    slots,
    x,
    y,
    weights,
    reach,
    context,
    speeds,
    noise,
    seeds,
):  # type: ignore[no-untyped-def]
    dim = values.shape[1]
    orders, width = weights.shape
    compressed = ranges.shape[0] > 0
    longest = 0
    for r in rows:
        longest = max(longest, head[r, 1])
    static = np.empty((longest + 2 * reach, dim), np.float32)
    warped = np.empty((longest + 2 * reach, dim), np.float32)
    one = np.float32(1.0)
    for n in range(rows.size):
        r, slot = rows[n], slots[n]
        frames, left, right = head[r, 1], head[r, 2], head[r, 3]
        stored = frames + 2 * reach
        first = value_starts[r]
        if compressed:
            low, step = ranges[r, 0], ranges[r, 1]
            for t in range(stored):
                for d in range(dim):
                    static[t, d] = np.float32(values[first + t, d]) * step[d]
                for d in range(dim):
                    static[t, d] += low[d]
        else:
            for t in range(stored):
                for d in range(dim):
                    static[t, d] = values[first + t, d]
        source = static
        speed = speeds[n]
        if speed != 1.0:
            center = 0.5 * (stored - 1)
            for t in range(stored):
                at = min(max(center + (t - center) * speed, 0.0), stored - 1.0)
                before = min(int(at), stored - 2)
                part = np.float32(at - before)
                for d in range(dim):
                    warped[t, d] = (one - part) * static[before, d] + part * static[before + 1, d]
            source = warped
            left, right = 0, 0
        if noise > 0:
            np.random.seed(seeds[n])
            for t in range(stored):
                for d in range(dim):
                    source[t, d] += np.float32(noise * np.random.normal())
        for t in range(frames):
            inside = min(max(t, left), frames - 1 - right)
            for k in range(orders):
                column = k * dim
                begun = False
                for i in range(width):
                    weight = weights[k, i]
                    if weight == 0:
                        continue
                    if begun:
                        for d in range(dim):
                            x[slot, t, column + d] += weight * source[inside + i, d]
                    else:
                        for d in range(dim):
                            x[slot, t, column + d] = weight * source[inside + i, d]
                        begun = True
        counted = frames - 2 * context
        middle = 0.5 * (counted - 1)
        for t in range(counted):
            at = t
            if speed != 1.0:
                at = int(np.floor(middle + (t - middle) * speed + 0.5))
            y[slot, context + t] = targets[target_starts[r] + at] if 0 <= at < counted else IGNORE


def collate(
    layout: Layout,
    parts: list[tuple[ArchiveBlock, np.ndarray, np.ndarray]],
    x: np.ndarray,
    y: np.ndarray,
    speeds: np.ndarray,
    seeds: np.ndarray,
    noise: float,
) -> None:
    """Write examples into x [n, frames, features] and y [n, frames].

    `parts` lists a block, rows of it, and the indices of these rows in the batch. x and y must hold the padding already.
    """
    weights = delta_filters(layout.deltas)
    for block, rows, slots in parts:
        _collate(
            block.values, block.ranges, block.targets, block.head, block.value_starts, block.target_starts, rows, slots,
            x, y, weights, layout.reach, layout.context, speeds[slots], noise, seeds[slots],
        )  # fmt: skip
