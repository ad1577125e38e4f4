"""fMLLR: the affine feature transform of a speaker that maximizes the likelihood of the aligned tied states.

    y_t = A x_t + b       maximizing   sum_t  log p(y_t | state of t) + log |det A|

Also known as constrained MLLR (Gales 1998): given the other rows, a row of [A b] has a closed form, and a few sweeps over the
rows suffice. A prior of N pseudo-frames keeps the transform of a speaker with little data near the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.viterbi import Array

SWEEPS = 10


@dataclass
class SpeakerStatistics:
    """Sums over a speaker's frames, with z = [x 1].

    For each dimension d: z z' weighted by the precision of the frame's Gaussians, and z weighted by precision times mean.
    """

    quadratic: Array  # float64 [dim, dim + 1, dim + 1]
    linear: Array  # float64 [dim, dim + 1]
    frames: float = 0.0

    @classmethod
    def empty(cls, dim: int) -> SpeakerStatistics:
        return cls(np.zeros((dim, dim + 1, dim + 1)), np.zeros((dim, dim + 1)))

    @classmethod
    def expected(cls, gmm: Gmm, frames: float) -> SpeakerStatistics:
        """Return the expected statistics of `frames` frames drawn from the mixtures, all pdfs equally often.

        Their transform is the identity, so they serve as its prior.
        """
        statistics = cls.empty(gmm.dim)
        share = gmm.weight.astype(np.float64)[:, None] * frames / gmm.weight.sum()
        mean, variance = gmm.mean.astype(np.float64), gmm.variance.astype(np.float64)
        z = _with_one(mean)
        for d in range(gmm.dim):
            weighted = share / variance[:, d : d + 1]
            statistics.quadratic[d] = (z * weighted).T @ z + np.diag(np.append((weighted * variance).sum(0), 0.0))
        statistics.linear = (share * mean / variance).T @ z
        statistics.frames = frames
        return statistics

    def accumulate(self, x: Array, pdfs: Array, gmm: Gmm) -> None:
        """Accumulate frames x [T, dim], where frame t is aligned to pdfs[t]."""
        precision, weighted_mean = _expected_precisions(x, pdfs, gmm)
        z = _with_one(x.astype(np.float64))
        for d in range(x.shape[1]):
            self.quadratic[d] += (z * precision[:, d : d + 1]).T @ z
        self.linear += weighted_mean.T @ z
        self.frames += len(x)

    def __add__(self, other: SpeakerStatistics) -> SpeakerStatistics:
        return SpeakerStatistics(self.quadratic + other.quadratic, self.linear + other.linear, self.frames + other.frames)

    def transform(self) -> Array:
        """Estimate the transform, float64 [dim, dim + 1]: A and, in the last column, b.

        The quadratic statistics must be invertible; with a prior (`expected`) they always are.
        """
        dim = len(self.linear)
        matrix = np.eye(dim, dim + 1)
        inverses = np.linalg.inv(self.quadratic)
        for _ in range(SWEEPS):
            for d in range(dim):
                matrix[d] = _best_row(matrix, d, inverses[d], self.linear[d], self.frames)
        return matrix


def _with_one(x: Array) -> Array:
    return np.hstack([x, np.ones((len(x), 1))])


def _best_row(matrix: Array, d: int, inverse: Array, linear: Array, frames: float) -> Array:
    """Return the row w that maximizes frames * log |c w| + linear w - w' G w / 2, where c are the cofactors of the row.

    w = (a c + linear) G^-1, where a is one of the two roots of a quadratic equation.
    """
    dim = len(matrix)
    cofactors = np.append(np.linalg.inv(matrix[:, :dim])[:, d], 0.0)
    square, slope = cofactors @ inverse @ cofactors, cofactors @ inverse @ linear
    root = np.sqrt(slope * slope + 4 * square * frames)
    choices = [(-slope + sign * root) / (2 * square) for sign in (1, -1)]
    best = max(choices, key=lambda a: frames * np.log(abs(a * square + slope)) - a * a * square / 2)
    return np.asarray((best * cofactors + linear) @ inverse)


def _expected_precisions(x: Array, pdfs: Array, gmm: Gmm) -> tuple[Array, Array]:
    """Return each frame's posterior-weighted precision, and precision times mean, over the Gaussians of its pdf."""
    precision, weighted_mean = np.empty((2, *x.shape))
    mean, inverse = gmm.mean.astype(np.float64), 1.0 / gmm.variance.astype(np.float64)
    for pdf in np.unique(pdfs):
        frames, own = pdfs == pdf, slice(gmm.first[pdf], gmm.first[pdf + 1])
        deviation = x[frames].astype(np.float64)[:, None] - mean[own]
        score = np.log(gmm.weight[own]) + 0.5 * (np.log(inverse[own]).sum(1) - (deviation * deviation * inverse[own]).sum(2))
        posterior = np.exp(score - score.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
        precision[frames], weighted_mean[frames] = posterior @ inverse[own], posterior @ (inverse[own] * mean[own])
    return precision, weighted_mean


def apply_fmllr(x: Array, matrix: Array) -> Array:
    """Return A x + b, float32."""
    return np.asarray(x @ matrix[:, :-1].T + matrix[:, -1], np.float32)
