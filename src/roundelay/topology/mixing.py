"""Mixing matrices of topologies: spectra, contraction per round, rounds to agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from roundelay.errors import UsageError
from roundelay.topology.matchings import TOPOLOGIES, Matrix, Partners, Topology, topology

# -------------------------------------------------------------------------------------------------- matrices


def mixing_matrix(partners: Partners) -> Matrix:
    """Return T of one round: doubly stochastic, 1/2 for both ranks of a pair, 1 for a rank that sits out."""
    identity = np.eye(len(partners))
    return (identity + identity[partners]) / 2


def neighbor_matrix(name: str, size: int) -> Matrix:
    """Return T of synchronous averaging, in which every rank averages with all its neighbors at once; on a ring T_1.

    T_ij = 1 / (1 + max(degree_i, degree_j)) on edges, the rest on the diagonal
    """
    entry = topology(name)
    if entry.random:
        fixed = ", ".join(sorted(t.name for t in TOPOLOGIES.values() if not t.random))
        raise UsageError(f"topology '{name}' has no fixed neighbors", where="topology", hint=f"choose one of: {fixed}")
    linked = np.zeros((size, size), dtype=bool)
    for i, j in entry.edges(size):
        linked[i, j] = linked[j, i] = True
    degree = linked.sum(axis=1)
    matrix: Matrix = np.where(linked, 1 / (1 + np.maximum.outer(degree, degree)), 0.0)
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return matrix


def neighbor_row(name: str, rank: int, size: int) -> dict[int, float]:
    """Return the weights with which one rank averages its neighbors and itself."""
    if not 0 <= rank < size:
        raise UsageError(f"rank must be in [0, {size - 1}] (got {rank})", where="topology", hint="pass a rank of the job")
    return {j: float(weight) for j, weight in enumerate(neighbor_matrix(name, size)[rank]) if weight > 0}


# --------------------------------------------------------------------------------------------------- spectra


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a mixing matrix, without the eigenvalue 1 of the mean."""

    second: float
    """Largest modulus: the asymptotic rate at which the spread shrinks."""
    smallest: float
    """Smallest real part: T w - a w on a quadratic is stable up to a = 1 + smallest."""
    sigma: float
    """Largest singular value: the worst case of one multiplication."""

    @property
    def gap(self) -> float:
        return 1 - self.second


def spectrum(matrix: Matrix) -> Spectrum:
    """Return the second and smallest eigenvalue and the second singular value of a doubly stochastic matrix."""
    size = len(matrix)
    if size == 1:
        return Spectrum(second=0.0, smallest=0.0, sigma=0.0)
    # A basis orthogonal to the mean removes its eigenvalue, also if that has a multiplicity.
    columns = np.linalg.qr(np.column_stack([np.ones(size), np.eye(size)[:, 1:]]))[0][:, 1:]
    reduced = columns.T @ matrix @ columns
    eigenvalues = np.linalg.eigvals(reduced)
    sigma = float(np.linalg.norm(reduced, 2))
    second = float(np.abs(eigenvalues).max())
    # Rounding gives a nilpotent matrix eigenvalues of about the square root of its noise: they count as zero.
    return Spectrum(second if second > 1e-6 * sigma else 0.0, float(eigenvalues.real.min()), sigma)


def _spread_map(entry: Topology, size: int, rounds: int) -> tuple[Matrix, float]:
    """Return T_rounds ... T_1 restricted to the spread, as a matrix with entries near 1 and the logarithm of its scale.

    It is centered and rescaled in every round, since the product over a long period would underflow.
    """
    product = np.eye(size) - 1 / size
    log_scale = 0.0
    for r in range(rounds):
        product = (product + product[entry.matching(r, size)]) / 2
        product -= product.mean(axis=0)
        scale = float(np.abs(product).max())
        if scale < 1e-12:  # agreement is exact, the rest is rounding
            return np.zeros((size, size)), 0.0
        product /= scale
        log_scale += math.log(scale)
    return product, log_scale


@lru_cache(maxsize=256)
def contraction(name: str, size: int) -> float:
    """Return the factor per round by which the expected squared spread shrinks without gradients.

    scheduled: |lambda_2(P)|^(2/p), asymptotically        random: ((|P|_F^2 - 1) / (L - 1))^(1/p), in expectation
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
    """Return the spectral gap per round, 1 - sqrt(contraction). 1: agreement in one round; 0: no agreement."""
    return 1 - math.sqrt(contraction(name, size))


def rounds_to_agreement(name: str, size: int, factor: float = 0.01) -> int:
    """Return the number of rounds until the spread has shrunk by this factor.

    scheduled: for the worst start, |T_n ... T_1 - J|_2 <= factor        random: in expectation, c^(n/2) <= factor
    """
    if not 0 < factor < 1:
        raise UsageError(f"factor must be between 0 and 1 (got {factor})", hint="pass for example factor=0.01")
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

    # No round increases the spread, so the answer can be bracketed and bisected.
    low, high = 0, 1
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def describe(name: str, size: int) -> dict[str, Any]:
    """Return the properties of one topology with `size` ranks, ready for JSON."""
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
