"""What all communicators have in common: reductions in rank order, membership, subgroups, shared vectors and their gossip.

`BaseCommunicator` holds the identity of a group. `GossipCommunicator` adds shared vectors, one-sided operations and the gossip
thread; a backend that extends it provides the collectives, and the connections to ranks that share no memory with this one.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from roundelay.comm.gossip.handle import BackgroundGossip
from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.vectors import LockTimeout, SharedVector, SharedVectors, VectorSegment
from roundelay.core import kernels
from roundelay.core.contracts import Matching, SharedWeights, Store
from roundelay.core.update_log import Op, UpdateLog
from roundelay.errors import PeerLost
from roundelay.fleet.membership import StoreMembership

CONNECT_S = 10.0
"""Seconds to wait for the first connections of gossip; training starts without those that are missing."""

logger = logging.getLogger(__name__)

# -- reductions in rank order: the same bits on every backend ------------------------------------------------------------


def weighted_mean(inputs: dict[int, tuple[Tensor, float | None]]) -> Tensor:
    """Return the mean of (vector, weight) of all ranks, summed in rank order. Weight None counts as 1."""
    x, size = inputs[0][0], len(inputs)
    xs = torch.stack([inputs[r][0].reshape(-1) for r in range(size)])
    weights = torch.tensor([1.0 if (weight := inputs[r][1]) is None else weight for r in range(size)], dtype=x.dtype)
    out = torch.empty_like(xs[0])
    kernels.ordered_sum(out, xs, weights)
    return out.div_(weights.sum()).view_as(x)


def plain_sum(inputs: dict[int, Tensor]) -> Tensor:
    """Return the sum of the vectors of all ranks, in rank order."""
    xs = torch.stack([inputs[r] for r in range(len(inputs))])
    out = torch.empty_like(xs[0])
    kernels.ordered_sum(out, xs, torch.ones(len(inputs), dtype=xs.dtype))
    return out


def weighted_sum(inputs: dict[int, Tensor], row: dict[int, float], out: Tensor | None = None) -> Tensor:
    """Return the sum over `row` of weight * vector, in rank order; `out` may be one of the vectors."""
    members = sorted(row)
    out = torch.empty_like(inputs[members[0]]) if out is None else out
    kernels.mix(out, [inputs[m] for m in members], [row[m] for m in members])
    return out


class SlicedMean:
    """A deterministic weighted mean on the network: each rank sums one slice in rank order, then all slices are gathered.

    It moves as many bytes as a ring all-reduce. The backend transposes `outgoing` to `incoming` (all-to-all), sums `weights`
    over all ranks if they are not all 1, and gathers `own_slice()` of all ranks for `result`.
    """

    def __init__(self, x: Tensor, weight: float | None, rank: int, size: int) -> None:
        self._x, self._size = x, size
        self.weights = torch.full((size,), 1.0, dtype=torch.float64)
        if weight is not None:
            self.weights.zero_()
            self.weights[rank] = weight
        self._slice = -(-x.numel() // size)
        self.outgoing = torch.zeros(size * self._slice, dtype=x.dtype)
        self.outgoing[: x.numel()] = x.detach().reshape(-1)
        self.incoming = torch.empty_like(self.outgoing)

    @property
    def bytes_sent(self) -> int:
        return self.outgoing.numel() * self.outgoing.element_size() * (self._size - 1) // self._size * 2

    def own_slice(self) -> Tensor:
        """Return this rank's slice of the mean. Call after the all-to-all."""
        weights = self.weights.to(self._x.dtype)
        own = torch.empty(self._slice, dtype=self._x.dtype)
        kernels.ordered_sum(own, self.incoming.view(self._size, self._slice), weights)
        return own.div_(weights.sum())

    def result(self, slices: Tensor) -> Tensor:
        """Return the mean from the gathered slices."""
        return slices[: self._x.numel()].view_as(self._x).to(self._x.device)


def all_reduce_bytes(x: Tensor, size: int) -> int:
    """Return the bytes one rank sends in a ring all-reduce of x."""
    return 2 * x.numel() * x.element_size() * (size - 1) // size


# -- communicators -------------------------------------------------------------------------------------------------------


class BaseCommunicator:
    """Identity of one rank in a group: its ranks, its name, the store and the membership of the job."""

    def __init__(
        self, store: Any, ranks: Sequence[int], rank: int, name: str, membership: StoreMembership | None = None
    ) -> None:
        self.store, self.ranks, self.rank, self.size, self.name = store, list(ranks), rank, len(ranks), name
        self.membership = membership or StoreMembership(store)
        """Shared by all groups of a job, so that one reader of the store informs all of them."""

    def live_ranks(self) -> list[int]:
        """Return the members not known to have failed, as ranks of this group."""
        failed = self.membership.failed_ranks()
        return [member for member in range(self.size) if self.ranks[member] not in failed]

    def _subgroup(self, ranks: Sequence[int], name: str) -> tuple[list[int], int, str]:
        """Return the job ranks, the own rank and the name of a subgroup that contains this rank."""
        return [self.ranks[r] for r in ranks], list(ranks).index(self.rank), f"{self.name}/{name}"

    def _report_failure(self, member: int, reason: str) -> None:
        self.membership.report(self.ranks[member], reason)

    def known_failures(self) -> list[int]:
        """Return the members that this process already knows to have failed, as ranks of this group. Does not block."""
        failed = self.membership.cached
        return [member for member, rank in enumerate(self.ranks) if rank in failed]

    def silent_peers(self) -> list[int]:
        """Return the live partners with which exchanges fail now, as ranks of this group. Does not block."""
        return []

    def raise_if_member_failed(self) -> None:
        """Raise PeerLost that names the failed members, if there are any. Reads the store."""
        error = self.membership.error(self.ranks, self.ranks[self.rank], "connecting to the other ranks")
        if error is not None:
            raise error


