"""Processes, on one machine or many: torch.distributed carries the rendezvous, agents carry the exchanges.

Collectives run on a process group of their own (gloo on CPU; NCCL on GPU, untested here). One-sided verbs and exchanges go
through the agents: in shared memory between learners of one machine (backend shm, or auto), over a connection per edge
otherwise. Published vectors live in host memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, AllToAllOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo

from roundelay.comm.gossip.handle import BackgroundGossip
from roundelay.comm.gossip.thread import GossipThread, bytes_of
from roundelay.comm.gossip.transport import RemoteMemoryClient, connect, listen
from roundelay.comm.node_group import CollectiveNodeGroup, ShmNodeGroup
from roundelay.comm.shared_memory import LocalVectors, SharedVector, SharedVectors, ShmVectors
from roundelay.core import kernels
from roundelay.core.contracts import Matching, NodeGroup, SharedWeights
from roundelay.core.update_log import Op, UpdateLog
from roundelay.errors import PeerLost, RoundelayError
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore


def gloo(store: JobStore, name: str, rank: int, size: int, bind_address: str, timeout_s: float) -> ProcessGroupGloo:
    """A gloo group of its own, bound to one address."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [ProcessGroupGloo.create_device(hostname=bind_address)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(PrefixStore(f"{store.prefix}gloo/{name}", store.tcp), rank, size, options)


