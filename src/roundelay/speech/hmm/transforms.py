"""Linear transforms of features for diagonal Gaussians: discriminant analysis of spliced frames, and a maximum-likelihood
rotation after it (semi-tied covariances), so that what the Gaussians cannot model, correlation, is mostly gone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.viterbi import Array


@dataclass
class LdaStatistics:
    """Frames and sums by class, and the sum of outer products of all frames."""

    count: Array  # float64 [classes]
    linear: Array  # float64 [classes, dim]
    square: Array  # float64 [dim, dim]

    @classmethod
    def empty(cls, classes: int, dim: int) -> LdaStatistics:
        return cls(np.zeros(classes), np.zeros((classes, dim)), np.zeros((dim, dim)))

    def accumulate(self, x: Array, classes: Array) -> None:
        wide = x.astype(np.float64)
        self.count += np.bincount(classes, minlength=len(self.count))
        np.add.at(self.linear, classes, wide)
        self.square += wide.T @ wide

    def add(self, other: LdaStatistics) -> None:
        self.count += other.count
        self.linear += other.linear
        self.square += other.square

    def transform(self, dim: int) -> Array:
        """float32 [dim, input dim]: the directions that tell classes apart best, with unit variance inside classes."""
        total = self.count.sum()
        mean = self.linear.sum(0) / total
        seen = self.count > 0
        centred = self.linear[seen] / self.count[seen, None] - mean
        between = (centred * self.count[seen, None]).T @ centred / total
        within = self.square / total - np.outer(mean, mean) - between
        within += 1e-6 * np.trace(within) / len(within) * np.eye(len(within))
        values, vectors = np.linalg.eigh(within)
        whiten = (vectors / np.sqrt(values)).T
        values, vectors = np.linalg.eigh(whiten @ between @ whiten.T)
        rows: Array = (vectors[:, ::-1].T @ whiten)[:dim]
        # eigh leaves signs open: fixed here, so that the same statistics give the same model everywhere.
        rows = rows * np.where(rows[np.arange(len(rows)), np.abs(rows).argmax(1)] < 0, -1.0, 1.0)[:, None]
        return rows.astype(np.float32)


@dataclass
class MlltStatistics:
    """For every dimension the scatter of frames about the means of their components, divided by variance there."""

    scatter: Array  # float64 [dim, dim, dim]
    count: float = 0.0

    @classmethod
    def empty(cls, dim: int) -> MlltStatistics:
        return cls(np.zeros((dim, dim, dim)))

    def accumulate(self, x: Array, components: Array, gmm: Gmm) -> None:
        order = np.argsort(components, kind="stable")
        ordered = components[order]
        away = (x - gmm.mean[components]).astype(np.float64)[order]
        begins = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]])
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            part = away[begin:end]
            self.scatter += (part.T @ part) / gmm.variance[ordered[begin]].astype(np.float64)[:, None, None]
        self.count += len(x)

    def add(self, other: MlltStatistics) -> None:
        self.scatter += other.scatter
        self.count += other.count

    def transform(self, sweeps: int = 50) -> Array:
        """float64 [dim, dim]: the square matrix under which diagonal Gaussians fit best, row by row."""
        dim = len(self.scatter)
        matrix = np.eye(dim)
        inverses = np.linalg.inv(self.scatter + 1e-6 * self.count * np.eye(dim) / dim)
        for _ in range(sweeps):
            for d in range(dim):
                cofactors = np.linalg.inv(matrix)[:, d] * abs(np.linalg.det(matrix))
                row = cofactors @ inverses[d]
                matrix[d] = row * np.sqrt(self.count / (row @ cofactors))
        return matrix


def rotated(gmm: Gmm, matrix: Array) -> Gmm:
    """Mixtures moved into the rotated space; variances as if dimensions were independent, to be estimated again."""
    return Gmm(gmm.first, gmm.weight, gmm.mean @ matrix.T, gmm.variance @ (matrix * matrix).T)
