"""The examples of an archive as batches: places of an epoch in, arrays out."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundelay.data.archive import IGNORE, Archive
from roundelay.data.collate import Perturbation, deliver
from roundelay.data.epoch_order import EpochOrder

MIX = 8
"""Blocks whose examples are mixed with each other."""
ORDERS = 2
"""Epochs whose order is kept: loaders of a learner may stand on both sides of an epoch's end."""


@dataclass(frozen=True)
class FrameBatch:
    """x float32 [n, frames, features]; y int64 [n, frames], IGNORE where nothing counts; frames of each example; and the
    numbers the examples had before the archive was shuffled."""

    x: np.ndarray
    y: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray


class Examples:
    """An archive in the order of (seed, epoch). Safe to call from several threads; what it keeps in memory is bounded by the
    archive's block size, whatever the corpus."""

    def __init__(
        self, archive: Archive | Path | str, seed: int = 0, change: Perturbation | None = None, mix: int = MIX
    ) -> None:
        self.archive = archive if isinstance(archive, Archive) else Archive(archive, kept=3 * mix)
        self.seed, self.change, self.mix = seed, change or Perturbation(), mix
        self._orders: dict[int, EpochOrder] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.archive)

    def order(self, epoch: int) -> EpochOrder:
        with self._lock:
            if epoch not in self._orders:
                while len(self._orders) >= ORDERS:
                    self._orders.pop(min(self._orders))
                self._orders[epoch] = EpochOrder(self.archive.sizes, self.seed, epoch, self.mix)
            return self._orders[epoch]

    def batch(self, epoch: int, start: int, stop: int) -> FrameBatch:
        """The examples at places start <= place < stop."""
        layout = self.archive.layout
        numbers_of_blocks, rows = self.order(epoch).at(start, stop)
        parts = []
        numbers, lengths = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        for number in np.unique(numbers_of_blocks):
            places = np.flatnonzero(numbers_of_blocks == number)
            block, chosen = self.archive.block(int(number)), rows[places]
            numbers[places], lengths[places] = block.head[chosen, 0], block.head[chosen, 1]
            parts.append((block, chosen, places))
        longest = int(lengths.max())
        x = np.empty((stop - start, longest, layout.delivered), np.float32)
        y = np.empty((stop - start, longest), np.int64)
        if lengths.min() < longest or layout.context:
            y.fill(IGNORE)
        if lengths.min() < longest:
            x.fill(0.0)
        if self.change:
            speeds, seeds = self.change.draw(self.seed, epoch, numbers)
        else:
            speeds, seeds = np.ones(stop - start), np.zeros(stop - start, np.int64)
        deliver(layout, parts, x, y, speeds, seeds, self.change.noise)
        return FrameBatch(x, y, lengths, numbers)
