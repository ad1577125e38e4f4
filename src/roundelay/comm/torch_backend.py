"""Ranks as processes, on one node or many: torch.distributed for collectives, the gossip thread for exchanges.

Collectives run on a process group of their own: gloo on CPU, NCCL on GPU (untested). Exchanges and one-sided operations use
shared memory between ranks of one node (backend shm or auto) and one TCP connection per edge otherwise. Shared vectors live in
host memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, AllToAllOptions, BroadcastOptions, ProcessGroupGloo

from roundelay.comm.base import GossipCommunicator, SlicedMean, all_reduce_bytes, weighted_sum
from roundelay.comm.gossip.transport import RemoteMemoryClient, bytes_of, listen
from roundelay.comm.node_group import CollectiveNodeGroup, ShmNodeGroup
from roundelay.comm.shared_memory import ShmVectors
from roundelay.comm.torch_store import TorchStore
from roundelay.comm.tree_average import TreeAverage
from roundelay.comm.vectors import LocalVectors, SharedVectors
from roundelay.core import kernels
from roundelay.core.contracts import NodeGroup, SharedWeights
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost, RoundelayError
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore

_broken_groups: list[Any] = []
"""Process groups that have lost a member, kept until the process ends: destroying one while its threads notice the lost
connection can crash the process."""


class _Gloo(ProcessGroupGloo):
    """A gloo group that keeps its store alive."""

    def __init__(self, torch_store: TorchStore, rank: int, size: int, options: Any) -> None:
        super().__init__(torch_store, rank, size, options)
        self._torch_store = torch_store


def gloo(
    store: JobStore,
    name: str,
    rank: int,
    size: int,
    bind_address: str,
    timeout_s: float,
    check_members: Callable[[], None] = lambda: None,
) -> ProcessGroupGloo:
    """Create a gloo group bound to one address. Collective. `check_members` may raise to end the wait for other ranks."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [ProcessGroupGloo.create_device(hostname=bind_address)]
    options._timeout = timedelta(seconds=timeout_s)
    torch_store = TorchStore(store.under(f"gloo/{name}"), timeout_s, check_members, ranks=size)
    return _Gloo(torch_store, rank, size, options)


