"""Resolves topologies by name and job seed, for workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from roundelay.topology.matchings import topology
from roundelay.topology.mixing import neighbor_row


class SeededMatching:
    """The matchings of one topology with one seed."""

    def __init__(self, name: str, size: int, seed: int) -> None:
        self._topology, self._size, self._seed = topology(name), size, seed
        self._last: tuple[int, list[int]] = (-1, [])

    @cached_property
    def edges(self) -> frozenset[tuple[int, int]]:
        """Return all pairs that can ever exchange models, lower rank first."""
        return frozenset(self._topology.edges(self._size))

    def __call__(self, round: int) -> list[int]:
        """Return the partner of every rank in this round."""
        last, partners = self._last
        if last != round:
            partners = self._topology.matching(round, self._size, self._seed)
            self._last = (round, partners)
        return partners


@dataclass(frozen=True)
class SeededTopologies:
    """The topologies of one job. Random ones use its seed, which is the same on all ranks."""

    seed: int

    def matching(self, name: str, size: int) -> SeededMatching:
        """Return the matchings of all rounds."""
        return SeededMatching(name, size, self.seed)

    def row(self, name: str, rank: int, size: int) -> dict[int, float]:
        """Return the weights of neighbor averaging for one rank."""
        return dict(_row(name, rank, size))


@lru_cache(maxsize=4096)
def _row(name: str, rank: int, size: int) -> dict[int, float]:
    return neighbor_row(name, rank, size)