class GossipCommunicator(BaseCommunicator):
    """A communicator whose shared vectors are exchanged by a `GossipThread`.

    `publish` of the backend calls `_share`, which creates the thread. `gossip`, or a backend whose peers may send requests
    before that, starts it.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        name: str,
        timeout_s: float,
        membership: StoreMembership | None = None,
    ) -> None:
        super().__init__(store, ranks, rank, name, membership)
        self.timeout_s = timeout_s
        self._vectors: SharedVectors | None = None
        self._gossip_thread: GossipThread | None = None
        self._update_log: UpdateLog | None = None
        self._bytes = 0

    def _share(self, vectors: SharedVectors, token: bytes = b"", listener: socket.socket | None = None) -> SharedVector:
        """Return this rank's shared vector and create its gossip thread, which is not started yet."""
        self._vectors = vectors
        shared_weights = SharedVector(vectors, self.rank)
        self._gossip_thread = GossipThread(
            shared_weights,
            vectors,
            self.size,
            token,
            listener,
            self._report_failure,
            self.known_failures,
            self._address if listener is not None else None,
        )
        if self._update_log is not None:
            self._gossip_thread.record(self._update_log)
        return shared_weights

    def _address(self, peer: int) -> str:
        """Return the address of a peer's gossip thread; may block."""
        raise NotImplementedError

    def _connect_partners(self, thread: GossipThread, matching: Matching) -> None:
        """Hand connections to partners to the thread. By default it connects by itself."""

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> BackgroundGossip:
        thread = self._gossip_thread
        assert thread is not None, "publish() comes first"
        self._connect_partners(thread, matching)
        thread.start()
        thread.gossip(matching, steps_per_exchange)
        if late := thread.await_partners(min(self.timeout_s, CONNECT_S)):
            logger.warning(
                "rank %d has no connection to ranks %s yet; it starts without them and keeps trying",
                self.ranks[self.rank],
                [self.ranks[peer] for peer in late],
            )
        return BackgroundGossip(thread, self.membership, self.store, self.ranks, self.rank, self.name)

    def silent_peers(self) -> list[int]:
        thread = self._gossip_thread
        return thread.silent_peers() if thread is not None else []

    @contextmanager
    def _locked(self, peer: int) -> Iterator[VectorSegment]:
        """Lock the vector of a rank of this node. Raises PeerLost after `timeout_s`."""
        assert self._vectors is not None
        try:
            with self._vectors.lock(peer, self.timeout_s) as segment:
                yield segment
        except LockTimeout as error:
            raise PeerLost(
                f"the vector of rank {self.ranks[peer]} was not free within {self.timeout_s:.0f} s",
                where=f"rank {self.ranks[self.rank]}, shared memory",
                hint="a process of this machine was suspended while it used it; start again with resume=auto",
            ) from error

    def remote_add(self, peer: int, d: Tensor) -> int:
        assert self._vectors is not None
        d = d.detach().to("cpu").contiguous()
        if peer in self._vectors.here:
            with self._locked(peer) as target:
                number, version = target.count(writes=1)
                if self._update_log is not None:
                    self._update_log.append(Op.REMOTE_ADD, peer, number, self.rank)
                target.vector.add_(d)
            return version - 1
        self._bytes += d.numel() * d.element_size()
        return self._request_add(peer, d)

    def remote_get(self, peer: int, out: Tensor) -> int:
        assert self._vectors is not None
        if peer in self._vectors.here:
            with self._locked(peer) as source:
                number, version = source.count()
                if self._update_log is not None:
                    self._update_log.append(Op.REMOTE_GET, peer, number, self.rank)
                out.copy_(source.vector)
            return version
        host = out.detach().to("cpu")
        version = self._request_get(peer, host)
        if host.data_ptr() != out.data_ptr():
            out.copy_(host)
        return version

    def _request_add(self, peer: int, d: Tensor) -> int:
        """Add to the vector of a rank on another node; return its version before the addition."""
        raise NotImplementedError

    def _request_get(self, peer: int, out: Tensor) -> int:
        """Copy the vector of a rank on another node; return its version."""
        raise NotImplementedError

    def record(self, update_log: UpdateLog) -> None:
        self._update_log = update_log
        if self._gossip_thread is not None:
            self._gossip_thread.record(update_log)

    def bytes_sent(self) -> int:
        thread = self._gossip_thread
        return self._bytes + (thread.connections.sent_bytes if thread is not None else 0)

    def _close_gossip(self) -> None:
        """Stop the gossip thread and release the shared vectors. May be called twice."""
        thread, self._gossip_thread = self._gossip_thread, None
        vectors, self._vectors = self._vectors, None
        if thread is not None:
            self._bytes += thread.connections.sent_bytes
            thread.close()
        if vectors is not None:
            vectors.close()
