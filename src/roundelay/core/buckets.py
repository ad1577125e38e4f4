"""Gradients that leave for their mean while backward is still at work on the layers below.

Parameters are cut into buckets from the last to the first, because backward finishes them in about that order. A bucket
leaves when its gradients are there and the bucket before it has left, so all learners send in one order.
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
    """The flat gradient, cut for reducing."""

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
        self._place = {slot.parameter: (b, slot) for b, slots in enumerate(self._buckets) for slot in slots}
        self._g: Tensor | None = None
        self._weight = 1.0
        self._missing: list[set[nn.Parameter]] = []
        self._left: list[Work] = []
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._on_grad_ready)  # type: ignore[no-untyped-call]  # torch
            for slot in flat.slots
        ]

    def close(self) -> None:
        """Takes the hooks off: they hold the whole model, and no garbage collector sees through them."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def reducing(self, g: Tensor, weight: float) -> Iterator[None]:
        """Inside, every gradient that backward completes is weighted, written to g and sent off."""
        self._g, self._weight, self._left = g, weight, []
        self._missing = [{slot.parameter for slot in slots} for slots in self._buckets]
        try:
            yield
            # Parameters that took no part in this loss, and learners without a batch, send zeros.
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
        b, slot = self._place[parameter]
        torch.mul(parameter.grad.reshape(-1), self._weight, out=self._g[slot.start : slot.stop])
        self._missing[b].discard(parameter)
        self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        assert self._g is not None
        while len(self._left) < len(self._buckets) and not self._missing[len(self._left)]:
            slots = self._buckets[len(self._left)]
            self._left.append(self._reduce(self._g[slots[-1].start : slots[0].stop]))
        self._sum = self._g

    def wait(self) -> Tensor:
        for pending in self._left:
            pending.wait()
        return self._sum
