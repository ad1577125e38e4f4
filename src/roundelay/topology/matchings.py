"""Matchings: which pairs of ranks exchange models in each gossip round, and how fast that leads to agreement.

    w  <-  T_r w          T_r = 1/2 for the two ranks of each pair of round r, 1 for a rank that sits out

A topology is a pure function of (round, size, seed). Every rank computes it locally, so all ranks agree on all pairs
without a message. The numbers below belong to the matrices of the rounds, not to the graph of the topology:

    contraction c     E |spread|^2 after round r+1  =  c  E |spread|^2 after round r,     spread = w - mean(w)
    scheduled         c = |lambda_2(P)|^(2/p)       P = T_p ... T_1, the product over one period of p rounds
    random            c = rho^(1/p)                 rho = lambda_2(E[P^t P]) = (|P|_F^2 - 1) / (L - 1)

The scheduled P is not symmetric, so its singular value only bounds the first period; the eigenvalue is the asymptotic
rate. The random form holds because a uniformly relabeled P has E[P^t P] = a I + b J: the trace fixes a and b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import UsageError, did_you_mean

Matrix = NDArray[np.float64]
Pair = tuple[int, int]
Partners = list[int]
"""partners[i] is the rank that i exchanges models with; i itself if it sits the round out."""

GOLDEN = 2654435769  # 2^32 / golden ratio: its multiples modulo 2^32 scatter evenly


@dataclass(frozen=True)
class Topology:
    """A topology: its name, its equation, and the matching of every round."""

    name: str
    description: str
    equation: str
    partners: Callable[[int, int, int], Partners]
    """(round, size, seed) -> the matching. Arguments are validated already."""
    sweep: Callable[[int], int]
    """size -> rounds until the schedule repeats, or until the next independent sample."""
    random: bool

    def matching(self, round: int, size: int, seed: int = 0) -> Partners:
        """Return the partner of every rank in this round; a rank that sits out is its own partner."""
        if size < 1 or round < 0:
            raise UsageError(
                f"a matching must have size >= 1 and round >= 0 (got size {size}, round {round})",
                where=f"topology {self.name}",
                hint="count rounds from 0 and ranks from 1",
            )
        return self.partners(round, size, seed)

    def period(self, size: int) -> int | None:
        """Return the number of rounds after which the schedule repeats; None if each sweep is random."""
        return None if self.random else self.sweep(size)

    def edges(self, size: int) -> set[Pair]:
        """Return all pairs (i, j), i < j, that can ever exchange models."""
        if self.random:
            return {(i, j) for i in range(size) for j in range(i + 1, size)}
        rounds = (self.matching(r, size) for r in range(self.sweep(size)))
        return {(i, j) for partners in rounds for i, j in enumerate(partners) if i < j}


# ------------------------------------------------------------------------------------------------- schedules


def _pairs_to_partners(pairs: list[Pair], size: int) -> Partners:
    partners = list(range(size))
    for i, j in pairs:
        partners[i], partners[j] = j, i
    return partners


def _ring_colors(size: int) -> int:
    return 1 if size <= 2 else 2 + size % 2


def _ring(round: int, size: int, seed: int) -> Partners:
    """Give edge (i, i+1) the color i mod 2; the edge that closes an odd ring needs a third color."""
    if size <= 2:
        return list(range(size))[::-1]
    colors = _ring_colors(size)
    color = round % colors
    if color == 2:
        return _pairs_to_partners([(size - 1, 0)], size)
    last = size if colors == 2 else size - 1
    return _pairs_to_partners([(i, (i + 1) % size) for i in range(color, last, 2)], size)


def _shuffled(size: int, seed: int, purpose: bytes, index: int) -> list[int]:
    """Return a uniformly random order of the ranks, determined by (seed, purpose, index).

    It sorts raw words of the bit generator, which numpy guarantees to keep. `permutation` may change between numpy versions,
    and ranks with different versions must still agree.
    """
    key = np.random.SeedSequence([seed % 2**64, int.from_bytes(purpose, "big"), index])
    words = np.random.PCG64(key).random_raw(size)
    return [int(i) for i in np.argsort(words, kind="stable")]


def _random_ring(round: int, size: int, seed: int) -> Partners:
    order = _shuffled(size, seed, b"random_ring", round)
    return _pairs_to_partners(list(zip(order[0::2], order[1::2], strict=False)), size)


def _random_cycle(round: int, size: int, seed: int) -> Partners:
    cycle, color = divmod(round, _ring_colors(size))
    order = _shuffled(size, seed, b"random_cycle", cycle)
    positions = _ring(color, size, seed)
    return _pairs_to_partners([(order[a], order[b]) for a, b in enumerate(positions)], size)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _exponential_distances(size: int) -> int:
    return max(1, (size - 1).bit_length())


def _exponential_sweep(size: int) -> int:
    distances = _exponential_distances(size)
    return distances if _is_power_of_two(size) else distances * size


def _exponential(round: int, size: int, seed: int) -> Partners:
    """Split the ranks into cycles by steps of length d, and pair each cycle from a start that moves.

    For a power of two the start is fixed and this is the hypercube, i xor d: exact agreement after log2(size) rounds.
    Otherwise some cycles are odd and one rank of each sits out. The start moves by one per round, and by a stride coprime to
    the size per sweep, so that all ranks sit out equally often. Long steps come first, which mixes best (measured).
    """
    distances = _exponential_distances(size)
    sweep, number = divmod(round, distances)
    step = 2 ** (distances - 1 - number)
    start = 0
    if not _is_power_of_two(size):
        stride = next(c for c in range(distances, distances + size) if math.gcd(c, size) == 1)
        start = sweep * stride + number
    cycles = math.gcd(step, size)
    heads = [start + c + 2 * k * step for c in range(cycles) for k in range(size // cycles // 2)]
    return _pairs_to_partners([(head % size, (head + step) % size) for head in heads], size)


def _complete_sweep(size: int) -> int:
    return max(1, size - 1 + size % 2)


@lru_cache(maxsize=64)
def _complete_order(colors: int) -> tuple[int, ...]:
    """Return the order of the colors of the tournament.

    In natural order two successive colors only shift the pairs by one position, so the complete graph mixes no faster than a
    ring (a contraction of 0.96 per round with 32 ranks). Scattered by a quadratic sequence they mix faster than random pairs.
    """
    return tuple(sorted(range(colors), key=lambda c: c * c * GOLDEN % 2**32))


def _complete(round: int, size: int, seed: int) -> Partners:
    """Pair i and j in color c if i + j = c (mod m), the circle method. A rank that is its own partner gets rank m, if any."""
    if size <= 2:
        return list(range(size))[::-1]
    m = _complete_sweep(size)
    color = _complete_order(m)[round % m]
    partners = [(color - i) % m for i in range(m)]
    if size > m:
        unpaired = next(i for i, j in enumerate(partners) if i == j)
        partners[unpaired] = m
        partners.append(unpaired)
    return partners


TOPOLOGIES: dict[str, Topology] = {
    entry.name: entry
    for entry in (
        Topology(
            name="ring",
            description="fixed ring; one color of its edges per round (2 colors for an even ring, 3 for an odd one)",
            equation="c = cos^2(2 pi / L) per round, L even and > 2",
            partners=_ring,
            sweep=_ring_colors,
            random=False,
        ),
        Topology(
            name="random_ring",
            description="new random pairs in every round; one rank sits out if their number is odd",
            equation="c = 1/2 - 1/(2 (L - 1)), L even; 1/2, L odd",
            partners=_random_ring,
            sweep=lambda size: 1,
            random=True,
        ),
        Topology(
            name="random_cycle",
            description="the colors of a ring over shuffled ranks, shuffled again after each sweep of the colors",
            equation="c = (L/4 - 1) / (L - 1) per sweep of two rounds, L even and > 2",
            partners=_random_cycle,
            sweep=_ring_colors,
            random=True,
        ),
        Topology(
            name="exponential",
            description="partners at distances that halve from round to round; the hypercube if L is a power of two",
            equation="c = 0 after log2(L) rounds, L a power of two",
            partners=_exponential,
            sweep=_exponential_sweep,
            random=False,
        ),
        Topology(
            name="complete",
            description="round-robin tournament; all pairs once per period",
            equation="i + j = c_r (mod m), m = L - 1 (L even) or L (L odd)",
            partners=_complete,
            sweep=_complete_sweep,
            random=False,
        ),
    )
}


def topology(name: str) -> Topology:
    """Return the topology of this name. Raises UsageError with the most similar name."""
    try:
        return TOPOLOGIES[name]
    except KeyError:
        raise UsageError(f"unknown topology '{name}'", where="topology", hint=did_you_mean(name, TOPOLOGIES)) from None


def matching(name: str, round: int, size: int, seed: int = 0) -> Partners:
    """Return the partner of every rank in this round; a rank that sits out is its own partner."""
    return topology(name).matching(round, size, seed)
