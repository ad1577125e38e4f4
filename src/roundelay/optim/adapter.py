"""Adapts any torch optimizer to D(g): a function from a gradient to an update, on the flat vector.

SGD has a fused implementation. Every other optimizer runs its own step() on the module's parameters, and the update is the
change of the parameters. The learning rate follows a schedule over global samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from roundelay.core import kernels
from roundelay.core.deferred import Gradient, Update, Vector, materialize
from roundelay.core.flat import Flat
from roundelay.errors import UsageError


@dataclass(frozen=True)
class _Range:
    """A contiguous range of the vector whose parameters belong to one parameter group."""

    start: int
    stop: int
    group: dict


class OptimizerAdapter:
    """D: the local optimizer. `factor(position)` is the factor of the schedule on the learning rate of every group."""

    def __init__(
        self,
        flat: Flat,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float = 0.0,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        self.flat, self.torch, self.max_grad_norm, self.factor = flat, optimizer, max_grad_norm, factor
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self.before: Tensor | None = None
        owner = {p: group for group in optimizer.param_groups for p in group["params"]}
        missing = [slot.name for slot in flat.slots if slot.parameter not in owner]
        if missing:
            raise UsageError(
                f"the optimizer must hold all trainable parameters (got {len(missing)} fewer)",
                where=", ".join(missing[:3]),
                hint="build the optimizer from module.parameters(), or set requires_grad=False on frozen parameters",
            )
        self.groups = [owner[slot.parameter] for slot in flat.slots]
        self.fused = type(optimizer) is torch.optim.SGD and all(
            not g["maximize"] and not g["dampening"] and not g["differentiable"] for g in optimizer.param_groups
        )
        if not self.fused:
            check_state(optimizer)
        self.momentum: Tensor | None = None
        if self.fused and any(g["momentum"] for g in optimizer.param_groups):
            self.momentum = torch.zeros_like(flat.phi)
            for slot, group in zip(flat.slots, self.groups, strict=True):
                if group["momentum"]:
                    view = self.momentum[slot.start : slot.stop].view_as(slot.parameter)
                    optimizer.state[slot.parameter]["momentum_buffer"] = view

    def set_position(self, position: int) -> None:
        """Set the learning rates for this number of global samples. Without a schedule they stay as the user set them."""
        if self.factor is None:
            return
        factor = self.factor(position)
        for group, base in zip(self.torch.param_groups, self._base, strict=True):
            group["lr"] = base * factor

    @property
    def lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(self.torch.param_groups[0]["lr"])

    def delta(self, g: Vector) -> Update:
        """Return D(g). It is computed when it is first used; zero for a gradient without samples."""
        if isinstance(g, Gradient) and g.samples == 0:
            return _NoUpdate(self.flat.phi)
        return (_FusedSGDUpdate if self.fused else _OptimizerUpdate)(self, g)

    # -- state -----------------------------------------------------------------------------------------------------

    def _state_tensors(self) -> list[Tensor]:
        if self.fused:
            return [] if self.momentum is None else [self.momentum]
        averaged = []
        # state that cannot be averaged over ranks
        local: frozenset[str] = getattr(self.torch, "local_state", frozenset())
        for slot in self.flat.slots:
            state = self.torch.state.get(slot.parameter, {})
            tensors = [state[key] for key in sorted(state) if key not in local and isinstance(state[key], Tensor)]
            averaged += [tensor for tensor in tensors if tensor.is_floating_point()]
        return averaged

    def _complete_state(self) -> None:
        """Create the state of parameters that had no gradient yet, so that the state vectors of all ranks have equal length."""
        for slot, group in zip(self.flat.slots, self.groups, strict=True):
            if not self.torch.state.get(slot.parameter):
                twin = torch.nn.Parameter(slot.parameter.detach().clone())
                twin.grad = torch.zeros_like(twin)
                optimizer = same_kind(self.torch, group, twin)
                optimizer.step()
                for key, value in optimizer.state.get(twin, {}).items():
                    self.torch.state[slot.parameter][key] = value * 0 if key == "step" else value

    def state_vector(self) -> Tensor:
        """Return a copy of the floating-point state as one vector, possibly empty."""
        if not self.fused:
            self._complete_state()
        tensors = self._state_tensors()
        return torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.empty(0)

    def load_state_vector(self, state: Tensor) -> None:
        """Load what `state_vector` returned."""
        start = 0
        for t in self._state_tensors():
            t.copy_(state[start : start + t.numel()].view_as(t))
            start += t.numel()

    def to_saved(self) -> tuple[dict[str, Tensor], dict]:
        """Return the state as tensors and numbers by name, for a checkpoint."""
        if self.fused:
            return ({} if self.momentum is None else {"momentum": self.momentum}), {}
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        for slot in self.flat.slots:
            for key, value in self.torch.state.get(slot.parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{slot.name}/{key}"] = value
                else:
                    numbers[f"{slot.name}/{key}"] = value
        return tensors, numbers

    def from_saved(self, tensors: dict[str, Tensor], numbers: dict) -> None:
        """Load what `to_saved` returned."""
        if self.fused:
            if self.momentum is not None and "momentum" in tensors:
                self.momentum.copy_(tensors["momentum"])
            return
        self.torch.state.clear()
        for slot in self.flat.slots:
            for source in (tensors, numbers):
                for name, value in source.items():
                    owner, _, key = name.rpartition("/")
                    if owner == slot.name:
                        # clone: tensors in the file's memory have another alignment, which can change the rounding of products
                        self.torch.state[slot.parameter][key] = value.clone() if isinstance(value, Tensor) else value

    def reset_state(self) -> None:
        """Clear the state; momentum becomes zero."""
        if self.fused:
            if self.momentum is not None:
                self.momentum.zero_()
        else:
            self.torch.state.clear()

    @cached_property
    def ranges(self) -> list[_Range]:
        """Return the vector as ranges whose parameters share a group."""
        ranges: list[_Range] = []
        start = 0
        for i, slot in enumerate(self.flat.slots):
            if i + 1 == len(self.groups) or self.groups[i + 1] is not self.groups[i]:
                ranges.append(_Range(start, slot.stop, self.groups[i]))
                start = slot.stop
        return ranges

    # -- used by updates -------------------------------------------------------------------------------------------

    def pieces(self, g: Vector) -> list[tuple[_Range, Tensor]]:
        """Return the gradient in contiguous pieces: one per parameter after backward, or slices of a vector."""
        vector = None if isinstance(g, Gradient) and g.in_parameters else materialize(g)
        if vector is not None:
            return [(at, vector[at.start : at.stop]) for at in self.ranges]
        pieces: list[tuple[_Range, Tensor]] = []
        for slot, group in zip(self.flat.slots, self.groups, strict=True):
            grad = slot.parameter.grad
            if grad is not None:
                if grad.is_sparse:
                    raise UsageError("gradients must be dense (got a sparse one)", where=slot.name, hint="set sparse=False")
                pieces.append((_Range(slot.start, slot.stop, group), grad.contiguous().view(-1)))
        return pieces

    def clip_scale(self, pieces: list[tuple[_Range, Tensor]]) -> float:
        """Return the factor that limits the norm of the gradient to `max_grad_norm`."""
        if not self.max_grad_norm:
            return 1.0
        norm = float(torch.nn.utils.get_total_norm([piece for _, piece in pieces]))
        return min(1.0, self.max_grad_norm / (norm + 1e-6))


def same_kind(optimizer: torch.optim.Optimizer, group: dict, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings for another parameter."""
    accepted = inspect.signature(type(optimizer)).parameters  # `defaults` may hold more: AdamW's decoupled_weight_decay
    defaults = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    twin: torch.optim.Optimizer = type(optimizer)([{**group, "params": [parameter]}], **defaults)
    return twin


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if a checkpoint could not hold the optimizer's state. It tries one step on a dummy parameter."""
    probe = torch.nn.Parameter(torch.ones(2, 2))
    probe.grad = torch.ones(2, 2)
    name = type(optimizer).__name__
    try:
        twin = same_kind(optimizer, optimizer.param_groups[0], probe)
        twin.step()
        state = list(twin.state.get(probe, {}).items())
    except Exception as error:
        raise UsageError(
            f"optimizer {name} failed to take a step: {error}",
            where="optimizer",
            hint="use an optimizer whose step() needs no closure",
        ) from error
    odd = [key for key, value in state if not isinstance(value, Tensor | int | float | None)]
    if odd:
        raise UsageError(
            f"the state of optimizer {name} must be tensors and numbers (got something else in: {', '.join(odd)})",
            where="optimizer",
            hint="use any optimizer of torch.optim except LBFGS",
        )


