"""Topologies: which ranks exchange models in each gossip round, and how fast that mixes."""

from roundelay.topology.matchings import TOPOLOGIES, Topology, matching, topology
from roundelay.topology.mixing import (
    Spectrum,
    contraction,
    describe,
    gap,
    mixing_matrix,
    neighbor_matrix,
    neighbor_row,
    rounds_to_agreement,
    spectrum,
)

__all__ = [
    "TOPOLOGIES",
    "Spectrum",
    "Topology",
    "contraction",
    "describe",
    "gap",
    "matching",
    "mixing_matrix",
    "neighbor_matrix",
    "neighbor_row",
    "rounds_to_agreement",
    "spectrum",
    "topology",
]
