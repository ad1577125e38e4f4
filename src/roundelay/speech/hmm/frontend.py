"""The feature transform in front of the GMMs: cepstra with deltas, or spliced cepstra with a linear projection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.speech.features.fbank import cepstra
from roundelay.speech.hmm.viterbi import Array


@dataclass(frozen=True)
class Frontend:
    """Convert normalized log-mel frames to the features that the GMMs model.

    Without a matrix these are cepstra with deltas, with a matrix spliced cepstra projected by it (LDA+MLLT). With `keep` = 0
    the input passes unchanged: it comes from a stream that has been through a front end before.
    """

    keep: int = 13
    deltas: int = 2
    splice: int = 0
    matrix: Array | None = None  # float32 [dim, keep * (2 * splice + 1)]

    def __call__(self, static: Array) -> Array:
        """Return the features of an utterance, [T, dim]."""
        if self.keep == 0:
            return static
        keep = min(self.keep, static.shape[1])
        if self.matrix is None:
            return cepstra(static, keep, self.deltas)
        return self.spliced(static) @ self.matrix.T

    def equals(self, other: Frontend) -> bool:
        """Return whether both transforms compute the same features."""
        if (self.keep, self.deltas, self.splice) != (other.keep, other.deltas, other.splice):
            return False
        if self.matrix is None or other.matrix is None:
            return self.matrix is other.matrix
        return np.array_equal(self.matrix, other.matrix)

    def dim(self, mels: int) -> int:
        """Return the output dimension for input of `mels` bands."""
        if self.keep == 0:
            return mels
        return min(self.keep, mels) * (self.deltas + 1) if self.matrix is None else len(self.matrix)

    def spliced_dim(self, mels: int) -> int:
        """Return the dimension of spliced cepstra, before the projection."""
        return min(self.keep, mels) * (2 * self.splice + 1)

    def spliced(self, static: Array) -> Array:
        """Return the cepstra of 2 * splice + 1 adjacent frames in one row, with edge frames repeated."""
        plain = cepstra(static, min(self.keep, static.shape[1]), 0)
        padded = np.pad(plain, ((self.splice, self.splice), (0, 0)), mode="edge")
        return np.hstack([padded[n : n + len(plain)] for n in range(2 * self.splice + 1)])
