"""Tied states: a decision tree per phone and state, grown by likelihood with questions found from the data.

Questions are sets of phones that sound alike, from agglomerative clustering of their Gaussians; a question asks whether the
left or the right neighbour is in the set. Every context, seen or not, ends in a leaf, so every context has a pdf.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from roundelay.speech.hmm.viterbi import Array

_compiled: Any = numba.njit(nogil=True, cache=True)


@_compiled
def _add_frames(x, row, moments):  # type: ignore[no-untyped-def]
    dim = x.shape[1]
    for t in range(x.shape[0]):
        moments[row[t], 0] += 1.0
        for d in range(dim):
            value = np.float64(x[t, d])
            moments[row[t], 1 + d] += value
            moments[row[t], 1 + dim + d] += value * value


@_compiled
def _add_rows(rows, group, into):  # type: ignore[no-untyped-def]
    for n in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            into[group[n], d] += rows[n, d]


@dataclass(frozen=True)
class ContextStatistics:
    """Count, sum and sum of squares of the frames of every state in context, in one row each, by ascending key."""

    keys: Array  # int32 [n], see AlignmentModel.by_key
    moments: Array  # float64 [n, 1 + 2 * dim]

    @classmethod
    def of_frames(cls, x: Array, keys: Array) -> ContextStatistics:
        found, row = np.unique(keys, return_inverse=True)
        moments = np.zeros((len(found), 1 + 2 * x.shape[1]))
        _add_frames(x, row, moments)
        return cls(found, moments)

    @classmethod
    def merged(cls, parts: Sequence[ContextStatistics]) -> ContextStatistics:
        found, row = np.unique(np.concatenate([part.keys for part in parts]), return_inverse=True)
        moments = np.zeros((len(found), parts[0].moments.shape[1]))
        _add_rows(np.concatenate([part.moments for part in parts]), row, moments)
        return cls(found, moments)


@dataclass(frozen=True)
class TiedStates:
    """The leaves: which pdf every context has, and what its frames looked like."""

    table: Array  # int32 [phones, phones, phones, states]
    occupancy: Array  # float64 [pdfs]
    mean: Array  # float64 [pdfs, dim]
    variance: Array  # float64 [pdfs, dim]
    gains: list[float]  # log likelihood won by each split, in the order in which they were made


def likelihood(moments: Array, floor: Array) -> Array:
    """Log likelihood of frames under their own Gaussian, by row, short of a constant per frame."""
    dim = len(floor)
    count = np.maximum(moments[..., :1], 1e-10)
    mean = moments[..., 1 : 1 + dim] / count
    variance = np.maximum(moments[..., 1 + dim :] / count - mean * mean, floor)
    return np.asarray(-0.5 * moments[..., 0] * np.log(variance).sum(-1))


def cluster(moments: Array, floor: Array) -> list[frozenset[int]]:
    """Sets met on the way from single items to two clusters, merging first what loses the least likelihood.

    moments [items, kinds, 1 + 2 * dim]: an item is described by several Gaussians (the states of a phone).
    """
    alive = list(range(len(moments)))
    members = [frozenset([n]) for n in alive]
    found = list(members)
    moments = moments.copy()
    own = likelihood(moments, floor).sum(-1)

    def losses(n: int) -> Array:
        return own + own[n] - likelihood(moments + moments[n], floor).sum(-1)

    loss = np.full((len(moments), len(moments)), np.inf)
    for n in alive:
        loss[n] = losses(n)
    np.fill_diagonal(loss, np.inf)
    while len(alive) > 2:
        a, b = divmod(int(np.argmin(loss)), len(loss))
        a, b = min(a, b), max(a, b)
        alive.remove(b)
        members[a] = members[a] | members[b]
        found.append(members[a])
        moments[a] += moments[b]
        own[a] = likelihood(moments[a], floor).sum(-1)
        loss[b] = loss[:, b] = np.inf
        fresh = losses(a)
        for n in alive:
            loss[a, n] = loss[n, a] = fresh[n] if n != a else np.inf
    return found


def questions(statistics: ContextStatistics, phones: int, states: int, floor: Array) -> Array:
    """bool [questions, phones]: sets of phones alike in their first, middle or last states, or in all; silence alone."""
    phone = statistics.keys // (phones * states) % phones
    state = statistics.keys % states
    moments = np.zeros((phones * states, statistics.moments.shape[1]))
    _add_rows(statistics.moments, phone * states + state, moments)
    by_phone = moments.reshape(phones, states, -1)
    heard = 1 + np.flatnonzero(by_phone[1:, :, 0].sum(1) > 0)
    found: dict[frozenset[int], None] = {frozenset([0]): None}
    for kinds in (slice(None), *(slice(n, n + 1) for n in range(states))):
        for members in cluster(by_phone[heard][:, kinds], floor):
            found[frozenset(heard[list(members)].tolist())] = None
    table = np.zeros((len(found), phones), bool)
    for row, members in enumerate(found):
        table[row, list(members)] = True
    return table


@dataclass
class _Leaf:
    phone: int
    state: int
    rows: Array  # statistics that end here
    region: Array  # bool [phones, phones]: left and right neighbours that end here
    total: Array  # moments


@dataclass(frozen=True)
class _Split:
    gain: float
    left: bool  # asks about the left neighbour
    asked: Array  # bool [phones]


class _Grower:
    def __init__(self, statistics: ContextStatistics, asked: Array, phones: int, states: int, floor: Array) -> None:
        self.moments, self.floor, self.phones = statistics.moments, floor, phones
        rest, self.state = np.divmod(statistics.keys, states)
        rest, self.right = np.divmod(rest, phones)
        self.left, self.phone = np.divmod(rest, phones)
        self.asked = asked

    def root(self, phone: int, state: int) -> _Leaf:
        rows = np.flatnonzero((self.phone == phone) & (self.state == state))
        return _Leaf(phone, state, rows, np.ones((self.phones, self.phones), bool), self.moments[rows].sum(0))

    def best_split(self, leaf: _Leaf, least: float) -> _Split | None:
        if leaf.total[0] < 2 * least:
            return None
        before = likelihood(leaf.total, self.floor)
        best: _Split | None = None
        for left, neighbour in ((True, self.left), (False, self.right)):
            grouped = np.zeros((self.phones, self.moments.shape[1]))
            _add_rows(self.moments[leaf.rows], neighbour[leaf.rows], grouped)
            yes = self.asked @ grouped
            no = leaf.total - yes
            gain = likelihood(yes, self.floor) + likelihood(no, self.floor) - before
            gain[(yes[:, 0] < least) | (no[:, 0] < least)] = -np.inf
            n = int(np.argmax(gain))
            if np.isfinite(gain[n]) and (best is None or gain[n] > best.gain):
                best = _Split(float(gain[n]), left, self.asked[n])
        return best

    def divide(self, leaf: _Leaf, split: _Split) -> tuple[_Leaf, _Leaf]:
        answer = split.asked[(self.left if split.left else self.right)[leaf.rows]]
        region = split.asked[:, None] if split.left else split.asked[None, :]
        parts = []
        for rows, where in ((leaf.rows[answer], leaf.region & region), (leaf.rows[~answer], leaf.region & ~region)):
            parts.append(_Leaf(leaf.phone, leaf.state, rows, where, self.moments[rows].sum(0)))
        return parts[0], parts[1]


def grow(
    statistics: ContextStatistics,
    phones: int,
    states: Sequence[int],
    *,
    leaves: int,
    least_frames: float,
    least_gain: float,
    floor: Array,
) -> TiedStates:
    """Splits the leaf that wins most until `leaves` stand or no split wins `least_gain`; silence (phone 0) stays whole.

    states: number of states by phone. A leaf keeps at least `least_frames` frames.
    """
    width = max(states)
    grower = _Grower(statistics, questions(statistics, phones, width, floor), phones, width, floor)
    standing: dict[int, _Leaf] = {}
    waiting: list[tuple[float, int, _Split]] = []
    made = 0

    def place(leaf: _Leaf) -> None:
        nonlocal made
        standing[made] = leaf
        split = grower.best_split(leaf, least_frames) if leaf.phone else None
        if split is not None and split.gain > least_gain:
            heapq.heappush(waiting, (-split.gain, made, split))
        made += 1

    for phone in range(phones):
        for state in range(states[phone]):
            place(grower.root(phone, state))
    gains = []
    while waiting and len(standing) < leaves:
        _, number, split = heapq.heappop(waiting)
        gains.append(split.gain)
        for part in grower.divide(standing.pop(number), split):
            place(part)
    return _tie(list(standing.values()), grower, phones, width, floor, gains)


def _tie(found: list[_Leaf], grower: _Grower, phones: int, width: int, floor: Array, gains: list[float]) -> TiedStates:
    """Numbers the leaves by phone and state; one without any frame (a phone never heard) takes all speech for its own."""
    found.sort(key=lambda leaf: (leaf.phone, leaf.state))
    speech = grower.moments[grower.phone > 0].sum(0) if np.any(grower.phone > 0) else grower.moments.sum(0)
    moments = np.stack([leaf.total if leaf.total[0] > 0 else speech for leaf in found])
    dim = len(floor)
    mean = moments[:, 1 : 1 + dim] / moments[:, :1]
    variance = np.maximum(moments[:, 1 + dim :] / moments[:, :1] - mean * mean, floor)
    table = np.full((phones, phones, phones, width), -1, np.int32)
    for pdf, leaf in enumerate(found):
        table[:, leaf.phone, :, leaf.state][leaf.region] = pdf
    return TiedStates(table, np.array([leaf.total[0] for leaf in found]), mean, variance, gains)
