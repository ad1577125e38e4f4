"""Tied states: one phonetic decision tree per phone and state, grown by likelihood, with data-driven questions.

Questions are sets of similar phones, from agglomerative clustering of their Gaussians. A question tests whether the left or the
right neighbor is in the set. Every context, seen or unseen, ends in a leaf, so every context has a pdf.
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
    """Count, sum and sum of squares of the frames of each state in context: one row per key, keys ascending."""

    keys: Array  # int32 [n], see AlignmentModel.pdf_by_key
    moments: Array  # float64 [n, 1 + 2 * dim]

    @classmethod
    def of_frames(cls, x: Array, keys: Array) -> ContextStatistics:
        """Accumulate frames x [T, dim], where frame t has keys[t]."""
        unique, row = np.unique(keys, return_inverse=True)
        moments = np.zeros((len(unique), 1 + 2 * x.shape[1]))
        _add_frames(x, row, moments)
        return cls(unique, moments)

    @classmethod
    def merged(cls, parts: Sequence[ContextStatistics]) -> ContextStatistics:
        """Return the sum of several statistics."""
        unique, row = np.unique(np.concatenate([part.keys for part in parts]), return_inverse=True)
        moments = np.zeros((len(unique), parts[0].moments.shape[1]))
        _add_rows(np.concatenate([part.moments for part in parts]), row, moments)
        return cls(unique, moments)


@dataclass(frozen=True)
class TiedStates:
    """The leaves of the trees: the pdf of each context, and one Gaussian per pdf."""

    table: Array  # int32 [phones, phones, phones, states]
    occupancy: Array  # float64 [pdfs]
    mean: Array  # float64 [pdfs, dim]
    variance: Array  # float64 [pdfs, dim]
    gains: list[float]  # log-likelihood gain of each split, in order


def likelihood(moments: Array, floor: Array) -> Array:
    """Return the log likelihood of each row's frames under their own Gaussian, up to a constant per frame."""
    dim = len(floor)
    count = np.maximum(moments[..., :1], 1e-10)
    mean = moments[..., 1 : 1 + dim] / count
    variance = np.maximum(moments[..., 1 + dim :] / count - mean * mean, floor)
    return np.asarray(-0.5 * moments[..., 0] * np.log(variance).sum(-1))


def cluster(moments: Array, floor: Array) -> list[frozenset[int]]:
    """Return all clusters of an agglomerative clustering from single items to two clusters, by minimum likelihood loss.

    moments [items, kinds, 1 + 2 * dim]: an item is described by several Gaussians (the states of a phone).
    """
    alive = list(range(len(moments)))
    members = [frozenset([n]) for n in alive]
    clusters = list(members)
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
        clusters.append(members[a])
        moments[a] += moments[b]
        own[a] = likelihood(moments[a], floor).sum(-1)
        loss[b] = loss[:, b] = np.inf
        updated = losses(a)
        for n in alive:
            loss[a, n] = loss[n, a] = updated[n] if n != a else np.inf
    return clusters


def questions(statistics: ContextStatistics, phones: int, states: int, floor: Array) -> Array:
    """Return sets of phones with similar states, bool [questions, phones]; silence is a set of its own."""
    phone = statistics.keys // (phones * states) % phones
    state = statistics.keys % states
    moments = np.zeros((phones * states, statistics.moments.shape[1]))
    _add_rows(statistics.moments, phone * states + state, moments)
    by_phone = moments.reshape(phones, states, -1)
    observed = 1 + np.flatnonzero(by_phone[1:, :, 0].sum(1) > 0)
    phone_sets: dict[frozenset[int], None] = {frozenset([0]): None}
    for kinds in (slice(None), *(slice(n, n + 1) for n in range(states))):
        for members in cluster(by_phone[observed][:, kinds], floor):
            phone_sets[frozenset(observed[list(members)].tolist())] = None
    table = np.zeros((len(phone_sets), phones), bool)
    for row, members in enumerate(phone_sets):
        table[row, list(members)] = True
    return table


@dataclass
class _Leaf:
    phone: int
    state: int
    rows: Array  # rows of the statistics in this leaf
    region: Array  # bool [phones, phones]: left and right neighbors in this leaf
    total: Array  # moments


@dataclass(frozen=True)
class _Split:
    gain: float
    left: bool  # tests the left neighbor
    question: Array  # bool [phones]


