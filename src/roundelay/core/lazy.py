"""Vectors that are worked out only when somebody needs them as vectors.

`me.move(-me.delta(me.grad()))` reads as three vectors; taken literally it would write two of them to memory for nothing.
A gradient and a displacement are therefore promises: arithmetic that cannot be kept as a promise turns them into tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

Vector = Any
"""A Tensor or a Lazy; both take part in arithmetic and in torch functions."""


class Lazy(ABC):
    """A vector on demand."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """The vector; the same tensor on every call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(solid(a) for a in args), **{k: solid(v) for k, v in (kwargs or {}).items()})

    def __neg__(self) -> Vector:
        return -self.tensor()

    def __add__(self, other: Vector) -> Vector:
        return self.tensor() + solid(other)

    __radd__ = __add__

    def __sub__(self, other: Vector) -> Vector:
        return self.tensor() - solid(other)

    def __rsub__(self, other: Vector) -> Vector:
        return solid(other) - self.tensor()

    def __mul__(self, factor: Any) -> Vector:
        return self.tensor() * solid(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Vector:
        return self * (1.0 / divisor)


def solid(x: Any) -> Any:
    """A Lazy as its tensor; anything else as it is."""
    return x.tensor() if isinstance(x, Lazy) else x


class Gradient(Lazy):
    """g: left in the parameters by backward, over `samples` samples; `share` is what it weighs beside its peers."""

    def __init__(self, gather: Any, samples: int, share: float, in_parameters: bool = False) -> None:
        self._gather = gather
        self._tensor: Tensor | None = None
        self.samples, self.share, self.in_parameters = samples, share, in_parameters

    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._gather()
        return self._tensor


USED_UP = torch.empty(0)
"""Stands for a displacement that has gone into w."""


class Displacement(Lazy):
    """gain * D(g): what the local optimizer would subtract, `gain` times over. D runs once, however often it is used."""

    def __init__(self) -> None:
        self.gain = 1.0
        self._shared: dict[str, Tensor] = {}

    @abstractmethod
    def work_out(self) -> Tensor:
        """D(g) as a tensor; advances the optimizer's state."""

    @abstractmethod
    def move(self, w: Tensor, phi: Tensor, untouched: bool) -> None:
        """w <- w + self and phi <- w in as few passes as possible. `untouched`: w is still what phi was read from."""

    @property
    def worked_out(self) -> bool:
        return bool(self._shared)

    def use_up(self) -> None:
        """The displacement goes straight into w and never becomes a tensor: a second use would run D again."""
        self._shared["d"] = USED_UP

    def tensor(self) -> Tensor:
        if not self._shared:
            self._shared["d"] = self.work_out()
        d = self._shared["d"]
        if d is USED_UP:
            raise RuntimeError("a displacement was used again after it had moved w: call .tensor() on it before")
        return d if self.gain == 1.0 else d * self.gain

    def scaled(self, factor: float) -> Displacement:
        """The same displacement, `factor` times as long."""
        other = object.__new__(type(self))  # what copy.copy does, in a fraction of its time
        other.__dict__.update(self.__dict__)
        other.gain = self.gain * factor
        return other

    def __neg__(self) -> Displacement:
        return self.scaled(-1.0)

    def __mul__(self, factor: Any) -> Vector:
        return self.scaled(float(factor)) if isinstance(factor, int | float) else self.tensor() * solid(factor)

    __rmul__ = __mul__
