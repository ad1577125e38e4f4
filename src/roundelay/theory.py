"""The mathematical model of decentralized training, as code.   Cui et al. 2021, equation (1).

    W'  =  W T  -  a g(Phi)          columns of W: the learners' weights;  Phi: the weights their gradients were taken at

Every strategy is a choice of T and Phi, and an asynchronous run is a sequence of steps in which few learners do something:
a meeting has the T of its pair and no gradient, an update has T = I and one gradient, taken at an earlier W. Here that is
carried out literally, in double precision and with whole matrices: slow, and short enough to be believed. The engine is held
against it step by step, and a recorded run is held against the model of its own order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Gradient = Callable[[int, int, Matrix], Matrix]
"""(learner, how many gradients it has taken before, weights) -> the gradient on its next batch at these weights."""


@dataclass(frozen=True)
class Step:
    """One step of the model."""

    T: Matrix
    a: float = 0.0
    """The rate; 0: nobody has a gradient to apply."""
    who: Sequence[int] | None = None
    """The learners that apply a gradient; None: all."""
    seen: Sequence[int] | None = None
    """For each of them the number of the W its gradient was taken at; None: the W this step starts from."""
    at_mean: bool = False
    """Gradients are taken at W T in place of W: what parts synchronous SGD from delay-by-one."""


def trajectory(W: Matrix, steps: Iterable[Step], gradient: Gradient) -> list[Matrix]:
    """All W, from the first to the last."""
    path = [np.array(W, dtype=np.float64)]
    taken = [0] * path[0].shape[1]
    for step in steps:
        now = path[-1]
        after = now @ step.T
        if step.a:
            source = after if step.at_mean else None
            for place, learner in enumerate(range(now.shape[1]) if step.who is None else step.who):
                seen = path[step.seen[place]] if step.seen is not None else (now if source is None else source)
                after[:, learner] -= step.a * gradient(learner, taken[learner], seen[:, learner])
                taken[learner] += 1
        path.append(after)
    return path


# ------------------------------------------------------------------------------------------------- the matrices


def uniform(size: int) -> Matrix:
    """T_u: everybody takes the mean of all."""
    return np.full((size, size), 1.0 / size)


def pair(size: int, i: int, j: int) -> Matrix:
    """T of one meeting: i and j take their mean, the others stay."""
    T = np.eye(size)
    T[[i, i, j, j], [i, j, i, j]] = 0.5
    return T


# --------------------------------------------------------------------------------------------- orders of events


@dataclass(frozen=True)
class Read:
    """A learner begins a gradient at its weights of this moment."""

    learner: int


@dataclass(frozen=True)
class Apply:
    """A learner adds the gradient it has begun last."""

    learner: int
    a: float


@dataclass(frozen=True)
class Meet:
    """Two learners average."""

    i: int
    j: int


Event = Read | Apply | Meet


def asynchronous(size: int, events: Iterable[Event]) -> Iterator[Step]:
    """The steps of the model for an order of events: a read remembers the number of W, everything else is a step."""
    k, read = 0, [0] * size
    for event in events:
        if isinstance(event, Read):
            read[event.learner] = k
            continue
        if isinstance(event, Meet):
            yield Step(pair(size, event.i, event.j))
        else:
            yield Step(np.eye(size), event.a, [event.learner], [read[event.learner]])
        k += 1


def evenly_staggered(size: int, rounds: int, a: float, partners: Callable[[int], Sequence[int]]) -> Iterator[Event]:
    """Equal learners out of phase, as an undisturbed asynchronous run settles: everybody applies its gradient and begins the
    next once a round, one after another; half of the pairs of the round meet before, half after the middle of it."""
    for learner in range(size):
        yield Read(learner)
    for r in range(rounds):
        pairs = [(i, j) for i, j in enumerate(partners(r)) if i < j]
        for place, learner in enumerate(range(size)):
            for i, j in pairs[place * len(pairs) // size : (place + 1) * len(pairs) // size]:
                yield Meet(i, j)
            yield Apply(learner, a)
            yield Read(learner)


# --------------------------------------------------------------------------------------------------- the figures


def spread(W: Matrix) -> float:
    """How far learners are from their mean: the root of the mean squared distance."""
    return float(np.sqrt(((W - W.mean(axis=1, keepdims=True)) ** 2).sum(axis=0).mean()))


def measured_contraction(W: Matrix, matrices: Sequence[Matrix]) -> float:
    """The factor per round by which the squared spread has shrunk."""
    after = W
    for T in matrices:
        after = after @ T
    return (spread(after) / spread(W)) ** (2 / len(matrices))


def stable_delay(eigenvalue: float, delay: int) -> float:
    """The largest a for which x' = eigenvalue x - a x_(delay steps ago) does not grow.

    Roots of z^(delay+1) - eigenvalue z^delay + a inside the unit circle; delay 0: 1 + eigenvalue; eigenvalue 1:
    2 sin(pi / (2 (2 delay + 1))).
    """

    def stable(a: float) -> bool:
        polynomial = np.zeros(delay + 2)
        polynomial[0] = 1.0
        polynomial[1] -= eigenvalue
        polynomial[-1] += a
        return bool(np.abs(np.roots(polynomial)).max() <= 1 + 1e-9)

    return largest(stable)


def stable_mixing(T: Matrix, delay: int = 0) -> float:
    """The largest a for which w' = T w - a w_(delay steps ago) is stable on the quadratic a w^2 / 2: the least over all
    eigenvalues of T, that of the mean included."""
    found = np.linalg.eigvals(T)
    return min(stable_delay(float(value), delay) for value in sorted({round(float(v.real), 12) for v in found}))


def stable_order(size: int, rounds: int, partners: Callable[[int], Sequence[int]]) -> float:
    """The largest a for which an evenly staggered asynchronous run on a quadratic does not grow over so many rounds."""

    def stable(a: float) -> bool:
        chance = np.random.default_rng(0)
        w = chance.standard_normal(size)
        phi, start = w.copy(), float(np.linalg.norm(w))
        for event in evenly_staggered(size, rounds, a, partners):
            if isinstance(event, Read):
                phi[event.learner] = w[event.learner]
            elif isinstance(event, Meet):
                w[event.i] = w[event.j] = (w[event.i] + w[event.j]) / 2
            else:
                w[event.learner] -= event.a * phi[event.learner]
        return bool(np.isfinite(w).all() and np.linalg.norm(w) < start)

    return largest(stable)


def stable_blocks(size: int, K: int, eta: float, zeta: float, nesterov: bool) -> float:
    """The same for BMUF: (W, D) -> after one block, in which a local step multiplies the weights by 1 - a."""
    ahead = eta if nesterov else 0.0

    def stable(a: float) -> bool:
        gain = zeta * ((1 - a) ** K - 1)
        D = np.array([gain, gain * ahead + eta])  # eta D + zeta G, with G = ((1 - a)^K - 1) (W + ahead D)
        block = np.array([[1 + D[0], D[1]], [D[0], D[1]]])
        return bool(np.abs(np.linalg.eigvals(block)).max() <= 1 + 1e-9)

    return largest(stable)


def largest(stable: Callable[[float], bool], most: float = 4.0, tolerance: float = 1e-4) -> float:
    """The end of the stable stretch that begins at 0: found in steps of a fortieth, then halved."""
    low, step = 0.0, most / 160
    while low + step <= most and stable(low + step):
        low += step
    high = low + step
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low
