"""Topologies by name, as workers want them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from roundelay.topology.matchings import topology
from roundelay.topology.mixing import neighbor_row


class SeededMatching:
    """The rounds of one topology, from one seed."""

    def __init__(self, name: str, size: int, seed: int) -> None:
        self._topology, self._size, self._seed = topology(name), size, seed
        self._last: tuple[int, list[int]] = (-1, [])

    @cached_property
    def edges(self) -> frozenset[tuple[int, int]]:
        return frozenset(self._topology.edges(self._size))

    def __call__(self, round: int) -> list[int]:
        last, partners = self._last
        if last != round:
            partners = self._topology.matching(round, self._size, self._seed)
            self._last = (round, partners)
        return partners


@dataclass(frozen=True)
class SeededTopologies:
    """The topologies of one job: what is drawn is drawn from its seed."""

    seed: int

    def matching(self, name: str, size: int) -> SeededMatching:
        return SeededMatching(name, size, self.seed)

    def row(self, name: str, rank: int, size: int) -> dict[int, float]:
        return dict(_row(name, rank, size))


@lru_cache(maxsize=4096)
def _row(name: str, rank: int, size: int) -> dict[int, float]:
    return neighbor_row(name, rank, size)
