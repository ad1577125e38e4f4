"""Linear feature transforms for diagonal Gaussians: LDA of spliced frames, then MLLT (semi-tied covariances).

MLLT removes most of the correlation between dimensions, which diagonal Gaussians cannot model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.viterbi import Array


@dataclass
class LdaStatistics:
    """Frame counts and sums of each class, and the sum of outer products of all frames."""

    count: Array  # float64 [classes]
    linear: Array  # float64 [classes, dim]
    square: Array  # float64 [dim, dim]

    @classmethod
    def empty(cls, classes: int, dim: int) -> LdaStatistics:
        return cls(np.zeros(classes), np.zeros((classes, dim)), np.zeros((dim, dim)))

    def accumulate(self, x: Array, classes: Array) -> None:
        """Add frames x [T, dim], where frame t has class classes[t]."""
        wide = x.astype(np.float64)
        self.count += np.bincount(classes, minlength=len(self.count))
        np.add.at(self.linear, classes, wide)
        self.square += wide.T @ wide

    def add(self, other: LdaStatistics) -> None:
        self.count += other.count
        self.linear += other.linear
        self.square += other.square

    def transform(self, dim: int) -> Array:
        """Return the projection that separates the classes best, float32 [dim, input dim]; classes have unit variance."""
        total = self.count.sum()
        mean = self.linear.sum(0) / total
        seen = self.count > 0
        centered = self.linear[seen] / self.count[seen, None] - mean
        between = (centered * self.count[seen, None]).T @ centered / total
        within = self.square / total - np.outer(mean, mean) - between
        within += 1e-6 * np.trace(within) / len(within) * np.eye(len(within))
        values, vectors = np.linalg.eigh(within)
        whiten = (vectors / np.sqrt(values)).T
        values, vectors = np.linalg.eigh(whiten @ between @ whiten.T)
        rows: Array = (vectors[:, ::-1].T @ whiten)[:dim]
        # The signs of eigenvectors are arbitrary: fix them, so that equal statistics give equal models on every machine.
        rows = rows * np.where(rows[np.arange(len(rows)), np.abs(rows).argmax(1)] < 0, -1.0, 1.0)[:, None]
        return rows.astype(np.float32)


@dataclass
class MlltStatistics:
    """For each dimension, the scatter of frames around their component means, divided by the variance of that dimension."""

    scatter: Array  # float64 [dim, dim, dim]
    count: float = 0.0

    @classmethod
    def empty(cls, dim: int) -> MlltStatistics:
        return cls(np.zeros((dim, dim, dim)))

    def accumulate(self, x: Array, components: Array, gmm: Gmm) -> None:
        """Add frames x [T, dim], where frame t belongs to components[t]."""
        order = np.argsort(components, kind="stable")
        ordered = components[order]
        deviation = (x - gmm.mean[components]).astype(np.float64)[order]
        begins = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]])
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            part = deviation[begin:end]
            self.scatter += (part.T @ part) / gmm.variance[ordered[begin]].astype(np.float64)[:, None, None]
        self.count += len(x)

    def add(self, other: MlltStatistics) -> None:
        self.scatter += other.scatter
        self.count += other.count

    def transform(self, sweeps: int = 50) -> Array:
        """Estimate the matrix under which diagonal Gaussians have the largest likelihood, row by row, float64 [dim, dim]."""
        dim = len(self.scatter)
        matrix = np.eye(dim)
        inverses = np.linalg.inv(self.scatter + 1e-6 * self.count * np.eye(dim) / dim)
        for _ in range(sweeps):
            for d in range(dim):
                cofactors = np.linalg.inv(matrix)[:, d] * abs(np.linalg.det(matrix))
                row = cofactors @ inverses[d]
                matrix[d] = row * np.sqrt(self.count / (row @ cofactors))
        return matrix


def transform_gmm(gmm: Gmm, matrix: Array) -> Gmm:
    """Return the mixtures in the transformed space; variances ignore correlations, so estimate them again afterwards."""
    return Gmm(gmm.first, gmm.weight, gmm.mean @ matrix.T, gmm.variance @ (matrix * matrix).T)
