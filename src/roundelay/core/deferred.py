"""Vectors that are computed only when a tensor is needed.

`me.add_(-me.delta(me.grad()))` reads as three vectors. Computed literally, two of them would be written to memory for nothing.
Gradients and updates are therefore deferred; arithmetic that cannot be deferred materializes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

Vector = Any
"""A Tensor or a DeferredVector; both support arithmetic and torch functions."""


class DeferredVector(ABC):
    """A vector that is computed on demand."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """Compute the vector; return the same tensor on every call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(materialize(a) for a in args), **{k: materialize(v) for k, v in (kwargs or {}).items()})

    def __neg__(self) -> Vector:
        return -self.tensor()

    def __add__(self, other: Vector) -> Vector:
        return self.tensor() + materialize(other)

    __radd__ = __add__

    def __sub__(self, other: Vector) -> Vector:
        return self.tensor() - materialize(other)

    def __rsub__(self, other: Vector) -> Vector:
        return materialize(other) - self.tensor()

    def __mul__(self, factor: Any) -> Vector:
        return self.tensor() * materialize(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Vector:
        return self * (1.0 / divisor)


def materialize(x: Any) -> Any:
    """Return the tensor of a DeferredVector; return anything else unchanged."""
    return x.tensor() if isinstance(x, DeferredVector) else x


class Gradient(DeferredVector):
    """g over `samples` samples, left in the parameters by backward; `share` is its weight relative to other ranks."""

    def __init__(self, gather: Any, samples: int, share: float, in_parameters: bool = False) -> None:
        self._gather = gather
        self._tensor: Tensor | None = None
        self.samples, self.share, self.in_parameters = samples, share, in_parameters

    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._gather()
        return self._tensor


CONSUMED = torch.empty(0)
"""Marks an update that was applied to w without becoming a tensor."""


class Update(DeferredVector):
    """gain * D(g), the step of the local optimizer times `gain`. D runs once, however often the update is used."""

    def __init__(self) -> None:
        self.gain = 1.0
        self._shared: dict[str, Tensor] = {}

    @abstractmethod
    def compute(self) -> Tensor:
        """Return D(g) as a tensor and advance the optimizer's state."""

    @abstractmethod
    def add_to(self, w: Tensor, phi: Tensor, untouched: bool) -> None:
        """w <- w + self and phi <- w in as few passes as possible. `untouched`: w has not changed since phi was read."""

    def assign_to(self, base: Tensor, phi: Tensor) -> None:
        """phi <- base + self, where phi is the point of the gradient."""
        torch.add(base, self.tensor(), out=phi)

    @property
    def computed(self) -> bool:
        return bool(self._shared)

    def consume(self) -> None:
        """Mark the update as applied without a tensor; a later use raises, because it would run D again."""
        self._shared["d"] = CONSUMED

    def tensor(self) -> Tensor:
        if not self._shared:
            self._shared["d"] = self.compute()
        d = self._shared["d"]
        if d is CONSUMED:
            raise RuntimeError("an update was used again after it was applied to w: call .tensor() before applying it")
        return d if self.gain == 1.0 else d * self.gain

    def scaled(self, factor: float) -> Update:
        """Return the same update with its gain multiplied by `factor`."""
        other = object.__new__(type(self))  # faster than copy.copy
        other.__dict__.update(self.__dict__)
        other.gain = self.gain * factor
        return other

    def __neg__(self) -> Update:
        return self.scaled(-1.0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer `tensor - d` and `tensor + d`: torch dispatches its own operators here first."""
        if func in (Tensor.sub, Tensor.add) and not kwargs and not isinstance(args[0], DeferredVector):
            return UpdatedVector(args[0], -args[1] if func is Tensor.sub else args[1])
        return super().__torch_function__(func, types, args, kwargs)

    def __mul__(self, factor: Any) -> Vector:
        return self.scaled(float(factor)) if isinstance(factor, int | float) else self.tensor() * materialize(factor)

    __rmul__ = __mul__


class UpdatedVector(DeferredVector):
    """base + update, as in `me.assign_(mean - d)`; neither d nor the sum needs memory of its own."""

    def __init__(self, base: Tensor, by: Update) -> None:
        self.base, self.by = base, by
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self.base + self.by.tensor()
        return self._tensor

    def assign_to(self, phi: Tensor) -> None:
        if self._tensor is None:
            self.by.assign_to(self.base, phi)
        else:
            phi.copy_(self._tensor)

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the tensor."""
        if name.startswith("_"):  # looked up by copy.copy before the instance has attributes
            raise AttributeError(name)
        return getattr(self.tensor(), name)
