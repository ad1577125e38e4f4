"""The average of two vectors in shared memory, performed by one side alone, whatever the partner's threads are doing."""

from __future__ import annotations

import time
from contextlib import suppress

from torch import Tensor

from roundelay.comm.vectors import AVERAGED, FENCED, GOSSIPS, ROUNDS, LockTimeout, SharedVectors, VectorSegment
from roundelay.core import kernels
from roundelay.core.update_log import Op, UpdateLog
from roundelay.errors import PeerLost

OVERTAKEN = -1
DISTANCE_SAMPLE = 4096
"""Number of elements from which the distance between partners is estimated."""


def relative_distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |a|, estimated from a sample of elements."""
    stride = max(1, a.numel() // DISTANCE_SAMPLE)
    x, y = a[::stride], b[::stride]
    return float((x - y).norm() / (x.norm() + 1e-12))


class PairAverager:
    """Average the vector of this rank with those of other ranks of its node. For one thread at a time.

    distance    sum of the distances between partners before their averages
    """

    def __init__(self, vectors: SharedVectors) -> None:
        self.vectors, self.rank = vectors, vectors.rank
        self.update_log: UpdateLog | None = None
        self.distance = 0.0

    def average(self, peer: int, round: int, timeout_s: float) -> int | None:
        """Average both vectors; return the logical clock of both sides after it, or None if a lock was not free in time.

        `round` is the round of this exchange. If a partner has averaged with this rank since, do nothing and return OVERTAKEN.
        Neither lock is held while this thread waits for the other one, so that no gradient on either side waits longer than for
        one average. Returns None as well if one side does not gossip yet, was declared failed, or its process has ended.
        """
        deadline = time.monotonic() + timeout_s
        first, second = peer, self.rank
        while True:
            try:
                with (
                    self.vectors.lock(first, max(deadline - time.monotonic(), 0.0)) as one,
                    suppress(LockTimeout),
                    self.vectors.lock(second, 0.0) as two,
                ):
                    own, other = (one, two) if first == self.rank else (two, one)
                    return self._average(own, other, peer, round)
            except (LockTimeout, PeerLost):  # PeerLost: its process has ended, which the next tick finds out
                return None
            if time.monotonic() >= deadline:
                return None
            first, second = second, first  # wait for the lock that was taken

    def _average(self, own: VectorSegment, other: VectorSegment, peer: int, round: int) -> int | None:
        if own.header[ROUNDS] > round:
            return OVERTAKEN
        if own.header[FENCED] or other.header[FENCED]:
            return None
        if not other.header[GOSSIPS]:  # its first assignment would overwrite the average
            return None
        rounds = max(int(other.header[ROUNDS]), round)
        a, b = (own.vector, other.vector) if self.rank < peer else (other.vector, own.vector)
        self.distance += relative_distance(a, b)
        kernels.pair_average(a, b)
        for segment, rank, partner in ((own, self.rank, peer), (other, peer, self.rank)):
            number, _ = segment.count(writes=1)
            segment.header[ROUNDS] = rounds + 1
            if self.update_log is not None:
                self.update_log.append(Op.PAIR_AVERAGE, rank, number, partner, rounds)
        other.header[AVERAGED] += 1
        return rounds + 1
