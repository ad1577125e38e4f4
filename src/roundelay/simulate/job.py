"""State that the learners of one simulated job share: event loop, network, store, failed ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roundelay.core.buckets import BUCKET_BYTES
from roundelay.fleet.membership import StoreMembership
from roundelay.simulate.cluster import Cluster
from roundelay.simulate.event_loop import EventLoop
from roundelay.simulate.network import NetworkModel
from roundelay.simulate.store import SimulatedStore


class SimulatedJob:
    """One job in virtual time."""

    def __init__(self, cluster: Cluster, machines: Sequence[str], *, model_bytes: float = 0.0, seed: int = 0) -> None:
        """Create a job with one learner per entry of `machines`.

        `model_bytes` > 0 selects timing-only mode: vectors have one element and are sent as if they had `model_bytes` bytes.
        """
        self.cluster, self.machines, self.size, self.seed = cluster, list(machines), len(machines), seed
        self.loop = EventLoop()
        self.network = NetworkModel(cluster, machines)
        self.store = SimulatedStore(self.loop)
        self.model_bytes = model_bytes
        self.failed: dict[int, str] = {}
        """Failed rank -> reason."""
        self.backward: list[tuple[float, float] | None] = [None] * self.size
        """By rank: begin and end of the backward pass under way."""
        self.delay_s = [0.0] * self.size
        """By rank: seconds that transfers took from the learner's core; its next gradient takes that much longer."""
        self.spans: list[tuple[int, str, float, float]] = []
        """(rank, kind, begin, end) of the first intervals of the run, for drawing."""
        self.max_spans = 0
        self._groups: dict[str, Any] = {}
        self._failure_callbacks: list[Callable[[int, str], None]] = []
        self.watchers: dict[int, Callable[[], None]] = {}
        """Rank -> callback of its failure detector."""
        self._membership = StoreMembership(self.store)

    def group(self, name: str, create: Callable[[], Any]) -> Any:
        """Return the group called `name`; the first call creates it."""
        if name not in self._groups:
            self._groups[name] = create()
        return self._groups[name]

    def now(self) -> float:
        return self.loop.now

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def bytes_of(self, x: Tensor) -> float:
        """Return the bytes that a vector has on the network."""
        if self.model_bytes and x.numel() == 1 and x.dtype == torch.float32:
            return self.model_bytes
        return float(x.numel() * x.element_size())

    def buckets(self, size: float) -> int:
        """Return the number of buckets in which a gradient is sent. Real gradients already arrive in buckets."""
        return max(1, round(size / BUCKET_BYTES)) if self.model_bytes else 1

    def ready(self, rank: int, x: Tensor) -> tuple[float, float]:
        """Return when the first and the last element of a part of the gradient are computed.

        The backward pass fills the gradient from its end to its beginning.
        """
        interval = self.backward[rank]
        if interval is None:
            return self.loop.now, self.loop.now
        begin, end = interval
        if self.model_bytes:
            return begin, end
        whole = max(x.untyped_storage().nbytes() // x.element_size(), 1)
        return begin, begin + (end - begin) * (1 - x.storage_offset() / whole)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, rank: int, kind: str, reason: Callable[[], str]) -> None:
        """Suspend the running process until it is woken, and record the interval as `kind`."""
        began = self.loop.now
        self.loop.wait(reason)
        if len(self.spans) < self.max_spans:
            self.spans.append((rank, kind, began, self.loop.now))

    def sleep_until(self, rank: int, kind: str, time: float) -> None:
        """Suspend the running process until `time`, and record the interval as `kind`."""
        began = self.loop.now
        if time <= began:
            return
        self.loop.sleep_until(time)
        if len(self.spans) < self.max_spans:
            self.spans.append((rank, kind, began, time))

    # -- failures ------------------------------------------------------------------------------------------------------

    def on_failure(self, callback: Callable[[int, str], None]) -> None:
        """Register a callback (rank, reason) for failed ranks."""
        self._failure_callbacks.append(callback)

    def mark_failed(self, rank: int, reason: str) -> None:
        """Declare a rank failed: write it to the store, then call all callbacks and failure detectors."""
        if rank in self.failed:
            return
        self.failed[rank] = reason
        self.watchers.pop(rank, None)
        self._membership.report(rank, reason)
        for callback in list(self._failure_callbacks):
            callback(rank, reason)
        for notify in list(self.watchers.values()):
            notify()
