"""The mathematical model of decentralized training, as code.   Cui et al. 2021, equation (1).

    W'  =  W T  -  a g(Phi)          columns of W: the learners' weights;  Phi: the weights their gradients were taken at

Every strategy is a choice of T and Phi. An asynchronous run is a sequence of steps that involve few learners: an exchange has
the T of its pair and no gradient, an update has T = I and one gradient, taken at an earlier W. This file executes the model
literally, in double precision and with whole matrices: slow, but short enough to verify by reading. Tests compare the engine
with it step by step, and a recorded run with the model of its own order of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
GradientFunction = Callable[[int, int, Matrix], Matrix]
"""(learner, number of its gradients before, weights) -> the gradient on its next batch at these weights."""


@dataclass(frozen=True)
class ModelStep:
    """One step of the model."""

    T: Matrix
    a: float = 0.0
    """The learning rate; 0: no learner applies a gradient."""
    learners: Sequence[int] | None = None
    """The learners that apply a gradient; None: all."""
    sources: Sequence[int] | None = None
    """For each of them the index of the W at which its gradient is taken; None: the W before this step."""
    at_mean: bool = False
    """Gradients are taken at W T instead of W. This is the difference between synchronous SGD and delay-by-one."""


def trajectory(W: Matrix, steps: Iterable[ModelStep], gradient: GradientFunction) -> list[Matrix]:
    """Execute the steps. Returns all W, from the first to the last."""
    path = [np.array(W, dtype=np.float64)]
    counts = [0] * path[0].shape[1]
    for step in steps:
        before = path[-1]
        after = before @ step.T
        if step.a:
            for index, learner in enumerate(range(before.shape[1]) if step.learners is None else step.learners):
                Phi = path[step.sources[index]] if step.sources is not None else (after if step.at_mean else before)
                after[:, learner] -= step.a * gradient(learner, counts[learner], Phi[:, learner])
                counts[learner] += 1
        path.append(after)
    return path


# ------------------------------------------------------------------------------------------------- matrices


def uniform(size: int) -> Matrix:
    """Return T_u: every learner takes the mean of all."""
    return np.full((size, size), 1.0 / size)


def pair(size: int, i: int, j: int) -> Matrix:
    """Return T of one exchange: i and j take their mean, all other learners keep their weights."""
    T = np.eye(size)
    T[[i, i, j, j], [i, j, i, j]] = 0.5
    return T


# --------------------------------------------------------------------------------------------- orders of events


@dataclass(frozen=True)
class Read:
    """A learner reads its weights and starts to compute a gradient at them."""

    learner: int


@dataclass(frozen=True)
class Apply:
    """A learner applies the gradient that it started last."""

    learner: int
    a: float


@dataclass(frozen=True)
class Exchange:
    """Two learners average their weights."""

    i: int
    j: int


ModelEvent = Read | Apply | Exchange


def asynchronous(size: int, events: Iterable[ModelEvent]) -> Iterator[ModelStep]:
    """Yield the steps of the model for an order of events. A read stores the index of W; every other event is a step."""
    k, read = 0, [0] * size
    for event in events:
        if isinstance(event, Read):
            read[event.learner] = k
            continue
        if isinstance(event, Exchange):
            yield ModelStep(pair(size, event.i, event.j))
        else:
            yield ModelStep(np.eye(size), event.a, [event.learner], [read[event.learner]])
        k += 1


def evenly_staggered(size: int, rounds: int, a: float, partners: Callable[[int], Sequence[int]]) -> Iterator[ModelEvent]:
    """Yield the events of equally fast learners that are out of phase, the steady state of an undisturbed asynchronous run.

    Once per round every learner applies its gradient and starts the next, one learner after another. The exchanges of the round
    are spread evenly over it.
    """
    for learner in range(size):
        yield Read(learner)
    for r in range(rounds):
        pairs = [(i, j) for i, j in enumerate(partners(r)) if i < j]
        for learner in range(size):
            for i, j in pairs[learner * len(pairs) // size : (learner + 1) * len(pairs) // size]:
                yield Exchange(i, j)
            yield Apply(learner, a)
            yield Read(learner)


# --------------------------------------------------------------------------------------------------- rates


def spread(W: Matrix) -> float:
    """Return the root mean squared distance of the learners from their mean."""
    return float(np.sqrt(((W - W.mean(axis=1, keepdims=True)) ** 2).sum(axis=0).mean()))


def measured_contraction(W: Matrix, matrices: Sequence[Matrix]) -> float:
    """Return the factor per round by which the squared spread shrinks under these matrices."""
    after = W
    for T in matrices:
        after = after @ T
    return (spread(after) / spread(W)) ** (2 / len(matrices))


def stable_delay(eigenvalue: float, delay: int) -> float:
    """Return the largest a for which x' = eigenvalue x - a x_(delay steps ago) does not grow.

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
    """Return the largest a for which w' = T w - a w_(delay steps ago) is stable on the quadratic a w^2 / 2.

    It is the minimum over all eigenvalues of T, including that of the mean.
    """
    eigenvalues = np.linalg.eigvals(T)
    return min(stable_delay(float(value), delay) for value in sorted({round(float(v.real), 12) for v in eigenvalues}))


def stable_order(size: int, rounds: int, partners: Callable[[int], Sequence[int]]) -> float:
    """Return the largest a for which an evenly staggered asynchronous run on a quadratic does not grow in `rounds` rounds."""

    def stable(a: float) -> bool:
        w = np.random.default_rng(0).standard_normal(size)
        phi, start = w.copy(), float(np.linalg.norm(w))
        for event in evenly_staggered(size, rounds, a, partners):
            if isinstance(event, Read):
                phi[event.learner] = w[event.learner]
            elif isinstance(event, Exchange):
                w[event.i] = w[event.j] = (w[event.i] + w[event.j]) / 2
            else:
                w[event.learner] -= event.a * phi[event.learner]
        return bool(np.isfinite(w).all() and np.linalg.norm(w) < start)

    return largest(stable)


def stable_blocks(size: int, K: int, eta: float, zeta: float, nesterov: bool) -> float:
    """Return the largest a for which BMUF is stable on a quadratic: a local step multiplies the weights by 1 - a."""
    ahead = eta if nesterov else 0.0

    def stable(a: float) -> bool:
        gain = zeta * ((1 - a) ** K - 1)
        D = np.array([gain, gain * ahead + eta])  # eta D + zeta G, with G = ((1 - a)^K - 1) (W + ahead D)
        block = np.array([[1 + D[0], D[1]], [D[0], D[1]]])
        return bool(np.abs(np.linalg.eigvals(block)).max() <= 1 + 1e-9)

    return largest(stable)


def largest(stable: Callable[[float], bool], most: float = 4.0, tolerance: float = 1e-4) -> float:
    """Return the end of the stable interval that starts at 0, by a scan in 160 steps and a bisection."""
    low, step = 0.0, most / 160
    while low + step <= most and stable(low + step):
        low += step
    high = low + step
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low
