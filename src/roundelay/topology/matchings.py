"""Who meets whom: the matchings of each gossip round, and how fast they bring learners to agreement.

    w  <-  T_r w          T_r = 1/2 on the two ends of each pair of round r, 1 on whoever sits out

A topology is a pure function of (round, size, seed). Every learner computes it for itself, so they agree on all
pairs without a message. The figures below belong to the matrices that really run, not to the graph drawn on paper:

    contraction c     E |spread|^2 after round r+1  =  c  E |spread|^2 after round r,     spread = w - mean(w)
    scheduled         c = |lambda_2(P)|^(2/p)       P = T_p ... T_1, the product over one period of p rounds
    drawn             c = rho^(1/p)                 rho = lambda_2(E[P^t P]) = (|P|_F^2 - 1) / (L - 1)

The scheduled P is not symmetric, so its singular value only bounds the first period; the eigenvalue is the lasting
rate. The drawn form holds because a uniformly relabelled P has E[P^t P] = a I + b J: the trace fixes a and b.
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
Partners = list[int]  # partners[i] is whom i meets; i itself when it sits the round out

GOLDEN = 2654435769  # 2^32 / golden ratio: multiples of it modulo 2^32 scatter evenly, the same on every machine


@dataclass(frozen=True)
class Topology:
    """One line of the table: a name, its law, and the matching of every round."""

    name: str
    description: str
    equation: str
    draw: Callable[[int, int, int], Partners]  # (round, size, seed), arguments already checked
    sweep: Callable[[int], int]  # rounds until the schedule repeats, or until the next independent draw
    random: bool

    def matching(self, round: int, size: int, seed: int = 0) -> Partners:
        """The partner of every learner in this round, itself for whoever sits out."""
        if size < 1 or round < 0:
            raise UsageError(
                f"no matching for round {round} of {size} learners",
                where=f"topology {self.name}",
                hint="count rounds from 0 and learners from 1",
            )
        return self.draw(round, size, seed)

    def period(self, size: int) -> int | None:
        """Rounds after which the schedule repeats; None when each sweep is drawn afresh."""
        return None if self.random else self.sweep(size)

    def edges(self, size: int) -> set[Pair]:
        """All pairs (i, j), i < j, that can ever meet."""
        if self.random:
            return {(i, j) for i in range(size) for j in range(i + 1, size)}
        rounds = (self.matching(r, size) for r in range(self.sweep(size)))
        return {(i, j) for partners in rounds for i, j in enumerate(partners) if i < j}


# ------------------------------------------------------------------------------------------------- the schedules


def _pairs_to_partners(pairs: list[Pair], size: int) -> Partners:
    partners = list(range(size))
    for i, j in pairs:
        partners[i], partners[j] = j, i
    return partners


def _ring_colours(size: int) -> int:
    return 1 if size <= 2 else 2 + size % 2


def _ring(round: int, size: int, seed: int) -> Partners:
    """Edge (i, i+1) has colour i mod 2; the edge that closes an odd ring needs a third colour."""
    if size <= 2:
        return list(range(size))[::-1]
    colours = _ring_colours(size)
    colour = round % colours
    if colour == 2:
        return _pairs_to_partners([(size - 1, 0)], size)
    last = size if colours == 2 else size - 1
    return _pairs_to_partners([(i, (i + 1) % size) for i in range(colour, last, 2)], size)


def _shuffled(size: int, seed: int, purpose: bytes, index: int) -> list[int]:
    """A uniformly random order of the learners, fixed by (seed, purpose, index).

    Sorting raw words instead of asking for a permutation: numpy promises the words for ever, but may change the way it
    shuffles, and learners with different numpy versions must still meet.
    """
    key = np.random.SeedSequence([seed % 2**64, int.from_bytes(purpose, "big"), index])
    words = np.random.PCG64(key).random_raw(size)
    return [int(i) for i in np.argsort(words, kind="stable")]


def _random_ring(round: int, size: int, seed: int) -> Partners:
    order = _shuffled(size, seed, b"random_ring", round)
    return _pairs_to_partners(list(zip(order[0::2], order[1::2], strict=False)), size)


def _random_cycle(round: int, size: int, seed: int) -> Partners:
    cycle, colour = divmod(round, _ring_colours(size))
    order = _shuffled(size, seed, b"random_cycle", cycle)
    places = _ring(colour, size, seed)
    return _pairs_to_partners([(order[a], order[b]) for a, b in enumerate(places)], size)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _exponential_distances(size: int) -> int:
    return max(1, (size - 1).bit_length())


def _exponential_sweep(size: int) -> int:
    distances = _exponential_distances(size)
    return distances if _is_power_of_two(size) else distances * size


def _exponential(round: int, size: int, seed: int) -> Partners:
    """Steps of length d split the learners into cycles; each cycle is paired up from a start that moves on.

    With a power of two the start stays and this is the hypercube, i xor d: exact agreement after log2(size) rounds.
    Otherwise some cycles are odd and one of each sits out. The start moves by one per round, and by a stride prime to
    the size per sweep, so that everybody sits out equally often. Long steps first: measured to mix best.
    """
    distances = _exponential_distances(size)
    sweep, turn = divmod(round, distances)
    step = 2 ** (distances - 1 - turn)
    start = 0
    if not _is_power_of_two(size):
        stride = next(c for c in range(distances, distances + size) if math.gcd(c, size) == 1)
        start = sweep * stride + turn
    cycles = math.gcd(step, size)
    heads = [start + c + 2 * k * step for c in range(cycles) for k in range(size // cycles // 2)]
    return _pairs_to_partners([(head % size, (head + step) % size) for head in heads], size)


def _complete_sweep(size: int) -> int:
    return max(1, size - 1 + size % 2)


@lru_cache(maxsize=64)
def _complete_order(colours: int) -> tuple[int, ...]:
    """The order in which the colours of the tournament are played.

    In their natural order two colours in a row only shift the pairs by one place, so the complete graph mixes no
    faster than a ring (a contraction of 0.96 per round at 32 learners). Scattered by a quadratic sequence they mix
    faster than random pairs.
    """
    return tuple(sorted(range(colours), key=lambda c: c * c * GOLDEN % 2**32))


def _complete(round: int, size: int, seed: int) -> Partners:
    """Circle method: i and j meet in colour c when i + j = c (mod m); who would meet itself meets learner m, if any."""
    if size <= 2:
        return list(range(size))[::-1]
    m = _complete_sweep(size)
    colour = _complete_order(m)[round % m]
    partners = [(colour - i) % m for i in range(m)]
    if size > m:
        alone = next(i for i, j in enumerate(partners) if i == j)
        partners[alone] = m
        partners.append(alone)
    return partners


TOPOLOGIES: dict[str, Topology] = {
    entry.name: entry
    for entry in (
        Topology(
            name="ring",
            description="fixed ring; its edges take turns by colour (2 for an even ring, 3 for an odd one)",
            equation="c = cos^2(2 pi / L) per round, L even and > 2",
            draw=_ring,
            sweep=_ring_colours,
            random=False,
        ),
        Topology(
            name="random_ring",
            description="fresh random pairs in every round; one sits out when the number is odd",
            equation="c = 1/2 - 1/(2 (L - 1)), L even; 1/2, L odd",
            draw=_random_ring,
            sweep=lambda size: 1,
            random=True,
        ),
        Topology(
            name="random_cycle",
            description="the colours of a ring over shuffled learners, shuffled anew after each sweep of the colours",
            equation="c = (L/4 - 1) / (L - 1) per sweep of two rounds, L even and > 2",
            draw=_random_cycle,
            sweep=_ring_colours,
            random=True,
        ),
        Topology(
            name="exponential",
            description="partners at distances that halve from round to round; the hypercube when L is a power of two",
            equation="c = 0 after log2(L) rounds, L a power of two",
            draw=_exponential,
            sweep=_exponential_sweep,
            random=False,
        ),
        Topology(
            name="complete",
            description="round-robin tournament; everybody meets everybody once per period",
            equation="i + j = c_r (mod m), m = L - 1 (L even) or L (L odd)",
            draw=_complete,
            sweep=_complete_sweep,
            random=False,
        ),
    )
}


def topology(name: str) -> Topology:
    """The entry of that name, or an error that offers the nearest one."""
    try:
        return TOPOLOGIES[name]
    except KeyError:
        raise UsageError(f"no topology '{name}'", where="topology", hint=did_you_mean(name, TOPOLOGIES)) from None


def matching(name: str, round: int, size: int, seed: int = 0) -> Partners:
    """The partner of every learner in this round, itself for whoever sits out."""
    return topology(name).matching(round, size, seed)
