"""Data augmentation of features: SpecAugment masks and vocal tract length perturbation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roundelay.speech.features.fbank import filter_centres, hz_of, mel_of


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


@dataclass(frozen=True)
class Warp:
    """widest: frequencies are multiplied by 1 - widest to 1 + widest; the others say where the filters stand."""

    widest: float
    rate: int
    mels: int
    low_hz: float
    high_hz: float

    @cached_property
    def _centres(self) -> np.ndarray:
        return filter_centres(self.rate, self.mels, self.low_hz, self.high_hz)

    def apply(self, x: np.ndarray, random: np.random.Generator) -> None:
        """x [frames, dim] <- x as a throat of another length would have said it; deltas move along with their mels."""
        self.stretch(x, random.uniform(1 - self.widest, 1 + self.widest))

    def stretch(self, x: np.ndarray, factor: float) -> None:
        """What was heard at a frequency f moves to f times the factor; beyond the last filter its value is repeated."""
        centres = self._centres
        came_from = mel_of(hz_of(centres) / factor)
        at = np.interp(came_from, centres, np.arange(self.mels))
        below = np.minimum(at.astype(np.int64), max(0, self.mels - 2))
        share = (at - below).astype(np.float32)
        blocks = x.reshape(len(x), -1, self.mels)
        above = np.minimum(below + 1, self.mels - 1)
        x[:] = ((1 - share) * blocks[:, :, below] + share * blocks[:, :, above]).reshape(x.shape)
