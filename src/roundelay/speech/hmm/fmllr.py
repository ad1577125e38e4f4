"""Features fitted to a speaker: the affine transform of what the Gaussians see that suits the tied states best.

    y_t = A x_t + b       maximising   sum_t  log p(y_t | state of t) + log |det A|

Constrained maximum-likelihood linear regression, or fMLLR (Gales 1998): given the other rows, a row of [A b] has a closed form,
and a few sweeps over the rows suffice. A speaker who has said little is held near the identity by a prior worth some frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.viterbi import Array

SWEEPS = 10


@dataclass
class SpeakerStatistics:
    """Sums over a speaker's frames, with z = [x 1]: for every dimension d, z z' weighed by the precision that the frame's
    Gaussians have there, and z weighed by precision times mean."""

    quadratic: Array  # float64 [dim, dim + 1, dim + 1]
    linear: Array  # float64 [dim, dim + 1]
    frames: float = 0.0

    @classmethod
    def empty(cls, dim: int) -> SpeakerStatistics:
        return cls(np.zeros((dim, dim + 1, dim + 1)), np.zeros((dim, dim + 1)))

    @classmethod
    def expected(cls, gmm: Gmm, frames: float) -> SpeakerStatistics:
        """Of so many frames that the mixtures themselves have drawn, every pdf equally often: the identity suits them best."""
        found = cls.empty(gmm.dim)
        share = gmm.weight.astype(np.float64)[:, None] * frames / gmm.weight.sum()
        mean, variance = gmm.mean.astype(np.float64), gmm.variance.astype(np.float64)
        z = _with_one(mean)
        for d in range(gmm.dim):
            weighed = share / variance[:, d : d + 1]
            found.quadratic[d] = (z * weighed).T @ z + np.diag(np.append((weighed * variance).sum(0), 0.0))
        found.linear = (share * mean / variance).T @ z
        found.frames = frames
        return found

    def accumulate(self, x: Array, pdfs: Array, gmm: Gmm) -> None:
        """Frames [T, dim] aligned to pdfs [T]."""
        precision, pulled = _pulls(x, pdfs, gmm)
        z = _with_one(x.astype(np.float64))
        for d in range(x.shape[1]):
            self.quadratic[d] += (z * precision[:, d : d + 1]).T @ z
        self.linear += pulled.T @ z
        self.frames += len(x)

    def __add__(self, other: SpeakerStatistics) -> SpeakerStatistics:
        return SpeakerStatistics(self.quadratic + other.quadratic, self.linear + other.linear, self.frames + other.frames)

    def transform(self) -> Array:
        """float64 [dim, dim + 1]: A and, in the last column, b. Needs as many frames as make its matrices regular; a prior
        (`expected`) always does."""
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
    """The row that maximises frames * log |c w| + linear w - w' G w / 2, where c are the row's cofactors:
    w = (a c + linear) G^-1, with a one of the roots of a quadratic."""
    dim = len(matrix)
    cofactors = np.append(np.linalg.inv(matrix[:, :dim])[:, d], 0.0)
    curved, sloped = cofactors @ inverse @ cofactors, cofactors @ inverse @ linear
    root = np.sqrt(sloped * sloped + 4 * curved * frames)
    choices = [(-sloped + sign * root) / (2 * curved) for sign in (1, -1)]
    best = max(choices, key=lambda a: frames * np.log(abs(a * curved + sloped)) - a * a * curved / 2)
    return np.asarray((best * cofactors + linear) @ inverse)


def _pulls(x: Array, pdfs: Array, gmm: Gmm) -> tuple[Array, Array]:
    """For every frame the precision of its pdf's Gaussians, and precision times mean, both weighed by their posteriors."""
    precision, pulled = np.empty((2, *x.shape))
    mean, sharp = gmm.mean.astype(np.float64), 1.0 / gmm.variance.astype(np.float64)
    for pdf in np.unique(pdfs):
        mine, own = pdfs == pdf, slice(gmm.first[pdf], gmm.first[pdf + 1])
        away = x[mine].astype(np.float64)[:, None] - mean[own]
        score = np.log(gmm.weight[own]) + 0.5 * (np.log(sharp[own]).sum(1) - (away * away * sharp[own]).sum(2))
        share = np.exp(score - score.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        precision[mine], pulled[mine] = share @ sharp[own], share @ (sharp[own] * mean[own])
    return precision, pulled


def adapted(x: Array, matrix: Array) -> Array:
    """A x + b, float32."""
    return np.asarray(x @ matrix[:, :-1].T + matrix[:, -1], np.float32)


def log_volume(matrix: Array) -> float:
    """log |det A|: what a frame's log likelihood gains by being measured in the transformed space."""
    return float(np.linalg.slogdet(matrix[:, :-1])[1])
