"""Mixing matrices of topologies: spectra, contraction per round, rounds to agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from roundelay.errors import UsageError
from roundelay.topology.matchings import TOPOLOGIES, Matrix, Partners, Topology, topology

# -------------------------------------------------------------------------------------------------- the matrices


def mixing_matrix(partners: Partners) -> Matrix:
    """T of one round: doubly stochastic, 1/2 on both ends of a pair, 1 on whoever sits out."""
    identity = np.eye(len(partners))
    return (identity + identity[partners]) / 2


def neighbor_matrix(name: str, size: int) -> Matrix:
    """T of synchronous neighbour averaging, everybody with all its neighbours at once; on a ring T_1.

    T_ij = 1 / (1 + max(degree_i, degree_j)) on edges, the rest on the diagonal
    """
    entry = topology(name)
    if entry.random:
        fixed = ", ".join(sorted(t.name for t in TOPOLOGIES.values() if not t.random))
        raise UsageError(f"topology '{name}' has no fixed neighbours", where="topology", hint=f"choose one of: {fixed}")
    linked = np.zeros((size, size), dtype=bool)
    for i, j in entry.edges(size):
        linked[i, j] = linked[j, i] = True
    degree = linked.sum(axis=1)
    matrix: Matrix = np.where(linked, 1 / (1 + np.maximum.outer(degree, degree)), 0.0)
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return matrix


def neighbor_row(name: str, rank: int, size: int) -> dict[int, float]:
    """The weights with which one learner averages its neighbours and itself."""
    if not 0 <= rank < size:
        raise UsageError(f"no rank {rank} among {size} learners", where="topology", hint=f"ranks run from 0 to {size - 1}")
    return {j: float(weight) for j, weight in enumerate(neighbor_matrix(name, size)[rank]) if weight > 0}


# --------------------------------------------------------------------------------------------------- the figures


@dataclass(frozen=True)
class Spectrum:
    """What the eigenvalues of a mixing matrix say, the one of the mean left aside."""

    second: float  # largest modulus: the lasting rate at which the spread shrinks
    smallest: float  # smallest real part: T w - a w on a quadratic is stable up to a = 1 + smallest
    sigma: float  # largest singular value: the worst a single application can do

    @property
    def gap(self) -> float:
        return 1 - self.second


def spectrum(matrix: Matrix) -> Spectrum:
    """Second eigenvalue, smallest eigenvalue and second singular value of a doubly stochastic matrix."""
    size = len(matrix)
    if size == 1:
        return Spectrum(second=0.0, smallest=0.0, sigma=0.0)
    # In a basis without the mean its eigenvalue is gone, whatever the multiplicity of the others.
    columns = np.linalg.qr(np.column_stack([np.ones(size), np.eye(size)[:, 1:]]))[0][:, 1:]
    reduced = columns.T @ matrix @ columns
    eigenvalues = np.linalg.eigvals(reduced)
    sigma = float(np.linalg.norm(reduced, 2))
    second = float(np.abs(eigenvalues).max())
    # Rounding gives a nilpotent matrix eigenvalues of about the square root of its noise; they mean zero.
    return Spectrum(second if second > 1e-6 * sigma else 0.0, float(eigenvalues.real.min()), sigma)


def _spread_map(entry: Topology, size: int, rounds: int) -> tuple[Matrix, float]:
    """T_rounds ... T_1 acting on the spread, as a matrix of ordinary size and the logarithm of its scale.

    Recentred and rescaled in every round, since the product over a long period is smaller than any float.
    """
    product = np.eye(size) - 1 / size
    log_scale = 0.0
    for r in range(rounds):
        product = (product + product[entry.matching(r, size)]) / 2
        product -= product.mean(axis=0)
        scale = float(np.abs(product).max())
        if scale < 1e-12:  # the round has wiped the spread out; what is left is rounding
            return np.zeros((size, size)), 0.0
        product /= scale
        log_scale += math.log(scale)
    return product, log_scale


@lru_cache(maxsize=256)
def contraction(name: str, size: int) -> float:
    """Factor per round by which the expected squared spread shrinks when nobody computes gradients.

    scheduled: |lambda_2(P)|^(2/p), the lasting rate        drawn: ((|P|_F^2 - 1) / (L - 1))^(1/p), in expectation
    """
    entry = topology(name)
    rounds = entry.sweep(size)
    product, log_scale = _spread_map(entry, size, rounds)
    if entry.random:
        shrink = math.sqrt(float((product**2).sum()) / max(1, size - 1))
    else:
        shrink = spectrum(product).second
    return math.exp(2 / rounds * (math.log(shrink) + log_scale)) if shrink > 0 else 0.0


def gap(name: str, size: int) -> float:
    """Spectral gap per round, 1 - sqrt(contraction): 1 is agreement at once, 0 is none ever."""
    return 1 - math.sqrt(contraction(name, size))


def rounds_to_agreement(name: str, size: int, factor: float = 0.01) -> int:
    """Rounds until the spread is down to this factor of its start.

    scheduled: for the worst start, |T_n ... T_1 - J|_2 <= factor        drawn: in expectation, c^(n/2) <= factor
    """
    if not 0 < factor < 1:
        raise UsageError(f"cannot count rounds to a factor of {factor}", hint="give a factor between 0 and 1")
    entry = topology(name)
    if size == 1:
        return 0
    period = entry.sweep(size)
    if entry.random:
        c = contraction(name, size)
        return period if c == 0 else math.ceil(2 * math.log(factor) / math.log(c))

    whole, whole_scale = _spread_map(entry, size, period)
    whole *= math.exp(whole_scale)

    def reached(rounds: int) -> bool:
        sweeps, rest = divmod(rounds, period)
        part, part_scale = _spread_map(entry, size, rest)
        left = part @ np.linalg.matrix_power(whole, sweeps)
        return bool(np.linalg.norm(left, 2) * math.exp(part_scale) <= factor)

    # No round ever widens the spread, so the answer can be bracketed and bisected.
    low, high = 0, 1
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def describe(name: str, size: int) -> dict[str, Any]:
    """What one entry of the table promises for this many learners, ready for JSON."""
    entry = topology(name)
    return {
        "name": entry.name,
        "description": entry.description,
        "equation": entry.equation,
        "size": size,
        "random": entry.random,
        "period": entry.period(size),
        "edges": [list(pair) for pair in sorted(entry.edges(size))],
        "contraction": contraction(name, size),
        "gap": gap(name, size),
        "rounds_to_1_percent": rounds_to_agreement(name, size),
    }