class _NoUpdate(Update):
    """The zero update of a rank that had no batch."""

    def __init__(self, phi: Tensor) -> None:
        super().__init__()
        self._phi = phi

    def compute(self) -> Tensor:
        return torch.zeros_like(self._phi)

    def add_to(self, w: Tensor, phi: Tensor, untouched: bool) -> None:
        if phi is not w:
            phi.copy_(w)


class _FusedSGDUpdate(Update):
    """lr * u, where u has momentum, Nesterov and weight decay as torch.optim.SGD defines them."""

    def __init__(self, owner: OptimizerAdapter, g: Vector) -> None:
        super().__init__()
        self._owner, self._g = owner, g

    def compute(self) -> Tensor:
        owner, phi = self._owner, self._owner.flat.phi
        d = torch.zeros_like(phi)
        pieces = owner.pieces(self._g)
        scale = owner.clip_scale(pieces)
        for at, g in pieces:
            u, group = d[at.start : at.stop], at.group
            buf = torch.zeros_like(g) if owner.momentum is None else owner.momentum[at.start : at.stop]
            at_phi = phi[at.start : at.stop]
            decay, mu, nesterov = group["weight_decay"], group["momentum"], group["nesterov"]
            kernels.sgd_direction(u, at_phi, g, buf, scale, decay, mu, nesterov)
            u.mul_(group["lr"])
        return d

    def add_to(self, w: Tensor, phi: Tensor, untouched: bool) -> None:
        owner = self._owner
        pieces = [] if self.computed else owner.pieces(self._g)
        if self.computed or self._depends_on_phi(pieces):
            w.add_(self.tensor())
            if phi is not w:
                phi.copy_(w)
            return
        self.consume()
        scale = owner.clip_scale(pieces)
        covered = 0
        for at, g in pieces:
            part, copy = w[at.start : at.stop], None if phi is w else phi[at.start : at.stop]
            step = -self.gain * at.group["lr"]
            covered += at.stop - at.start
            if owner.momentum is None:
                kernels.subtract_scaled(part, g if scale == 1.0 else g * scale, step)
                if copy is not None:
                    copy.copy_(part)
            else:
                kernels.sgd_move(part, copy, g, owner.momentum[at.start : at.stop], scale, at.group["momentum"], step)
        if covered < w.numel() and phi is not w:
            phi.copy_(w)  # parameters without a gradient may have been changed by another rank

    def assign_to(self, base: Tensor, phi: Tensor) -> None:
        if self.computed or self._depends_on_phi(self._owner.pieces(self._g)):
            super().assign_to(base, phi)
            return
        phi.copy_(base)
        self.add_to(phi, phi, True)

    @staticmethod
    def _depends_on_phi(pieces: list[tuple[_Range, Tensor]]) -> bool:
        return any(at.group["weight_decay"] or at.group["nesterov"] for at, _ in pieces)


