"""The order of an epoch over an archive: a pure function of (seed, epoch), without a list of all examples in memory.

The archive was shuffled as a whole when it was packed. Every epoch then draws the order of its blocks, and inside each run of
`mix` blocks the order of all their examples: reads stay long and local, neighbours of one epoch are strangers in the next, and
what must be remembered is one number per block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCKS_DICE, EXAMPLES_DICE = 0xB10C5, 0xE6505


class EpochOrder:
    """Which example stands at a place of the epoch: its block and its row there."""

    def __init__(self, sizes: Sequence[int] | np.ndarray, seed: int, epoch: int, mix: int) -> None:
        self.seed, self.epoch, self.mix = seed, epoch, mix
        self.blocks = np.random.default_rng([seed, BLOCKS_DICE, epoch]).permutation(len(sizes))
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(sizes)[self.blocks])])
        self._group: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def at(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Block and row of every place start <= place < stop."""
        places = self._mixed(start, stop)
        slot = np.searchsorted(self._starts, places, side="right") - 1
        return self.blocks[slot], places - self._starts[slot]

    def _mixed(self, start: int, stop: int) -> np.ndarray:
        """Places before the examples of each group were mixed."""
        found = []
        group = (int(np.searchsorted(self._starts, start, side="right")) - 1) // self.mix
        while start < stop:
            first, end = self._bounds(group)
            upto = min(stop, end)
            found.append(first + self._permutation(group, end - first)[start - first : upto - first])
            start, group = upto, group + 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _bounds(self, group: int) -> tuple[int, int]:
        last = min((group + 1) * self.mix, len(self.blocks))
        return int(self._starts[group * self.mix]), int(self._starts[last])

    def _permutation(self, group: int, size: int) -> np.ndarray:
        kept = self._group
        if kept is not None and kept[0] == group:
            return kept[1]
        drawn = np.random.default_rng([self.seed, EXAMPLES_DICE, self.epoch, group]).permutation(size)
        self._group = (group, drawn)
        return drawn


def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of an epoch: a permutation drawn from (seed, epoch) alone."""
    return np.random.default_rng([seed, 0x0BDE, epoch]).permutation(samples)
