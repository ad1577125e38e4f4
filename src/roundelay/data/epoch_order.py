"""Order of the examples in an epoch: a pure function of (seed, epoch) that needs one number per block in memory.

An archive is shuffled when it is packed. Every epoch shuffles the blocks, and the examples inside each group of `mix` blocks.
Reads stay long and local, and examples that are adjacent in one epoch are usually far apart in the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCKS_SEED, EXAMPLES_SEED = 0xB10C5, 0xE6505


class EpochOrder:
    """Maps an index of the epoch to a block and a row in it. Not thread-safe."""

    def __init__(self, sizes: Sequence[int] | np.ndarray, seed: int, epoch: int, mix: int) -> None:
        self.seed, self.epoch, self.mix = seed, epoch, mix
        self.blocks = np.random.default_rng([seed, BLOCKS_SEED, epoch]).permutation(len(sizes))
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(sizes)[self.blocks])])
        self._group: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def at(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the block and the row of every index start <= index < stop."""
        indices = self._shuffled(start, stop)
        slot = np.searchsorted(self._starts, indices, side="right") - 1
        return self.blocks[slot], indices - self._starts[slot]

    def _shuffled(self, start: int, stop: int) -> np.ndarray:
        """Return the indices before the examples of each group were shuffled."""
        parts = []
        group = (int(np.searchsorted(self._starts, start, side="right")) - 1) // self.mix
        while start < stop:
            first, end = self._bounds(group)
            last = min(stop, end)
            parts.append(first + self._permutation(group, end - first)[start - first : last - first])
            start, group = last, group + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _bounds(self, group: int) -> tuple[int, int]:
        last = min((group + 1) * self.mix, len(self.blocks))
        return int(self._starts[group * self.mix]), int(self._starts[last])

    def _permutation(self, group: int, size: int) -> np.ndarray:
        cached = self._group
        if cached is not None and cached[0] == group:
            return cached[1]
        permutation = np.random.default_rng([self.seed, EXAMPLES_SEED, self.epoch, group]).permutation(size)
        self._group = (group, permutation)
        return permutation


def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """Return the order of an epoch as a permutation that depends on (seed, epoch) only."""
    return np.random.default_rng([seed, 0x0BDE, epoch]).permutation(samples)