class _OptimizerUpdate(Update):
    """The change of the parameters by optimizer.step()."""

    def __init__(self, owner: OptimizerAdapter, g: Vector) -> None:
        super().__init__()
        self._owner, self._g = owner, g

    def _step(self) -> Tensor:
        """Run optimizer.step() on phi. Returns phi before the step."""
        owner, phi = self._owner, self._owner.flat.phi
        if owner.before is None:
            owner.before = torch.empty_like(phi)
        owner.before.copy_(phi)
        in_parameters = isinstance(self._g, Gradient) and self._g.in_parameters
        if not in_parameters:
            owner.flat.scatter(materialize(self._g))
        if hasattr(owner.torch, "local_gradient"):
            owner.torch.local_gradient = in_parameters
        if owner.max_grad_norm:
            torch.nn.utils.clip_grad_norm_([slot.parameter for slot in owner.flat.slots], owner.max_grad_norm)
        owner.torch.step()
        return owner.before

    def compute(self) -> Tensor:
        phi = self._owner.flat.phi
        before = self._step()
        d = before - phi
        phi.copy_(before)
        return d

    def add_to(self, w: Tensor, phi: Tensor, untouched: bool) -> None:
        if self.gain != -1.0 or self.computed:
            w.add_(self.tensor())
            if phi is not w:
                phi.copy_(w)
            return
        self.consume()
        before = self._step()
        if phi is w:
            return
        if untouched:
            w.copy_(phi)
        else:
            kernels.add_difference(w, phi, phi, before)

    def assign_to(self, base: Tensor, phi: Tensor) -> None:
        if self.gain != -1.0 or self.computed or base.data_ptr() == phi.data_ptr():
            super().assign_to(base, phi)
            return
        self.consume()
        before = self._step()
        phi.sub_(before).add_(base)
