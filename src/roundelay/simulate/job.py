"""What the learners of one virtual job share: the world, the cluster's links, the store, and who is dead."""

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
        """`model_bytes`: timing alone; vectors have one element and travel as if they had so many bytes."""
        self.cluster, self.machines, self.size, self.seed = cluster, list(machines), len(machines), seed
        self.world = EventLoop()
        self.network = NetworkModel(cluster, machines)
        self.store = SimulatedStore(self.world)
        self.model_bytes = model_bytes
        self.dead: dict[int, str] = {}
        self.backward: list[tuple[float, float] | None] = [None] * self.size
        """Of every learner under way with a gradient: when its backward pass begins and ends."""
        self.stolen = [0.0] * self.size
        """Seconds that exchanges have taken from a learner's cores and its next gradient makes up for."""
        self.spans: list[tuple[int, str, float, float]] = []
        """(rank, what, from, to) of the beginning of the run, for drawing."""
        self.spans_wanted = 0
        self._groups: dict[str, Any] = {}
        self._mourners: list[Callable[[int, str], None]] = []
        self.watchers: dict[int, Callable[[], None]] = {}
        self._roll = StoreMembership(self.store)

    def group(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._groups:
            self._groups[name] = make()
        return self._groups[name]

    def now(self) -> float:
        return self.world.now

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def bytes_of(self, x: Tensor) -> float:
        """What a vector weighs on the backend."""
        if self.model_bytes and x.numel() == 1 and x.dtype == torch.float32:
            return self.model_bytes
        return float(x.numel() * x.element_size())

    def buckets(self, size: float) -> int:
        """In how many pieces a gradient travels; real ones are cut already."""
        return max(1, round(size / BUCKET_BYTES)) if self.model_bytes else 1

    def ready(self, rank: int, x: Tensor) -> tuple[float, float]:
        """When the first and the last of a piece of the gradient are there: backward fills it from its end to its beginning."""
        pass_ = self.backward[rank]
        if pass_ is None:
            return self.world.now, self.world.now
        begin, end = pass_
        if self.model_bytes:
            return begin, end
        whole = max(x.untyped_storage().nbytes() // x.element_size(), 1)
        return begin, begin + (end - begin) * (1 - x.storage_offset() / whole)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, rank: int, what: str, why: Callable[[], str]) -> None:
        began = self.world.now
        self.world.wait(why)
        if len(self.spans) < self.spans_wanted:
            self.spans.append((rank, what, began, self.world.now))

    def sleep_until(self, rank: int, what: str, time: float) -> None:
        began = self.world.now
        if time <= began:
            return
        self.world.sleep_until(time)
        if len(self.spans) < self.spans_wanted:
            self.spans.append((rank, what, began, time))

    # -- death ---------------------------------------------------------------------------------------------------------

    def when_dead(self, told: Callable[[int, str], None]) -> None:
        self._mourners.append(told)

    def bury(self, rank: int, why: str) -> None:
        """Everybody learns that a rank is gone."""
        if rank in self.dead:
            return
        self.dead[rank] = why
        self.watchers.pop(rank, None)
        self._roll.report(rank, why)
        for told in list(self._mourners):
            told(rank, why)
        for hear in list(self.watchers.values()):
            hear()
