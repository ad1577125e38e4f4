"""Batches of an archive: indices of an epoch in, arrays out."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundelay.data.archive import IGNORE, Archive
from roundelay.data.collate import Perturbation, collate
from roundelay.data.epoch_order import EpochOrder

MIX = 8
"""Blocks whose examples are shuffled together."""
MAX_ORDERS = 2
"""Epochs whose order is cached: the loaders of a learner may work on both sides of an epoch's end."""


@dataclass(frozen=True)
class FrameBatch:
    """A padded batch of examples."""

    x: np.ndarray
    """float32 [n, frames, features]"""
    y: np.ndarray
    """int64 [n, frames], IGNORE for frames without a target"""
    lengths: np.ndarray
    """Frames of each example."""
    numbers: np.ndarray
    """Index of each example before the archive was shuffled."""


class Examples:
    """Batches of an archive in the order of (seed, epoch). Thread-safe; memory is bounded by the block size of the archive."""

    def __init__(
        self, archive: Archive | Path | str, seed: int = 0, perturbation: Perturbation | None = None, mix: int = MIX
    ) -> None:
        self.archive = archive if isinstance(archive, Archive) else Archive(archive, max_mapped=3 * mix)
        self.seed, self.perturbation, self.mix = seed, perturbation or Perturbation(), mix
        self._orders: dict[int, EpochOrder] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.archive)

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch, from the cache if possible."""
        with self._lock:
            if epoch not in self._orders:
                while len(self._orders) >= MAX_ORDERS:
                    self._orders.pop(min(self._orders))
                self._orders[epoch] = EpochOrder(self.archive.sizes, self.seed, epoch, self.mix)
            return self._orders[epoch]

    def batch(self, epoch: int, start: int, stop: int) -> FrameBatch:
        """Return the examples start <= index < stop of an epoch."""
        layout = self.archive.layout
        block_numbers, rows = self.order(epoch).at(start, stop)
        parts = []
        numbers, lengths = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        for number in np.unique(block_numbers):
            slots = np.flatnonzero(block_numbers == number)
            block, block_rows = self.archive.block(int(number)), rows[slots]
            numbers[slots], lengths[slots] = block.head[block_rows, 0], block.head[block_rows, 1]
            parts.append((block, block_rows, slots))
        longest = int(lengths.max())
        x = np.empty((stop - start, longest, layout.delivered), np.float32)
        y = np.empty((stop - start, longest), np.int64)
        if lengths.min() < longest or layout.context:
            y.fill(IGNORE)
        if lengths.min() < longest:
            x.fill(0.0)
        if self.perturbation:
            speeds, seeds = self.perturbation.draw(self.seed, epoch, numbers)
        else:
            speeds, seeds = np.ones(stop - start), np.zeros(stop - start, np.int64)
        collate(layout, parts, x, y, speeds, seeds, self.perturbation.noise)
        return FrameBatch(x, y, lengths, numbers)
