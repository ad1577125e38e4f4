"""What a run says of itself at its start: where it runs, with what, and who averages with whom.

The first rank writes it into the events, so that a report needs nothing but the run directory.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

import numpy as np
import torch

from roundelay import topology
from roundelay.launch.context import DistributedContext
from roundelay.strategies.base import Strategy
from roundelay.version import __version__

LIBRARIES = ("torch", "numpy", "numba", "safetensors")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware of this rank's machine, and the command that was typed there."""
    return {
        "versions": {"roundelay": __version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in LIBRARIES},
        "system": platform.platform(terse=True),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "folder": os.getcwd(),
    }


def processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


MANY = 256
"""Nodes up to which a start works out spectra: a second; for a thousand, half a minute."""


def mixing(strategy: Strategy, context: DistributedContext, nodes: list[int]) -> dict[str, Any]:
    """Who averages with whom, and how fast that brings them to agreement. `nodes`: the ranks that talk, first to last.

    kind      exchanges (pairs, round after round), neighbours (all at once), mean (everybody), server (learner 0), none
    weights   [i, j, T_ij] for i < j, places in `nodes`: the mean over the rounds of one sweep. Random pairs have one weight
              for all: `every_pair`
    gap       the spectral gap per round of the schedule that runs; rounds_to_1_percent: until the spread is down to that
              (neither is worked out for more than MANY nodes: everybody waits for it when the run starts)
    """
    inner: Any = strategy
    while hasattr(inner, "outer"):
        inner = inner.outer
    size, name = len(nodes), getattr(inner, "topology", None)
    about: dict[str, Any] = {
        "nodes": nodes,
        "machines": [context.machine_of(r) for r in context.node_leaders],
        "topology": name,
    }
    if size < 2:
        return about | {"kind": "none"}
    if name not in topology.TOPOLOGIES:
        if inner.traits.shares_weights:
            return about | {"kind": "server", "weights": []}
        return about | {"kind": "mean", "every_pair": 1 / size, "gap": 1.0, "rounds_to_1_percent": 1}
    entry = topology.topology(name)
    few = size <= MANY
    if few:
        about["rounds_to_1_percent"] = topology.rounds_to_agreement(name, size)
    if not inner.traits.shares_weights:
        matrix = topology.neighbour_matrix(name, size)
        about |= {"kind": "neighbors", "weights": sparse(matrix)}
        return about | {"gap": topology.spectrum(matrix).gap} if few else about
    about |= {"kind": "exchanges", "period": entry.sweep(size)}
    if few:
        about["gap"] = topology.gap(name, size)
    sweep = [topology.mixing_matrix(entry.matching(r, size)) for r in range(entry.sweep(size))]
    matrix = sum(sweep[1:], start=sweep[0]) / len(sweep)
    if entry.random:  # any two learners meet equally often
        return about | {"every_pair": (1 - float(matrix.trace()) / size) / (size - 1)}
    return about | {"weights": sparse(matrix)}


def sparse(matrix: np.ndarray) -> list[list[float]]:
    """The entries above the diagonal that are not 0; the matrix is symmetric and its rows sum to 1."""
    size = len(matrix)
    return [[i, j, round(float(matrix[i, j]), 6)] for i in range(size) for j in range(i + 1, size) if matrix[i, j] > 0]
