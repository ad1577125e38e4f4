"""Gradient buckets: reduce the gradients of late layers while backward still computes those of early layers.

Parameters are assigned to buckets from last to first, because backward finishes them in about that order. The reduction of a
bucket starts when all its gradients are ready and the previous bucket has started, so all ranks use the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from roundelay.core.contracts import Work
from roundelay.core.flat import Flat, ParamSlice

FIRST_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20


class Buckets:
    """The flat gradient in buckets, filled by hooks on the parameters."""

    def __init__(self, flat: Flat, all_reduce_: Callable[[Tensor], Work]) -> None:
        self._reduce = all_reduce_
        self._buckets: list[list[ParamSlice]] = [[]]
        limit, filled = FIRST_BYTES, 0
        for slot in reversed(flat.slots):
            size = (slot.stop - slot.start) * flat.phi.element_size()
            if self._buckets[-1] and filled + size > limit:
                self._buckets.append([])
                limit, filled = BUCKET_BYTES, 0
            self._buckets[-1].append(slot)
            filled += size
        self._bucket_of = {slot.parameter: (b, slot) for b, slots in enumerate(self._buckets) for slot in slots}
        self._g: Tensor | None = None
        self._weight = 1.0
        self._missing: list[set[nn.Parameter]] = []
        self._started: list[Work] = []
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._on_grad_ready)  # type: ignore[no-untyped-call]  # torch
            for slot in flat.slots
        ]

    def close(self) -> None:
        """Remove the hooks. They keep the model alive, and the garbage collector cannot see through them."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def reducing(self, g: Tensor, weight: float) -> Iterator[None]:
        """Context for backward: every completed gradient is weighted and written to g; full buckets are reduced.

        Collective: all ranks must enter it, even without a batch. Call `wait` for the sum.
        """
        self._g, self._weight, self._started = g, weight, []
        self._missing = [{slot.parameter for slot in slots} for slots in self._buckets]
        try:
            yield
            # Parameters without a gradient in this step, and ranks without a batch, contribute zeros.
            for slots, missing in zip(self._buckets, self._missing, strict=True):
                for slot in slots:
                    if slot.parameter in missing:
                        g[slot.start : slot.stop].zero_()
                missing.clear()
            self._launch_ready_buckets()
        finally:
            self._g = None

    def _on_grad_ready(self, parameter: nn.Parameter) -> None:
        if self._g is None or parameter.grad is None:
            return
        b, slot = self._bucket_of[parameter]
        torch.mul(parameter.grad.reshape(-1), self._weight, out=self._g[slot.start : slot.stop])
        self._missing[b].discard(parameter)
        self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        assert self._g is not None
        while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
            slots = self._buckets[len(self._started)]
            self._started.append(self._reduce(self._g[slots[-1].start : slots[0].stop]))
        self._sum = self._g

    def wait(self) -> Tensor:
        """Block until all buckets are reduced; return the sum."""
        for work in self._started:
            work.wait()
        return self._sum
