"""Augment features while a network trains: SpecAugment and vocal tract length perturbation (VTLP).

SpecAugment: Park et al. 2019, without time warping. VTLP: Jaitly and Hinton 2013, applied to log-mel features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roundelay.speech.features.fbank import filter_centers, hz_to_mel, mel_to_hz


@dataclass(frozen=True)
class SpecAugment:
    """Mask bands of filters and a stretch of frames.

    max_freq_width   widest masked band, in filters; 0: no band is masked
    max_time_width   longest masked stretch, in frames; 0: no stretch is masked
    static_dim       filters of a frame; a band is masked in the deltas as well
    num_freq_masks   bands masked in each example, in addition to one stretch of frames
    """

    max_freq_width: int
    max_time_width: int
    static_dim: int
    num_freq_masks: int = 2

    def apply(self, x: np.ndarray, rng: np.random.Generator) -> None:
        """Set the masked values of x [frames, dim] to 0 in place: the mean of normalized features."""
        length, dim = x.shape
        for _ in range(self.num_freq_masks if self.max_freq_width else 0):
            width = int(rng.integers(0, self.max_freq_width + 1))
            first = int(rng.integers(0, self.static_dim - width + 1))
            x.reshape(length, dim // self.static_dim, self.static_dim)[:, :, first : first + width] = 0.0
        if self.max_time_width:
            width = int(rng.integers(0, min(self.max_time_width, length) + 1))
            first = int(rng.integers(0, length - width + 1))
            x[first : first + width] = 0.0


@dataclass(frozen=True)
class Vtlp:
    """Scale the frequency axis of log-mel features by a random factor between 1 - max_warp and 1 + max_warp.

    `rate`, `mels`, `low_hz` and `high_hz` are those of the features.
    """

    max_warp: float
    rate: int
    mels: int
    low_hz: float
    high_hz: float

    @cached_property
    def _centers(self) -> np.ndarray:
        return filter_centers(self.rate, self.mels, self.low_hz, self.high_hz)

    def apply(self, x: np.ndarray, rng: np.random.Generator) -> None:
        """Warp x [frames, dim] in place by a factor drawn from `rng`. Deltas are warped like the static features."""
        self.warp(x, rng.uniform(1 - self.max_warp, 1 + self.max_warp))

    def warp(self, x: np.ndarray, factor: float) -> None:
        """Move the content at frequency f to f * factor in place. Beyond the last filter its value is repeated."""
        centers = self._centers
        source = mel_to_hz(centers) / factor
        position = np.interp(hz_to_mel(source), centers, np.arange(self.mels))
        below = np.minimum(position.astype(np.int64), max(0, self.mels - 2))
        weight = (position - below).astype(np.float32)
        blocks = x.reshape(len(x), -1, self.mels)
        above = np.minimum(below + 1, self.mels - 1)
        x[:] = ((1 - weight) * blocks[:, :, below] + weight * blocks[:, :, above]).reshape(x.shape)
