"""Fused operations on flat vectors: one pass over memory instead of several.

Memory traffic dominates the cost of an exchange on a CPU. The kernels are compiled by numba and release the GIL. They do not
use fast-math, so equal formulas give equal bits in all kernels of this file. Vectors that are not contiguous host memory use
plain tensor operations instead (GPU: untested).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

_compiled: Any = numba.njit(nogil=True, cache=True)


@_compiled
def _pair_average(a, b):  # type: ignore[no-untyped-def]
    half = a.dtype.type(0.5)
    for i in range(a.size):
        m = half * (a[i] + b[i])
        a[i] = m
        b[i] = m


@_compiled
def _add_half_difference(w, other, mine):  # type: ignore[no-untyped-def]
    half = w.dtype.type(0.5)
    for i in range(w.size):
        w[i] += half * (other[i] - mine[i])


@_compiled
def _add_difference(w, copy, after, before):  # type: ignore[no-untyped-def]
    for i in range(w.size):
        x = w[i] + (after[i] - before[i])
        w[i] = x
        copy[i] = x


@_compiled
def _sgd_direction(u, at, g, buf, scale, decay, mu, nesterov):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        x = scale * g[i] + decay * at[i]
        b = mu * buf[i] + x
        buf[i] = b
        u[i] = x + mu * b if nesterov else b


@_compiled
def _sgd_move(w, g, buf, scale, mu, step):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        b = mu * buf[i] + scale * g[i]
        buf[i] = b
        w[i] = w[i] - step * b


@_compiled
def _sgd_move_and_copy(w, copy, g, buf, scale, mu, step):  # type: ignore[no-untyped-def]
    for i in range(g.size):
        b = mu * buf[i] + scale * g[i]
        buf[i] = b
        x = w[i] - step * b
        w[i] = x
        copy[i] = x


@_compiled
def _subtract_scaled(w, u, step):  # type: ignore[no-untyped-def]
    for i in range(w.size):
        w[i] = w[i] - step * u[i]


@_compiled
def _ordered_sum(out, rows, weights):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = weights[0] * rows[0, i]
    for r in range(1, rows.shape[0]):
        for i in range(out.size):
            out[i] += weights[r] * rows[r, i]


@_compiled
def _mix(out, a, b, c, x, y, z):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = x * a[i] + y * b[i] + z * c[i]


def _host(*vectors: Tensor) -> list[np.ndarray] | None:
    for v in vectors:
        if not (v.is_cpu and v.is_contiguous()):
            return None
    return [v.detach().numpy() for v in vectors]


def pair_average(a: Tensor, b: Tensor) -> None:
    """a, b <- (a + b) / 2, with the same bits in both."""
    if (host := _host(a, b)) is not None:
        _pair_average(*host)
    else:
        a.add_(b).mul_(0.5)
        b.copy_(a)


def add_half_difference(w: Tensor, other: Tensor, mine: Tensor) -> None:
    """w <- w + (other - mine) / 2: one side of an exchange of snapshots."""
    if (host := _host(w, other, mine)) is not None:
        _add_half_difference(*host)
    else:
        w.add_(other - mine, alpha=0.5)


def add_difference(w: Tensor, copy: Tensor, after: Tensor, before: Tensor) -> None:
    """w <- w + (after - before), copy <- w; `copy` may be `after`."""
    if (host := _host(w, copy, after, before)) is not None:
        _add_difference(*host)
    else:
        w.add_(after - before)
        copy.copy_(w)


def sgd_direction(u: Tensor, at: Tensor, g: Tensor, buf: Tensor, scale: float, decay: float, mu: float, nesterov: bool) -> None:
    """x = scale g + decay at;  buf <- mu buf + x;  u <- buf (Nesterov: x + mu buf)."""
    if (host := _host(u, at, g, buf)) is not None:
        t = host[0].dtype.type
        _sgd_direction(*host, t(scale), t(decay), t(mu), nesterov)
    else:
        x = g * scale + at * decay
        buf.mul_(mu).add_(x)
        u.copy_(x + mu * buf if nesterov else buf)


def sgd_move(w: Tensor, copy: Tensor | None, g: Tensor, buf: Tensor, scale: float, mu: float, step: float) -> None:
    """buf <- mu buf + scale g;  w <- w - step buf;  copy <- w."""
    vectors = (w, g, buf) if copy is None else (w, copy, g, buf)
    if (host := _host(*vectors)) is not None:
        t = host[0].dtype.type
        (_sgd_move if copy is None else _sgd_move_and_copy)(*host, t(scale), t(mu), t(step))
    else:
        buf.mul_(mu).add_(g, alpha=scale)
        w.sub_(step * buf)
        if copy is not None:
            copy.copy_(w)


def subtract_scaled(w: Tensor, u: Tensor, step: float) -> None:
    """w <- w - step u, rounded as in `sgd_move`."""
    if (host := _host(w, u)) is not None:
        _subtract_scaled(*host, host[0].dtype.type(step))
    else:
        w.sub_(step * u)


def ordered_sum(out: Tensor, rows: Tensor, weights: Tensor) -> None:
    """out <- sum over r of weights[r] rows[r], in the order of r: the same bits on every rank."""
    if (host := _host(out, rows, weights)) is not None:
        _ordered_sum(*host)
    else:
        torch.mul(rows[0], weights[0], out=out)
        for r in range(1, rows.shape[0]):
            out.add_(weights[r] * rows[r])


def mix(out: Tensor, vectors: list[Tensor], weights: list[float]) -> None:
    """out <- sum of weight * vector, in order; `out` may be one of the vectors. One pass for at most 3 vectors."""
    padded = [*vectors, *[vectors[-1]] * (3 - len(vectors))]
    padded_weights = [*weights, *[0.0] * (3 - len(weights))]
    if len(vectors) <= 3 and (host := _host(out, *padded)) is not None:
        t = host[0].dtype.type
        _mix(*host, *(t(w) for w in padded_weights))
    else:
        ordered_sum(out, torch.stack(vectors), torch.tensor(weights, dtype=out.dtype, device=out.device))


def compile_for(dtype: torch.dtype) -> None:
    """Compile all kernels for this dtype, or load them from the cache, so that the first exchange is not delayed."""
    a, b, c, d = (torch.zeros(4, dtype=dtype) for _ in range(4))
    pair_average(a, b)
    add_half_difference(a, b, c)
    add_difference(a, b, c, d)
    sgd_direction(a, b, c, d, 1.0, 0.0, 0.0, False)
    sgd_move(a, None, b, c, 1.0, 0.0, 0.0)
    sgd_move(a, b, c, d, 1.0, 0.0, 0.0)
    subtract_scaled(a, b, 0.0)
    mix(a, [b, c, d], [0.0, 0.0, 0.0])
    ordered_sum(a, torch.zeros(2, 4, dtype=dtype), torch.zeros(2, dtype=dtype))
