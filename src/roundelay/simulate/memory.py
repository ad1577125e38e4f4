"""Whether a model fits: how many vectors of its size a learner holds, by what its strategy promises."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.errors import UsageError
from roundelay.simulate.cluster import Cluster
from roundelay.strategies.base import Traits

FLOAT = 4
GB = 1e9


@dataclass(frozen=True)
class Need:
    """Bytes of one learner. Activations are not among them: they depend on the batch and the module."""

    device: float
    """On the learner's device: parameters, gradients, optimizer state, buffers of a rendezvous."""
    host: float
    """In its machine's memory, where published vectors lie."""


def need(parameters: int, traits: Traits, *, state_vectors: int = 1, learners: int = 2) -> Need:
    """What one learner holds. `state_vectors`: 1 for momentum, 2 for Adam."""
    vector = float(parameters * FLOAT)
    device = vector * (2 + state_vectors)
    if learners < 2:
        return Need(device, 0.0)
    if traits.shares_weights:
        return Need(device, 3 * vector)  # w, the snapshot that leaves, the one that arrives
    return Need(device + 2 * vector, 0.0)  # what is brought to a rendezvous, and its result


def check_fit(cluster: Cluster, needed: Need, parameters: int) -> None:
    """Refuses a model that is too large for the cluster's learners or machines."""

    def refuse(what: str, has: float, do: str) -> None:
        raise UsageError(
            f"a model of {parameters:,} parameters needs {what}, and there are {has:.3g} GB",
            where=f"cluster '{cluster.name}'",
            hint=do,
        )

    if needed.device > cluster.learner.memory_gb * GB:
        refuse(
            f"{needed.device / GB:.3g} GB per learner",
            cluster.learner.memory_gb,
            "choose a smaller model, or larger learner.memory_gb",
        )
    for kind in cluster.machines:
        if kind.learners * needed.host > kind.memory_gb * GB:
            refuse(
                f"{kind.learners} x {needed.host / GB:.3g} GB of host memory on a machine",
                kind.memory_gb,
                "put fewer learners on a machine, use hierarchical(…), or larger machines.memory_gb",
            )
