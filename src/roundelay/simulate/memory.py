"""Check whether a model fits into the memory of a cluster, from the number of vectors that a strategy holds."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.errors import UsageError
from roundelay.simulate.cluster import Cluster
from roundelay.strategies.base import Traits

FLOAT = 4
GB = 1e9


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one learner, without activations, which depend on the batch and the module."""

    device: float
    """Bytes on the learner's device: parameters, gradients, optimizer state, buffers of collectives."""
    host: float
    """Bytes in host memory: shared weights and snapshots."""


def memory_need(parameters: int, traits: Traits, *, state_vectors: int = 1, learners: int = 2) -> MemoryNeed:
    """Return what one learner holds. `state_vectors` is 1 for momentum and 2 for Adam."""
    vector = float(parameters * FLOAT)
    device = vector * (2 + state_vectors)
    if learners < 2:
        return MemoryNeed(device, 0.0)
    if traits.shares_weights:
        return MemoryNeed(device, 3 * vector)  # w, the snapshot sent, the snapshot received
    return MemoryNeed(device + 2 * vector, 0.0)  # input and result of a collective


def check_fit(cluster: Cluster, need: MemoryNeed, parameters: int) -> None:
    """Raise UsageError if the model is too large for a learner or a machine of the cluster."""

    def reject(needed: str, available_gb: float, hint: str) -> None:
        raise UsageError(
            f"a model of {parameters:,} parameters needs {needed}, but only {available_gb:.3g} GB are available",
            where=f"cluster '{cluster.name}'",
            hint=hint,
        )

    if need.device > cluster.learner.memory_gb * GB:
        reject(
            f"{need.device / GB:.3g} GB per learner",
            cluster.learner.memory_gb,
            "choose a smaller model, or raise learner.memory_gb",
        )
    for group in cluster.machines:
        if group.learners * need.host > group.memory_gb * GB:
            reject(
                f"{group.learners} x {need.host / GB:.3g} GB of host memory per machine",
                group.memory_gb,
                "put fewer learners on a machine, use hierarchical(…), or raise machines.memory_gb",
            )