class _TorchWork:
    """A collective in progress."""

    def __init__(self, comm: TorchCommunicator, works: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._comm, self._works, self._finish = comm, works, finish

    @property
    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        for work in self._works:
            self._comm.guard(work.wait)
        return self._finish()


class TorchCommunicator(GossipCommunicator):
    """The communicator of one process. Collective: all `ranks` must construct it."""

    store: JobStore

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
        membership: StoreMembership | None = None,
    ) -> None:
        super().__init__(store, ranks, rank, name, timeout_s, membership)
        self.machines, self.bind_address, self.share_memory = list(machines), bind_address, share_memory
        self.device = device or torch.device("cpu")
        self._group = self._create_group()
        self._node_group: ShmNodeGroup | None = None
        self._clients: dict[int, RemoteMemoryClient] = {}
        self._addresses: dict[int, str] = {}
        self._token = b""

    def _create_group(self) -> Any:
        if self.size == 1:
            return None
        if self.device.type == "cuda":  # GPU: untested
            from torch.distributed import ProcessGroupNCCL

            self._torch_store = TorchStore(self.store.under(f"nccl/{self.name}"), self.timeout_s)
            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout_s)
            return ProcessGroupNCCL(self._torch_store, self.rank, self.size, options)
        return self.guard(
            lambda: gloo(
                self.store, self.name, self.rank, self.size, self.bind_address, self.timeout_s, self.raise_if_member_failed
            )
        )

    def guard(self, call: Callable[[], Any]) -> Any:
        """Run a blocking call of a collective; turn its RuntimeError or OSError into PeerLost that names the failed rank."""
        try:
            return call()
        except (RuntimeError, OSError) as error:
            raise self.membership.explain(error, self.ranks, self.ranks[self.rank]) from error

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> _TorchWork:
        if deterministic_reduce:
            return self._deterministic_mean(x, weight)
        out = x.to(self.device).clone() if weight is None else x.to(self.device) * weight
        works = [self._all_reduce(out)]
        total = torch.tensor([float(weight if weight is not None else 1)], dtype=torch.float64, device=self.device)
        if weight is None:
            total.fill_(self.size)
        else:
            works.append(self._all_reduce(total))
        return _TorchWork(self, works, lambda: out.div_(total.to(out.dtype)).to(x.device))

    def _deterministic_mean(self, x: Tensor, weight: float | None) -> _TorchWork:
        mean = SlicedMean(x, weight, self.rank, self.size)
        works = [self._all_reduce(mean.weights)] if weight is not None else []
        self._bytes += mean.bytes_sent
        works.append(self.guard(lambda: self._group.alltoall_base(mean.incoming, mean.outgoing, [], [], AllToAllOptions())))

        def finish() -> Tensor:
            own = mean.own_slice()
            slices = [torch.empty_like(own) for _ in range(self.size)]
            self.guard(self._group.allgather([slices], [own]).wait)
            return mean.result(torch.cat(slices))

        return _TorchWork(self, works, finish)

    def _all_reduce(self, x: Tensor) -> Any:
        self._bytes += all_reduce_bytes(x, self.size)
        return self.guard(lambda: self._group.allreduce([x], AllreduceOptions()))

    def all_reduce_(self, x: Tensor) -> _TorchWork:
        return _TorchWork(self, [self._all_reduce(x)], lambda: x)

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> _TorchWork:
        members = sorted(row)
        received = {member: x if member == self.rank else torch.empty_like(x) for member in members}
        works = []
        for member in members:
            if member != self.rank:
                works.append(self.guard(partial(self._group.recv, [received[member]], member, 0)))
                works.append(self.guard(partial(self._group.send, [x], member, 0)))
                self._bytes += x.numel() * x.element_size()
        first = next(member for member in members if member != self.rank)
        return _TorchWork(self, works, lambda: weighted_sum(received, row, out=received[first]))

    def broadcast(self, x: Tensor) -> None:
        if self.size > 1:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self.guard(lambda: self._group.broadcast([x], options).wait())
            self._bytes += x.numel() * x.element_size() if self.rank == 0 else 0

    def mean_around_broken_links(self, vectors: Sequence[Tensor], members: Sequence[int], name: str) -> list[Tensor]:
        """Return the means of the vectors over `members` of this group, some of which may not reach each other. Collective.

        Slower than `all_reduce_mean`. `name` must be new. Raises PeerLost if a member fails, or if too few reach this rank.
        """
        token = self.store.claim(f"{self.name}/token", secrets.token_hex(16)).encode()
        tree = TreeAverage(
            self.store,
            f"{self.name}/{name}",
            members,
            self.rank,
            self.bind_address,
            token,
            self.timeout_s,
            lambda: set(range(self.size)) - set(self.live_ranks()),
        )
        try:
            return tree.mean(vectors)
        finally:
            tree.close()

    def node_group(self, like: Tensor) -> NodeGroup:
        shares_memory = self.share_memory and len(set(self.machines)) == 1 and self.device.type == "cpu"
        if self.size == 1 or not shares_memory:
            return CollectiveNodeGroup(self)
        self._node_group = ShmNodeGroup(
            self.rank, self.size, like, self.store, f"{self.name}/node_group", self.timeout_s, self.guard
        )
        return self._node_group

    # -- shared vectors --------------------------------------------------------------------------------------------

    def publish(self, vector: Tensor) -> SharedWeights:
        kernels.compile_for(vector.dtype)
        host_vector = vector.detach().to("cpu")
        node = self.machines[self.rank]
        here = [m for m in range(self.size) if self.share_memory and self.machines[m] == node] or [self.rank]
        vectors: SharedVectors
        if len(here) > 1:
            vectors = ShmVectors(
                here, self.rank, host_vector, self.store, f"{self.name}/{node}", self.timeout_s, self.raise_if_member_failed
            )
        else:
            local = LocalVectors([self.rank])
            local.publish(self.rank, host_vector)
            vectors = local.view(self.rank)
        listener = listen(self.bind_address) if len(here) < self.size else None
        self._token = self.store.claim(f"{self.name}/token", secrets.token_hex(16)).encode()
        shared_weights = self._share(vectors, self._token, listener)
        if listener is not None:  # other nodes may send requests from now on
            host, port = listener.getsockname()[:2]
            self.store.set(f"{self.name}/gossip/{self.rank}", f"{host}:{port}")
            assert self._gossip_thread is not None
            self._gossip_thread.start()
        return shared_weights

    def _address(self, peer: int) -> str:
        """Return the address of a peer's gossip thread; block until it is in the store."""
        if peer in self._addresses:
            return self._addresses[peer]

        def error() -> PeerLost:
            return PeerLost(
                f"rank {self.ranks[peer]} did not publish the address of its gossip thread",
                where=f"rank {self.ranks[self.rank]}, after at most {self.timeout_s:.0f} s",
                hint="look at its log; raise timeout_s if it starts slowly",
            )

        def address() -> str | None:
            text = self.store.get(f"{self.name}/gossip/{peer}")
            if text is None and self.ranks[peer] in self.membership.failed_ranks():
                raise error()
            return text

        text = wait_until(address, self.timeout_s, error)
        assert text is not None
        self._addresses[peer] = text
        return text

    def _client(self, peer: int) -> RemoteMemoryClient:
        if peer not in self._clients:
            self._clients[peer] = RemoteMemoryClient(
                self._address(peer), self.rank, self.ranks[peer], self._token, self.timeout_s
            )
        return self._clients[peer]

    def _request_add(self, peer: int, d: Tensor) -> int:
        return self._client(peer).add(bytes_of(d))

    def _request_get(self, peer: int, out: Tensor) -> int:
        return self._client(peer).get(bytes_of(out))

    # -- subgroups and end -----------------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], name: str, timeout_s: float | None = None) -> TorchCommunicator | None:
        if self.rank not in ranks:
            return None
        job_ranks, rank, name = self._subgroup(ranks, name)
        return TorchCommunicator(
            self.store,
            job_ranks,
            rank,
            [self.machines[r] for r in ranks],
            bind_address=self.bind_address,
            share_memory=self.share_memory,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            device=self.device,
            name=name,
            membership=self.membership,
        )

    def close(self) -> None:
        if self._node_group is not None:
            self._node_group.close()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()
        self._close_gossip()
        if self._group is not None and self._has_lost_members():
            _broken_groups.append(self._group)

    def _has_lost_members(self) -> bool:
        try:
            return len(self.live_ranks()) < self.size
        except RoundelayError:  # the store is gone, and with it the rank that served it
            return True
