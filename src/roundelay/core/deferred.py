"""Vectors that are worked out only when somebody needs them as vectors.

`me.add_to(-me.delta(me.grad()))` reads as three vectors; taken literally it would write two of them to memory for nothing.
A gradient and a displacement are therefore promises: arithmetic that cannot be kept as a promise turns them into tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

Vector = Any
"""A Tensor or a Lazy; both take part in arithmetic and in torch functions."""


class DeferredVector(ABC):
    """A vector on demand."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """The vector; the same tensor on every call."""

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
    """A Lazy as its tensor; anything else as it is."""
    return x.tensor() if isinstance(x, DeferredVector) else x


class Gradient(DeferredVector):
    """g: left in the parameters by backward, over `samples` samples; `share` is what it weighs beside its peers."""

    def __init__(self, gather: Any, samples: int, share: float, in_parameters: bool = False) -> None:
        self._gather = gather
        self._tensor: Tensor | None = None
        self.samples, self.share, self.in_parameters = samples, share, in_parameters

    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._gather()
        return self._tensor


CONSUMED = torch.empty(0)
"""Stands for a displacement that has gone into w."""


class Update(DeferredVector):
    """gain * D(g): what the local optimizer would subtract, `gain` times over. D runs once, however often it is used."""

    def __init__(self) -> None:
        self.gain = 1.0
        self._shared: dict[str, Tensor] = {}

    @abstractmethod
    def compute(self) -> Tensor:
        """D(g) as a tensor; advances the optimizer's state."""

    @abstractmethod
    def add_to(self, w: Tensor, phi: Tensor, untouched: bool) -> None:
        """w <- w + self and phi <- w in as few passes as possible. `untouched`: w is still what phi was read from."""

    def assign_to(self, base: Tensor, phi: Tensor) -> None:
        """phi <- base + self, where phi is what the gradient was taken at."""
        torch.add(base, self.tensor(), out=phi)

    @property
    def computed(self) -> bool:
        return bool(self._shared)

    def consume(self) -> None:
        """The displacement goes straight into w and never becomes a tensor: a second use would run D again."""
        self._shared["d"] = CONSUMED

    def tensor(self) -> Tensor:
        if not self._shared:
            self._shared["d"] = self.compute()
        d = self._shared["d"]
        if d is CONSUMED:
            raise RuntimeError("a displacement was used again after it had moved w: call .tensor() on it before")
        return d if self.gain == 1.0 else d * self.gain

    def scaled(self, factor: float) -> Update:
        """The same displacement, `factor` times as long."""
        other = object.__new__(type(self))  # what copy.copy does, in a fraction of its time
        other.__dict__.update(self.__dict__)
        other.gain = self.gain * factor
        return other

    def __neg__(self) -> Update:
        return self.scaled(-1.0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`tensor - d` and `tensor + d` come this way, since torch's operators are asked first."""
        if func in (Tensor.sub, Tensor.add) and not kwargs and not isinstance(args[0], DeferredVector):
            return UpdatedVector(args[0], -args[1] if func is Tensor.sub else args[1])
        return super().__torch_function__(func, types, args, kwargs)

    def __mul__(self, factor: Any) -> Vector:
        return self.scaled(float(factor)) if isinstance(factor, int | float) else self.tensor() * materialize(factor)

    __rmul__ = __mul__


class UpdatedVector(DeferredVector):
    """base + displacement, as in `me.assign_to(mean - d)`: neither d nor the sum has to be written to memory of its own."""

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
        """Whoever asks for more than a sum takes it for the tensor that it is."""
        if name.startswith("_"):  # asked for while a copy is being made, before there is anything in it
            raise AttributeError(name)
        return getattr(self.tensor(), name)