class _TorchWork:
    """A collective under way."""

    def __init__(self, comm: TorchCommunicator, works: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._comm, self._works, self._finish = comm, works, finish

    @property
    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        for work in self._works:
            self._comm.patiently(work.wait)
        return self._finish()


BROKEN: list[Any] = []
"""Groups that have lost a member. They end with the process: one that is taken down while its own threads find out about the
death may take the whole process along."""


class TorchCommunicator:
    """One process's view of the job, or of a part of it."""

    def __init__(
        self,
        store: JobStore,
        ranks: Sequence[int],
        rank: int,
        machines: Sequence[str],
        *,
        bind_address: str = "127.0.0.1",
        share_memory: bool = True,
        timeout_s: float = 60.0,
        device: torch.device | None = None,
        name: str = "all",
    ) -> None:
        self.store, self.ranks, self.rank, self.size = store, list(ranks), rank, len(ranks)
        self.machines, self.bind_address, self.name, self.timeout_s = list(machines), bind_address, name, timeout_s
        self.share_memory, self.device = share_memory, device or torch.device("cpu")
        self.membership = StoreMembership(store)
        self._group = self._make_group()
        self._board: SharedVectors | None = None
        self._agent: GossipThread | None = None
        self._update_log: UpdateLog | None = None
        self._node_group: ShmNodeGroup | None = None
        self._callers: dict[int, RemoteMemoryClient] = {}
        self._bytes = 0
        self._token = b""

    def _make_group(self) -> Any:
        if self.size == 1:
            return None
        if self.device.type == "cuda":  # GPU: untested here
            from torch.distributed import ProcessGroupNCCL

            prefixed = PrefixStore(f"{self.store.prefix}nccl/{self.name}", self.store.tcp)
            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout_s)
            return ProcessGroupNCCL(prefixed, self.rank, self.size, options)
        return self.patiently(lambda: gloo(self.store, self.name, self.rank, self.size, self.bind_address, self.timeout_s))

    def patiently(self, wait: Callable[[], Any]) -> Any:
        """Runs a rendezvous; where it fails, says who was lost."""
        try:
            return wait()
        except (RuntimeError, OSError) as error:
            raise self.membership.explain(error, self.ranks, self.ranks[self.rank]) from error

    def live_ranks(self) -> list[int]:
        dead = self.membership.failed_ranks()
        return [m for m in range(self.size) if self.ranks[m] not in dead]

    # -- rendezvous ------------------------------------------------------------------------------------------------

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> _TorchWork:
        if deterministic_reduce:
            return self._start_exact_mean(x, weight)
        out = x.to(self.device).clone() if weight is None else x.to(self.device) * weight
        works = [self._allreduce(out)]
        total = torch.tensor([float(weight if weight is not None else 1)], dtype=torch.float64, device=self.device)
        if weight is None:
            total.fill_(self.size)
        else:
            works.append(self._allreduce(total))
        return _TorchWork(self, works, lambda: out.div_(total.to(out.dtype)).to(x.device))

    def _start_exact_mean(self, x: Tensor, weight: float | None) -> _TorchWork:
        """Everybody sums one slice in rank order and hands it round: the bytes of a ring, the same bits every time."""
        weights = torch.full((self.size,), 1.0, dtype=torch.float64)
        works: list[Any] = []
        if weight is not None:
            weights.zero_()
            weights[self.rank] = weight
            works.append(self._allreduce(weights))
        slice_ = -(-x.numel() // self.size)
        outgoing = torch.zeros(self.size * slice_, dtype=x.dtype)
        outgoing[: x.numel()] = x.reshape(-1)
        incoming = torch.empty_like(outgoing)
        self._bytes += outgoing.numel() * outgoing.element_size() * (self.size - 1) // self.size * 2
        works.append(self.patiently(lambda: self._group.alltoall_base(incoming, outgoing, [], [], AllToAllOptions())))

        def finish() -> Tensor:
            typed = weights.to(x.dtype)
            mine = torch.empty(slice_, dtype=x.dtype)
            kernels.ordered_sum(mine, incoming.view(self.size, slice_), typed)
            mine.div_(typed.sum())
            parts = [torch.empty_like(mine) for _ in range(self.size)]
            self.patiently(self._group.allgather([parts], [mine]).wait)
            return torch.cat(parts)[: x.numel()].view_as(x)

        return _TorchWork(self, works, finish)

    def _allreduce(self, x: Tensor) -> Any:
        self._bytes += 2 * x.numel() * x.element_size() * (self.size - 1) // self.size
        return self.patiently(lambda: self._group.allreduce([x], AllreduceOptions()))

    def all_reduce_(self, x: Tensor) -> _TorchWork:
        return _TorchWork(self, [self._allreduce(x)], lambda: x)

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> _TorchWork:
        members = sorted(row)
        received = {member: x if member == self.rank else torch.empty_like(x) for member in members}
        works = []
        for member in members:
            if member != self.rank:
                works.append(self.patiently(partial(self._group.recv, [received[member]], member, 0)))
                works.append(self.patiently(partial(self._group.send, [x], member, 0)))
                self._bytes += x.numel() * x.element_size()

        def finish() -> Tensor:
            out = next(received[member] for member in members if member != self.rank)
            kernels.mix(out, [received[member] for member in members], [row[member] for member in members])
            return out

        return _TorchWork(self, works, finish)

    def broadcast(self, x: Tensor) -> None:
        if self.size > 1:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self.patiently(lambda: self._group.broadcast([x], options).wait())
            self._bytes += x.numel() * x.element_size() if self.rank == 0 else 0

    def node_group(self, like: Tensor) -> NodeGroup:
        together = self.share_memory and len(set(self.machines)) == 1 and self.device.type == "cpu"
        if self.size == 1 or not together:
            return CollectiveNodeGroup(self)
        self._node_group = ShmNodeGroup(
            self.rank, self.size, like, self.store, f"{self.name}/node_group", self.timeout_s, self.patiently
        )
        return self._node_group

    # -- one-sided -------------------------------------------------------------------------------------------------

    def publish(self, vector: Tensor) -> SharedWeights:
        kernels.compile_for(vector.dtype)
        host_vector = vector.detach().to("cpu")
        mine = self.machines[self.rank]
        here = [m for m in range(self.size) if self.share_memory and self.machines[m] == mine] or [self.rank]
        board: SharedVectors
        if len(here) > 1:
            board = ShmVectors(here, self.rank, host_vector, self.store, f"{self.name}/{mine}", self.timeout_s)
        else:
            memory = LocalVectors([self.rank])
            memory.publish(self.rank, host_vector)
            board = memory.seen_by(self.rank)
        self._board = board
        shared_weights = SharedVector(board, self.rank)
        away = [m for m in range(self.size) if m not in here]
        listener = listen(self.bind_address) if away else None
        self._token = self.store.claim(f"{self.name}/token", secrets.token_hex(16)).encode()
        self._agent = GossipThread(
            shared_weights,
            board,
            self.size,
            self._token,
            listener,
            lambda r, why: self.membership.report(self.ranks[r], why),
        )
        if listener is not None:
            bind_address, port = listener.getsockname()[:2]
            self.store.set(f"{self.name}/agent/{self.rank}", f"{bind_address}:{port}")
            self._agent.start()
        return shared_weights

    def _address(self, peer: int) -> str:
        deadline = time.monotonic() + self.timeout_s
        while (address := self.store.get(f"{self.name}/agent/{peer}")) is None:
            if time.monotonic() > deadline or self.ranks[peer] in self.membership.failed_ranks():
                raise PeerLost(
                    f"rank {self.ranks[peer]} did not say where its agent listens",
                    where=f"rank {self.ranks[self.rank]}, after {self.timeout_s:.0f} s",
                    hint="look at its log; raise timeout_s if it starts slowly",
                )
            time.sleep(0.005)
        return address

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> BackgroundGossip:
        assert self._agent is not None
        assert self._board is not None
        away = {m for m in range(self.size) if m not in self._board.here}
        partners = 0
        for low, high in sorted(matching.edges):
            if self.rank == low and high in away:
                self._agent.traffic.invite(high, connect(self._address(high), self.rank, self._token, self.timeout_s))
            partners += (self.rank == low and high in away) or (self.rank == high and low in away)
        if not self._agent.running:
            self._agent.start()
        self._agent.await_partners(partners, self.timeout_s)
        self._agent.gossip(matching, steps_per_exchange)
        return BackgroundGossip(self._agent, self.membership, self.ranks, self.rank, self.name, self.timeout_s, self.store)

    def _remote(self, peer: int) -> RemoteMemoryClient:
        if peer not in self._callers:
            self._callers[peer] = RemoteMemoryClient(
                self._address(peer), self.rank, self.ranks[peer], self._token, self.timeout_s
            )
        return self._callers[peer]

    def remote_add(self, peer: int, d: Tensor) -> int:
        assert self._board is not None
        d = d.to("cpu").contiguous()
        if peer in self._board.here:
            theirs = SharedVector(self._board, peer)
            with theirs.locked():
                number, version = theirs.count(writes=1)
                if self._update_log is not None:
                    self._update_log.append(Op.REMOTE_ADD, peer, number, self.rank)
                theirs.vector.add_(d)
            return version - 1
        self._bytes += d.numel() * d.element_size()
        return self._remote(peer).add(bytes_of(d))

    def remote_get(self, peer: int, out: Tensor) -> int:
        assert self._board is not None
        if peer in self._board.here:
            theirs = SharedVector(self._board, peer)
            with theirs.locked():
                number, version = theirs.count()
                if self._update_log is not None:
                    self._update_log.append(Op.REMOTE_GET, peer, number, self.rank)
                out.copy_(theirs.vector)
            return version
        return self._remote(peer).get(bytes_of(out))

    def record(self, update_log: UpdateLog) -> None:
        assert self._agent is not None
        self._update_log = self._agent.update_log = update_log

    # -- parts and end ---------------------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], name: str) -> TorchCommunicator | None:
        if self.rank not in ranks:
            return None
        return TorchCommunicator(
            self.store,
            [self.ranks[r] for r in ranks],
            list(ranks).index(self.rank),
            [self.machines[r] for r in ranks],
            bind_address=self.bind_address,
            share_memory=self.share_memory,
            timeout_s=self.timeout_s,
            device=self.device,
            name=f"{self.name}/{name}",
        )

    def bytes_sent(self) -> int:
        return self._bytes + (self._agent.traffic.sent_bytes if self._agent is not None else 0)

    def close(self) -> None:
        if self._node_group is not None:
            self._node_group.close()
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            caller.close()
        agent, self._agent, board, self._board = self._agent, None, self._board, None
        if agent is not None:
            self._bytes += agent.traffic.sent_bytes
            agent.close()
        if board is not None:
            board.close()
        if self._group is not None and self._lost_somebody():
            BROKEN.append(self._group)

    def _lost_somebody(self) -> bool:
        try:
            return len(self.live_ranks()) < self.size
        except RoundelayError:  # the store is gone, and with it whoever served it
            return True
