"""Masks over features while training: bands of mels and stretches of frames set to the mean, so that a network learns not to
rely on any of them. After SpecAugment (Park et al. 2019), without its warp of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Masks:
    """mels, frames: the widest band and the longest stretch; each sample gets `bands` of the one and one of the other, of a
    width drawn anew every time. static: mels of a frame, which its deltas repeat."""

    mels: int
    frames: int
    static: int
    bands: int = 2

    def apply(self, x: np.ndarray, random: np.random.Generator) -> None:
        """x [frames, dim] <- x with masks; 0 is the mean, as features are normalised."""
        length, dim = x.shape
        for _ in range(self.bands if self.mels else 0):
            width = int(random.integers(0, self.mels + 1))
            first = int(random.integers(0, self.static - width + 1))
            x.reshape(length, dim // self.static, self.static)[:, :, first : first + width] = 0.0
        if self.frames:
            width = int(random.integers(0, min(self.frames, length) + 1))
            first = int(random.integers(0, length - width + 1))
            x[first : first + width] = 0.0
