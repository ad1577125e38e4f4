"""Ranks started by mpirun or srun: MPI carries the collectives and the messages of the gossip threads.

Means are non-blocking all-reduces on the group's own MPI communicator. Deterministic means are an all-to-all, a sum in rank
order and an all-gather. Exchanges and one-sided operations are messages too: MPI windows were measured to be slower
(docs/mpi.md), and the lock of a vector would have to be MPI's. Only the job's store does not use MPI: rank 0 serves it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundelay.comm.base import GossipCommunicator, SlicedMean, weighted_sum
from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.gossip.transport import ConnectionClosed, Message, MessageType, bytes_of
from roundelay.comm.mpi_progress import MpiRequestBatch, MpiRuntime, abort_mpi
from roundelay.comm.node_group import CollectiveNodeGroup
from roundelay.comm.vectors import LocalVectors
from roundelay.core import kernels
from roundelay.core.contracts import Matching, NodeGroup, SharedWeights
from roundelay.errors import PeerLost
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore, wait_for_key

HEADER, EXCHANGE, REQUEST, REPLY, REPLY_DATA, NEIGHBOR = range(6)
"""Tags: header to a gossip thread; snapshot; payload of a request; header of a reply; payload of a reply; neighbor average."""
HEADER_FIELDS = ("kind", "number", "bytes", "sender")


class _MpiWork:
    """A collective in progress."""

    def __init__(self, comm: MpiCommunicator, batch: MpiRequestBatch, finish: Callable[[], Tensor]) -> None:
        self._comm, self._batch, self._finish = comm, batch, finish

    @property
    def done(self) -> bool:
        return self._batch.finished.is_set()

    def wait(self) -> Tensor:
        self._comm.wait(self._batch)
        return self._finish()


class MpiConnection:
    """The messages between a gossip thread and one peer; see `PeerConnection` for the contract.

    The peer is a partner for exchanges or a client of one-sided operations. The MPI progress thread delivers headers and
    completed payloads; a payload stays with its sender until memory is provided.
    """

    def __init__(self, comm: MpiCommunicator, peer: int, *, is_client: bool) -> None:
        self.peer: int | None = None if is_client else peer
        self.client = -1
        self.sent_bytes = 0
        self.writes = False
        self._comm, self._rank = comm, peer
        tags = (REPLY, REPLY_DATA, REQUEST) if is_client else (HEADER, EXCHANGE, EXCHANGE)
        self._header_tag, self._send_tag, self._receive_tag = tags
        self._headers: deque[Message] = deque()
        self._message: Message | None = None
        self._arrived = False
        self._received_bytes = 0

    def fileno(self) -> int:
        return -1

    @property
    def reads(self) -> bool:
        return self._arrived if self._message is not None else bool(self._headers)

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None:
        nbytes = len(payload) if payload is not None else 0
        comm, mpi_comm = self._comm, self._comm.mpi_comm
        header = np.array([kind, number, nbytes, comm.rank], dtype=np.int64)

        def post() -> list[Any]:
            requests = [mpi_comm.Isend(header, self._rank, self._header_tag)]
            return requests + ([mpi_comm.Isend(payload, self._rank, self._send_tag)] if payload is not None else [])

        def on_sent() -> None:
            self.sent_bytes += header.nbytes + nbytes
            comm.wake()

        comm.progress.submit(post, on_sent)

    def flush(self) -> None:
        """Do nothing: the MPI progress thread sends."""

    def deliver(self, message: Message) -> None:
        """Queue a header that has arrived. Called by the MPI progress thread."""
        self._headers.append(message)

    def read(self) -> Message | None:
        if self._message is not None:
            if not self._arrived:
                return None
            message, self._message, self._arrived = self._message, None, False
            return message
        if not self._headers:
            return None
        message = self._headers.popleft()
        if message.bytes:
            self._message = message
        return message

    def receive(self, buffer: memoryview) -> None:
        assert self._message is not None
        if len(buffer) != self._message.bytes:
            raise ConnectionClosed(f"payload must have {len(buffer)} bytes (got {self._message.bytes})")
        comm = self._comm

        def on_received() -> None:
            self._received_bytes += len(buffer)
            self._arrived = True
            comm.wake()

        comm.progress.submit(lambda: [comm.mpi_comm.Irecv(buffer, self._rank, self._receive_tag)], on_received)

    def bytes_moved(self) -> int:
        return self.sent_bytes + self._received_bytes

    def check_alive(self, waited_s: float) -> None:
        """Raise PeerLost if the membership lists the peer as failed; MPI itself may not report it."""
        comm = self._comm
        if waited_s > comm.timeout_s and (reason := comm.membership.failed_ranks().get(comm.ranks[self._rank])):
            comm.broken = True
            abort_mpi(PeerLost.exit_code)
            raise PeerLost(
                f"rank {comm.ranks[self._rank]} ({reason}) was lost",
                where=f"rank {comm.ranks[comm.rank]}, in an exchange",
                hint="look at that rank's log; start again with resume=auto to continue from the last checkpoint",
            )

    def close(self) -> None:
        """Do nothing: there is no connection to close."""


class MpiCommunicator(GossipCommunicator):
    """The communicator of one process. Collective: all `ranks` must construct it."""

    def __init__(
        self,
        runtime: MpiRuntime,
        store: JobStore,
        ranks: Sequence[int],
        rank: int,
        *,
        timeout_s: float = 60.0,
        name: str = "all",
        membership: StoreMembership | None = None,
    ) -> None:
        super().__init__(store, ranks, rank, name, timeout_s, membership)
        self._runtime, self.progress = runtime, runtime.progress
        self.mpi_comm = self._create_mpi_comm()
        self._partners: dict[int, MpiConnection] = {}
        self._clients: dict[int, MpiConnection] = {}
        self._header_receive: MpiRequestBatch | None = None
        self._request_lock = threading.Lock()
        self.broken = False
        """Whether a wait has failed; its requests will never complete, so the MPI communicator cannot be freed."""

    def _create_mpi_comm(self) -> Any:
        """Create the group's MPI communicator. It blocks the progress thread, so wait in the store for all ranks first."""
        self.store.add(f"{self.name}/joined", 1)
        wait_for_key(
            self.store,
            f"{self.name}/joined",
            self.timeout_s,
            self.rank,
            lambda count: int(count) >= self.size,
            awaited=self.ranks,
        )
        world = self._runtime.comm

        def create() -> Any:
            group = world.Get_group()
            members = group.Incl(self.ranks)
            mpi_comm = world.Create_group(members, self.ranks[0])
            members.Free()
            group.Free()
            return mpi_comm

        return self.progress.call(create)

    def wait(self, batch: MpiRequestBatch) -> None:
        """Block until the requests are complete; raise PeerLost that names the failed rank if they fail or time out."""
        late = not self.progress.wait(batch, self.timeout_s)
        error = TimeoutError(f"no answer in {self.timeout_s:.0f} s") if late else batch.error
        if error is not None:
            self.broken = True
            abort_mpi(PeerLost.exit_code)
            raise self.membership.explain(error, self.ranks, self.ranks[self.rank]) from error

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> _MpiWork:
        if deterministic_reduce:
            return self._deterministic_mean(x, weight)
        out = x.detach().to("cpu", copy=True) if weight is None else (x.detach() * weight).to("cpu")
        total = torch.tensor([float(self.size if weight is None else weight)], dtype=torch.float64)
        batch = self._all_reduce(out) if weight is None else self._all_reduce(out, total)
        return _MpiWork(self, batch, lambda: out.div_(total.to(out.dtype)).to(x.device))

    def _all_reduce(self, *vectors: Tensor) -> MpiRequestBatch:
        """Start to replace each vector by its sum over all ranks."""
        in_place, arrays = self._runtime.mpi.IN_PLACE, [vector.numpy() for vector in vectors]
        self._bytes += sum(2 * array.nbytes * (self.size - 1) // self.size for array in arrays)
        return self.progress.submit(lambda: [self.mpi_comm.Iallreduce(in_place, array) for array in arrays])

    def _deterministic_mean(self, x: Tensor, weight: float | None) -> _MpiWork:
        mean = SlicedMean(x, weight, self.rank, self.size)
        self._bytes += mean.bytes_sent

        def post() -> list[Any]:
            requests = [self.mpi_comm.Ialltoall(mean.outgoing.numpy(), mean.incoming.numpy())]
            if weight is not None:
                requests.append(self.mpi_comm.Iallreduce(self._runtime.mpi.IN_PLACE, mean.weights.numpy()))
            return requests

        def finish() -> Tensor:
            own, slices = mean.own_slice(), torch.empty_like(mean.incoming)
            self.wait(self.progress.submit(lambda: [self.mpi_comm.Iallgather(own.numpy(), slices.numpy())]))
            return mean.result(slices)

        return _MpiWork(self, self.progress.submit(post), finish)

    def all_reduce_(self, x: Tensor) -> _MpiWork:
        if x.device.type == "cpu":
            return _MpiWork(self, self._all_reduce(x.detach()), lambda: x)
        host = x.detach().to("cpu")
        return _MpiWork(self, self._all_reduce(host), lambda: x.copy_(host))

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> _MpiWork:
        members, own = sorted(row), x.detach().to("cpu").contiguous()
        received = {member: own if member == self.rank else torch.empty_like(own) for member in members}
        neighbors = [member for member in members if member != self.rank]
        self._bytes += len(neighbors) * own.numel() * own.element_size()

        def post() -> list[Any]:
            receives = [self.mpi_comm.Irecv(received[member].numpy(), member, NEIGHBOR) for member in neighbors]
            return receives + [self.mpi_comm.Isend(own.numpy(), member, NEIGHBOR) for member in neighbors]

        def finish() -> Tensor:
            return weighted_sum(received, row, out=received[neighbors[0]]).to(x.device)

        return _MpiWork(self, self.progress.submit(post), finish)

    def broadcast(self, x: Tensor) -> None:
        if self.size > 1:
            host = x.detach().to("cpu")
            self.wait(self.progress.submit(lambda: [self.mpi_comm.Ibcast(host.numpy(), 0)]))
            self._bytes += host.numel() * host.element_size() if self.rank == 0 else 0
            if host.data_ptr() != x.data_ptr():
                x.detach().copy_(host)

    def node_group(self, like: Tensor) -> NodeGroup:
        return CollectiveNodeGroup(self)

    # -- shared vectors --------------------------------------------------------------------------------------------

    def publish(self, vector: Tensor) -> SharedWeights:
        kernels.compile_for(vector.dtype)
        local = LocalVectors([self.rank])
        local.publish(self.rank, vector.detach().to("cpu"))
        shared_weights = self._share(local.view(self.rank))
        thread = self._gossip_thread
        assert thread is not None
        peers = [member for member in range(self.size) if member != self.rank]
        self._clients = {member: MpiConnection(self, member, is_client=True) for member in peers}
        self._partners = {member: MpiConnection(self, member, is_client=False) for member in peers}
        for member, connection in self._clients.items():
            thread.connections.add(-1 - member, connection)
        if peers:  # they may send requests from now on
            self._receive_header()
            thread.start()
        return shared_weights

    def wake(self) -> None:
        """Wake this rank's gossip thread. Called by the MPI progress thread."""
        vectors = self._vectors
        if vectors is not None:
            vectors.wake(self.rank)

    def _receive_header(self) -> None:
        """Post the receive of the next header from any rank; its completion posts the one after it."""
        header = np.empty(len(HEADER_FIELDS), dtype=np.int64)

        def on_header() -> None:
            kind, number, nbytes, sender = MessageType(int(header[0])), *map(int, header[1:])
            connections = self._partners if kind in (MessageType.EXCHANGE, MessageType.ACK) else self._clients
            connections[sender].deliver(Message(kind, number, nbytes))
            self._receive_header()
            self.wake()

        any_source = self._runtime.mpi.ANY_SOURCE
        self._header_receive = self.progress.submit(lambda: [self.mpi_comm.Irecv(header, any_source, HEADER)], on_header)

    def _connect_partners(self, thread: GossipThread, matching: Matching) -> None:
        partners = {member for edge in matching.edges if self.rank in edge for member in edge if member != self.rank}
        for member in sorted(partners):
            thread.connections.add(member, self._partners[member])

    def _request_add(self, peer: int, d: Tensor) -> int:
        return self._request(peer, MessageType.ADD, bytes_of(d), None)

    def _request_get(self, peer: int, out: Tensor) -> int:
        return self._request(peer, MessageType.GET, None, bytes_of(out))

    def _request(self, peer: int, kind: MessageType, payload: memoryview | None, out: memoryview | None) -> int:
        """Send a request to a peer's gossip thread and wait for the reply; return the version of its vector."""
        mpi_comm, reply = self.mpi_comm, np.empty(len(HEADER_FIELDS), dtype=np.int64)
        header = np.array([kind, 0, len(payload) if payload is not None else 0, self.rank], dtype=np.int64)

        def post() -> list[Any]:
            requests = [mpi_comm.Irecv(reply, peer, REPLY)]
            if out is not None:
                requests.append(mpi_comm.Irecv(out, peer, REPLY_DATA))
            requests.append(mpi_comm.Isend(header, peer, HEADER))
            if payload is not None:
                requests.append(mpi_comm.Isend(payload, peer, REQUEST))
            return requests

        with self._request_lock:  # replies carry no request number, so there is one request at a time
            self.wait(self.progress.submit(post))
        return int(reply[1])

    # -- subgroups and end -----------------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], name: str, timeout_s: float | None = None) -> MpiCommunicator | None:
        if self.rank not in ranks:
            return None
        job_ranks, rank, name = self._subgroup(ranks, name)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return MpiCommunicator(
            self._runtime, self.store, job_ranks, rank, timeout_s=timeout_s, name=name, membership=self.membership
        )

    def close(self) -> None:
        self._close_gossip()
        receive, self._header_receive = self._header_receive, None
        if receive is not None:
            self.progress.cancel(receive)
        mpi_comm, self.mpi_comm = self.mpi_comm, None
        if mpi_comm is not None and not self.broken:
            self.progress.call(mpi_comm.Free)