class _Grower:
    def __init__(self, statistics: ContextStatistics, question_sets: Array, phones: int, states: int, floor: Array) -> None:
        self.moments, self.floor, self.phones = statistics.moments, floor, phones
        rest, self.state = np.divmod(statistics.keys, states)
        rest, self.right = np.divmod(rest, phones)
        self.left, self.phone = np.divmod(rest, phones)
        self.questions = question_sets

    def root(self, phone: int, state: int) -> _Leaf:
        rows = np.flatnonzero((self.phone == phone) & (self.state == state))
        return _Leaf(phone, state, rows, np.ones((self.phones, self.phones), bool), self.moments[rows].sum(0))

    def best_split(self, leaf: _Leaf, min_frames: float) -> _Split | None:
        if leaf.total[0] < 2 * min_frames:
            return None
        unsplit = likelihood(leaf.total, self.floor)
        best: _Split | None = None
        for left, neighbor in ((True, self.left), (False, self.right)):
            grouped = np.zeros((self.phones, self.moments.shape[1]))
            _add_rows(self.moments[leaf.rows], neighbor[leaf.rows], grouped)
            yes = self.questions @ grouped
            no = leaf.total - yes
            gain = likelihood(yes, self.floor) + likelihood(no, self.floor) - unsplit
            gain[(yes[:, 0] < min_frames) | (no[:, 0] < min_frames)] = -np.inf
            n = int(np.argmax(gain))
            if np.isfinite(gain[n]) and (best is None or gain[n] > best.gain):
                best = _Split(float(gain[n]), left, self.questions[n])
        return best

    def divide(self, leaf: _Leaf, split: _Split) -> tuple[_Leaf, _Leaf]:
        answer = split.question[(self.left if split.left else self.right)[leaf.rows]]
        region = split.question[:, None] if split.left else split.question[None, :]
        parts = []
        for rows, where in ((leaf.rows[answer], leaf.region & region), (leaf.rows[~answer], leaf.region & ~region)):
            parts.append(_Leaf(leaf.phone, leaf.state, rows, where, self.moments[rows].sum(0)))
        return parts[0], parts[1]


def build_trees(
    statistics: ContextStatistics,
    phones: int,
    states: Sequence[int],
    *,
    leaves: int,
    min_frames: float,
    min_gain: float,
    floor: Array,
) -> TiedStates:
    """Split the leaf with the largest gain until there are `leaves` leaves, or no split gains `min_gain`.

    states: number of states of each phone. Silence (phone 0) is not split. Each leaf keeps at least `min_frames` frames.
    """
    width = max(states)
    grower = _Grower(statistics, questions(statistics, phones, width, floor), phones, width, floor)
    current: dict[int, _Leaf] = {}
    candidates: list[tuple[float, int, _Split]] = []
    created = 0

    def add_leaf(leaf: _Leaf) -> None:
        nonlocal created
        current[created] = leaf
        split = grower.best_split(leaf, min_frames) if leaf.phone else None
        if split is not None and split.gain > min_gain:
            heapq.heappush(candidates, (-split.gain, created, split))
        created += 1

    for phone in range(phones):
        for state in range(states[phone]):
            add_leaf(grower.root(phone, state))
    gains = []
    while candidates and len(current) < leaves:
        _, number, split = heapq.heappop(candidates)
        gains.append(split.gain)
        for part in grower.divide(current.pop(number), split):
            add_leaf(part)
    return _tie(list(current.values()), grower, phones, width, floor, gains)


def _tie(leaves: list[_Leaf], grower: _Grower, phones: int, width: int, floor: Array, gains: list[float]) -> TiedStates:
    """Number the leaves by phone and state; a leaf without frames (an unseen phone) gets the Gaussian of all speech."""
    leaves.sort(key=lambda leaf: (leaf.phone, leaf.state))
    speech = grower.moments[grower.phone > 0].sum(0) if np.any(grower.phone > 0) else grower.moments.sum(0)
    moments = np.stack([leaf.total if leaf.total[0] > 0 else speech for leaf in leaves])
    dim = len(floor)
    mean = moments[:, 1 : 1 + dim] / moments[:, :1]
    variance = np.maximum(moments[:, 1 + dim :] / moments[:, :1] - mean * mean, floor)
    table = np.full((phones, phones, phones, width), -1, np.int32)
    for pdf, leaf in enumerate(leaves):
        table[:, leaf.phone, :, leaf.state][leaf.region] = pdf
    return TiedStates(table, np.array([leaf.total[0] for leaf in leaves]), mean, variance, gains)
