"""Metadata of a run for its `start` event: software, hardware, command, and which learners average with each other.

Rank 0 writes it, so a report needs the run directory and nothing else.
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
from roundelay.strategies.base import Strategy, innermost
from roundelay.version import __version__

LIBRARIES = ("torch", "numpy", "numba", "safetensors")


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and hardware of this machine, the command and the working directory."""
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
    """Return the name of the processor from /proc/cpuinfo, or the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


MAX_NODES_FOR_SPECTRUM = 256
"""Spectra of larger topologies are not computed: 256 nodes take a second, 1000 nodes half a minute."""


def mixing(strategy: Strategy, context: DistributedContext, nodes: list[int]) -> dict[str, Any]:
    """Describe which ranks average with each other and how fast they reach consensus. `nodes`: the ranks that communicate.

    kind                  exchanges (pairs, round by round), neighbors (all at once), mean (all ranks), server (rank 0), none
    weights               [i, j, T_ij] for i < j, indices into `nodes`: the mean over the rounds of one sweep
    every_pair            T_ij of all pairs, instead of `weights`, for random matchings
    gap                   spectral gap per round
    rounds_to_1_percent   rounds until the spread has fallen to 1 percent

    The last two are left out above MAX_NODES_FOR_SPECTRUM nodes, because all ranks wait for them at the start.
    """
    inner = innermost(strategy)
    size, name = len(nodes), getattr(inner, "topology", None)
    description: dict[str, Any] = {
        "nodes": nodes,
        "machines": [context.machine_of(r) for r in context.node_leaders],
        "topology": name,
    }
    if size < 2:
        return description | {"kind": "none"}
    if name not in topology.TOPOLOGIES:
        if inner.traits.shares_weights:
            return description | {"kind": "server", "weights": []}
        return description | {"kind": "mean", "every_pair": 1 / size, "gap": 1.0, "rounds_to_1_percent": 1}
    entry = topology.topology(name)
    small = size <= MAX_NODES_FOR_SPECTRUM
    if small:
        description["rounds_to_1_percent"] = topology.rounds_to_agreement(name, size)
    if not inner.traits.shares_weights:
        matrix = topology.neighbor_matrix(name, size)
        description |= {"kind": "neighbors", "weights": sparse(matrix)}
        return description | {"gap": topology.spectrum(matrix).gap} if small else description
    description |= {"kind": "exchanges", "period": entry.sweep(size)}
    if small:
        description["gap"] = topology.gap(name, size)
    sweep = [topology.mixing_matrix(entry.matching(r, size)) for r in range(entry.sweep(size))]
    matrix = sum(sweep[1:], start=sweep[0]) / len(sweep)
    if entry.random:  # all pairs are equally likely
        return description | {"every_pair": (1 - float(matrix.trace()) / size) / (size - 1)}
    return description | {"weights": sparse(matrix)}


def sparse(matrix: np.ndarray) -> list[list[float]]:
    """Return [i, j, value] of the nonzero entries above the diagonal of a symmetric matrix."""
    size = len(matrix)
    return [[i, j, round(float(matrix[i, j]), 6)] for i in range(size) for j in range(i + 1, size) if matrix[i, j] > 0]
