"""A module's parameters as views of one contiguous vector.

Gradients stay where autograd leaves them, one tensor per parameter. Gathering them costs two passes over memory, and strategies
that never send a gradient do not need it; strategies that do call `gather`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundelay.errors import UsageError


@dataclass(frozen=True)
class ParamSlice:
    """The range of one parameter in the vector."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


class Flat:
    """phi: the trainable parameters of a module, concatenated in one vector."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise UsageError("the module has no parameter to train", hint="pass a module with requires_grad parameters")
        kinds = {(p.dtype, p.device) for _, p in named}
        if len(kinds) != 1:
            listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise UsageError(
                "all parameters must have one dtype and one device",
                where=listed,
                hint="convert the module with .to(dtype, device) first; use autocast for mixed precision",
            )
        self.dtype, self.device = kinds.pop()
        self.phi = torch.empty(sum(p.numel() for _, p in named), dtype=self.dtype, device=self.device)
        self.slots: list[ParamSlice] = []
        start = 0
        for name, p in named:
            stop = start + p.numel()
            view = self.phi[start:stop].view_as(p)
            view.copy_(p.detach())
            p.data = view
            self.slots.append(ParamSlice(name, p, start, stop))
            start = stop
        # Batch-norm statistics and the like: not exchanged, but averaged when the model is evaluated or saved.
        self.buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
        self.counters = [(name, b) for name, b in module.named_buffers() if not b.is_floating_point()]
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase) and self.device.type == "cuda":
                layer.flatten_parameters()  # GPU: untested; cuDNN packs its weights, which are bound again below
        self._bind_views()

    def _bind_views(self) -> None:
        for slot in self.slots:
            slot.parameter.data = self.phi[slot.start : slot.stop].view_as(slot.parameter)

    def rebase(self, memory: Tensor) -> None:
        """Move the parameters, with their values, into `memory`."""
        self.phi = memory.copy_(self.phi)
        self._bind_views()

    def clear_gradients(self) -> None:
        for slot in self.slots:
            slot.parameter.grad = None

    def gather(self, out: Tensor) -> Tensor:
        """Copy the gradients to `out` and return it; a parameter without a gradient counts as zero."""
        for slot in self.slots:
            part = out[slot.start : slot.stop]
            grad = slot.parameter.grad
            if grad is None:
                part.zero_()
            else:
                part.copy_(grad.reshape(-1))
        return out

    def scatter(self, g: Tensor) -> None:
        """Make the parameters' gradients views of g."""
        for slot in self.slots:
            slot.parameter.grad = g[slot.start : slot.stop].view_as(slot.parameter)

    def buffer_vector(self) -> Tensor:
        """Return the module's floating-point buffers as one vector, empty if there are none."""
        if not self.buffers:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return torch.cat([b.detach().reshape(-1).to(self.dtype) for _, b in self.buffers])

    def load_buffers(self, vector: Tensor) -> None:
        start = 0
        for _, b in self.buffers:
            b.copy_(vector[start : start + b.numel()].view_as(b))
            start += b.numel()

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return copies of the vector's slices with the parameters' names and shapes."""
        return {s.name: vector[s.start : s.stop].view_as(s.parameter).clone() for s in self.slots}
