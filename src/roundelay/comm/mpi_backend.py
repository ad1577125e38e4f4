"""Processes started by mpirun or srun: MPI carries everything, vectors in rendezvous as well as between agents.

Means are non-blocking all-reduces on a communicator of the comm's own; exact ones an all-to-all, an ordered sum and an
all-gather; neighbours exchange by messages. Exchanges and one-sided verbs go through the agents, by messages too: on windows
(MPI's own one-sided calls) they were measured to be slower, see docs/mpi.md, and a vector's lock would have to be MPI's.
Only the job's store, a few bytes, is not MPI's: rank 0 serves it where all have been told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundelay.comm.gossip.handle import BackgroundGossip
from roundelay.comm.gossip.thread import GossipThread, bytes_of
from roundelay.comm.gossip.transport import ConnectionClosed, Message, MessageType
from roundelay.comm.mpi_progress import MpiRequestBatch, MpiRuntime, abort_mpi
from roundelay.comm.node_group import CollectiveNodeGroup
from roundelay.comm.shared_memory import LocalVectors, SharedVector, wait_for
from roundelay.core import kernels
from roundelay.core.contracts import Matching, NodeGroup, SharedWeights
from roundelay.core.update_log import UpdateLog
from roundelay.errors import PeerLost
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore

HEAD, MEET, CALL, ANSWER, ANSWERED, MIX = range(6)
"""Tags: the head of a message to an agent; a snapshot; what is to be added; the head of an answer; its vector; neighbours."""
HEAD_FIELDS = ("kind", "number", "bytes", "sender")


class MpiWork:
    """Something under way on a comm."""

    def __init__(self, comm: MpiCommunicator, errand: MpiRequestBatch, finish: Callable[[], Tensor]) -> None:
        self._comm, self._errand, self._finish = comm, errand, finish

    @property
    def done(self) -> bool:
        return self._errand.finished.is_set()

    def wait(self) -> Tensor:
        self._comm.wait(self._errand)
        return self._finish()


class MpiConnection:
    """What an agent has of a peer: a partner for exchanges, or one who calls for one-sided verbs. Heads are handed in by the
    porter; a payload stays with its sender until a buffer is offered for it."""

    def __init__(self, comm: MpiCommunicator, peer: int, *, caller: bool) -> None:
        self.peer: int | None = None if caller else peer
        self.caller = -1
        self.sent_bytes = self.sending = 0
        self.error = ""
        self.waiting: Message | None = None
        self._comm, self._to = comm, peer
        self._head_tag, self._out_tag, self._in_tag = (ANSWER, ANSWERED, CALL) if caller else (HEAD, MEET, MEET)
        self._heads: deque[Message] = deque()

    def fileno(self) -> int:
        return -1

    def send(self, kind: MessageType, number: int, payload: memoryview | None = None) -> None:
        """Sends a message; the payload must stay as it is until `sending` is 0 again."""
        self.sending += 1
        nbytes = len(payload) if payload is not None else 0
        comm, comm = self._comm, self._comm.comm
        head = np.array([kind, number, nbytes, comm.rank], dtype=np.int64)

        def post() -> list[Any]:
            posted = [comm.Isend(head, self._to, self._head_tag)]
            return posted + ([comm.Isend(payload, self._to, self._out_tag)] if payload is not None else [])

        def gone() -> None:
            self.sent_bytes += head.nbytes + nbytes
            self.sending -= 1
            comm.wake()

        comm.porter.send_out(post, gone)

    def arrived(self, arrival: Message) -> None:
        """Called by the porter."""
        self._heads.append(arrival)

    def read_header(self) -> Message | None:
        if self.waiting is not None or not self._heads:
            return None
        arrival = self._heads.popleft()
        if arrival.bytes:
            self.waiting = arrival
        return arrival

    def read_payload(self, buffer: memoryview) -> None:
        assert self.waiting is not None
        if len(buffer) != self.waiting.bytes:
            raise ConnectionClosed(f"a payload of {self.waiting.bytes} bytes where {len(buffer)} were expected")
        comm = self._comm
        try:
            comm.wait(comm.porter.send_out(lambda: [comm.comm.Irecv(buffer, self._to, self._in_tag)]))
        except PeerLost as error:
            raise ConnectionClosed(error.message) from error
        self.waiting = None

    def look(self, waited_s: float) -> None:
        """Under mpirun a death ends the whole job; where it does not, nothing but the membership tells the agent."""
        if waited_s > self._comm.timeout_s and (why := self._comm.membership.failed_ranks().get(self._comm.ranks[self._to])):
            self._comm.broken = True
            abort_mpi(PeerLost.exit_code)
            raise PeerLost(
                f"rank {self._comm.ranks[self._to]} ({why}) was lost",
                where=f"rank {self._comm.ranks[self._comm.rank]}, in a exchange",
                hint="look at that rank's log; start again with resume=auto to go on from the last checkpoint",
            )

    def close(self) -> None:
        """There is no connection to close."""


class MpiCommunicator:
    """One process's view of the job, or of a part of it."""

    def __init__(
        self, world: MpiRuntime, store: JobStore, ranks: Sequence[int], rank: int, *, timeout_s: float = 60.0, name: str = "all"
    ) -> None:
        self.store, self.ranks, self.rank, self.size = store, list(ranks), rank, len(ranks)
        self.name, self.timeout_s = name, timeout_s
        self.membership = StoreMembership(store)
        self._world, self.porter = world, world.porter
        self.comm = self._make_communicator()
        self._board: LocalVectors | None = None
        self._agent: GossipThread | None = None
        self._partners: dict[int, MpiConnection] = {}
        self._callers: dict[int, MpiConnection] = {}
        self._listening: MpiRequestBatch | None = None
        self._calling = threading.Lock()
        self._bytes = 0
        self.broken = False
        """Something was waited for in vain; what is still under way will never end."""

    def _make_communicator(self) -> Any:
        """Blocks inside MPI until all members are there, so they gather first: nobody may be answered meanwhile."""
        self.store.add(f"{self.name}/come", 1)
        wait_for(self.store, f"{self.name}/come", self.timeout_s, self.rank, lambda come: int(come) >= self.size)
        world = self._world

        def make() -> Any:
            group = world.comm.Get_group()
            members = group.Incl(self.ranks)
            made = world.comm.Create_group(members, self.ranks[0])
            members.Free()
            group.Free()
            return made

        return self.porter.do(make)

    def wait(self, errand: MpiRequestBatch) -> None:
        """Waits for an errand; where it fails or takes too long, says who was lost."""
        late = not self.porter.wait(errand, self.timeout_s)
        error = TimeoutError(f"no answer in {self.timeout_s:.0f} s") if late else errand.error
        if error is not None:
            self.broken = True
            abort_mpi(PeerLost.exit_code)
            raise self.membership.explain(error, self.ranks, self.ranks[self.rank]) from error

    def live_ranks(self) -> list[int]:
        dead = self.membership.failed_ranks()
        return [m for m in range(self.size) if self.ranks[m] not in dead]

    # -- rendezvous ------------------------------------------------------------------------------------------------

    def all_reduce_mean(self, x: Tensor, weight: float | None = None, deterministic_reduce: bool = False) -> MpiWork:
        if deterministic_reduce:
            return self._start_exact_mean(x, weight)
        out = x.detach().to("cpu", copy=True) if weight is None else (x.detach() * weight).to("cpu")
        total = torch.tensor([float(self.size if weight is None else weight)], dtype=torch.float64)
        errand = self._add_up(out) if weight is None else self._add_up(out, total)
        return MpiWork(self, errand, lambda: out.div_(total.to(out.dtype)).to(x.device))

    def _add_up(self, *vectors: Tensor) -> MpiRequestBatch:
        """Each vector becomes the sum over all members."""
        in_place, arrays = self._world.mpi.IN_PLACE, [vector.numpy() for vector in vectors]
        self._bytes += sum(2 * array.nbytes * (self.size - 1) // self.size for array in arrays)
        return self.porter.send_out(lambda: [self.comm.Iallreduce(in_place, array) for array in arrays])

    def _start_exact_mean(self, x: Tensor, weight: float | None) -> MpiWork:
        """Everybody sums one slice in rank order and hands it round: the bytes of a ring, the same bits every time."""
        weights = torch.full((self.size,), 1.0, dtype=torch.float64)
        if weight is not None:
            weights.zero_()
            weights[self.rank] = weight
        slice_ = -(-x.numel() // self.size)
        outgoing = torch.zeros(self.size * slice_, dtype=x.dtype)
        outgoing[: x.numel()] = x.detach().reshape(-1)
        incoming = torch.empty_like(outgoing)
        self._bytes += outgoing.numel() * outgoing.element_size() * (self.size - 1) // self.size * 2

        def post() -> list[Any]:
            posted = [self.comm.Ialltoall(outgoing.numpy(), incoming.numpy())]
            if weight is not None:
                posted.append(self.comm.Iallreduce(self._world.mpi.IN_PLACE, weights.numpy()))
            return posted

        def finish() -> Tensor:
            typed = weights.to(x.dtype)
            mine = torch.empty(slice_, dtype=x.dtype)
            kernels.ordered_sum(mine, incoming.view(self.size, slice_), typed)
            mine.div_(typed.sum())
            whole = torch.empty_like(incoming)
            self.wait(self.porter.send_out(lambda: [self.comm.Iallgather(mine.numpy(), whole.numpy())]))
            return whole[: x.numel()].view_as(x).to(x.device)

        return MpiWork(self, self.porter.send_out(post), finish)

    def all_reduce_(self, x: Tensor) -> MpiWork:
        if x.device.type == "cpu":
            return MpiWork(self, self._add_up(x.detach()), lambda: x)
        host = x.detach().to("cpu")
        return MpiWork(self, self._add_up(host), lambda: x.copy_(host))

    def neighbor_average(self, x: Tensor, row: dict[int, float]) -> MpiWork:
        members, mine = sorted(row), x.detach().to("cpu").contiguous()
        received = {member: mine if member == self.rank else torch.empty_like(mine) for member in members}
        others = [member for member in members if member != self.rank]
        self._bytes += len(others) * mine.numel() * mine.element_size()

        def post() -> list[Any]:
            coming = [self.comm.Irecv(received[member].numpy(), member, MIX) for member in others]
            return coming + [self.comm.Isend(mine.numpy(), member, MIX) for member in others]

        def finish() -> Tensor:
            out = received[others[0]]
            kernels.mix(out, [received[member] for member in members], [row[member] for member in members])
            return out.to(x.device)

        return MpiWork(self, self.porter.send_out(post), finish)

    def broadcast(self, x: Tensor) -> None:
        if self.size > 1:
            host = x.detach().to("cpu")
            self.wait(self.porter.send_out(lambda: [self.comm.Ibcast(host.numpy(), 0)]))
            self._bytes += host.numel() * host.element_size() if self.rank == 0 else 0
            if host.data_ptr() != x.data_ptr():
                x.detach().copy_(host)

    def node_group(self, like: Tensor) -> NodeGroup:
        return CollectiveNodeGroup(self)

    # -- one-sided -------------------------------------------------------------------------------------------------

    def publish(self, vector: Tensor) -> SharedWeights:
        kernels.compile_for(vector.dtype)
        memory = self._board = LocalVectors([self.rank])
        memory.publish(self.rank, vector.detach().to("cpu"))
        board = memory.seen_by(self.rank)
        shared_weights = SharedVector(board, self.rank)
        self._agent = GossipThread(
            shared_weights, board, self.size, b"", None, lambda member, why: self.membership.report(self.ranks[member], why)
        )
        others = [member for member in range(self.size) if member != self.rank]
        self._callers = {member: MpiConnection(self, member, caller=True) for member in others}
        for member, link in self._callers.items():
            self._agent.traffic.invite(-1 - member, link)
        self._partners = {member: MpiConnection(self, member, caller=False) for member in others}
        if others:
            self._listen()
            self._agent.start()
        return shared_weights

    def wake(self) -> None:
        """Wakes this member's agent."""
        board = self._board
        if board is not None:
            board.seen_by(self.rank).wake(self.rank)

    def _listen(self) -> None:
        """Takes the next head that anybody sends, and so on."""
        head = np.empty(len(HEAD_FIELDS), dtype=np.int64)

        def came() -> None:
            kind, number, nbytes, sender = MessageType(int(head[0])), *map(int, head[1:])
            link = (self._partners if kind is MessageType.EXCHANGE else self._callers)[sender]
            link.arrived(Message(kind, number, nbytes))
            self._listen()
            self.wake()

        anybody = self._world.mpi.ANY_SOURCE
        self._listening = self.porter.send_out(lambda: [self.comm.Irecv(head, anybody, HEAD)], came)

    def gossip(self, shared_weights: SharedWeights, matching: Matching, steps_per_exchange: float) -> BackgroundGossip:
        assert self._agent is not None
        partners = {member for edge in matching.edges if self.rank in edge for member in edge if member != self.rank}
        for member in sorted(partners):
            self._agent.traffic.invite(member, self._partners[member])
        if not self._agent.running:
            self._agent.start()
        self._agent.await_partners(len(partners), self.timeout_s)
        self._agent.gossip(matching, steps_per_exchange)
        return BackgroundGossip(self._agent, self.membership, self.ranks, self.rank, self.name, self.timeout_s, self.store)

    def remote_add(self, peer: int, d: Tensor) -> int:
        d = d.detach().to("cpu").contiguous()
        if peer == self.rank:
            mine = self._published()
            with mine.locked():
                _, version = mine.count(writes=1)
                mine.vector.add_(d)
            return version - 1
        self._bytes += d.numel() * d.element_size()
        return self._call(peer, MessageType.ADD, bytes_of(d), None)

    def remote_get(self, peer: int, out: Tensor) -> int:
        if peer == self.rank:
            mine = self._published()
            with mine.locked():
                _, version = mine.count()
                out.copy_(mine.vector)
            return version
        host = out.detach().to("cpu")
        version = self._call(peer, MessageType.GET, None, bytes_of(host))
        if host.data_ptr() != out.data_ptr():
            out.copy_(host)
        return version

    def record(self, update_log: UpdateLog) -> None:
        assert self._agent is not None
        self._agent.update_log = update_log

    def _published(self) -> SharedVector:
        assert self._board is not None
        return SharedVector(self._board.seen_by(self.rank), self.rank)

    def _call(self, peer: int, kind: MessageType, payload: memoryview | None, out: memoryview | None) -> int:
        """Asks a peer's agent and waits for its answer: the version of its vector."""
        comm, answer = self.comm, np.empty(len(HEAD_FIELDS), dtype=np.int64)
        head = np.array([kind, 0, len(payload) if payload is not None else 0, self.rank], dtype=np.int64)

        def post() -> list[Any]:
            posted = [comm.Irecv(answer, peer, ANSWER)]
            if out is not None:
                posted.append(comm.Irecv(out, peer, ANSWERED))
            posted.append(comm.Isend(head, peer, HEAD))
            if payload is not None:
                posted.append(comm.Isend(payload, peer, CALL))
            return posted

        with self._calling:  # answers carry no number: one question to a peer at a time
            self.wait(self.porter.send_out(post))
        return int(answer[1])

    # -- parts and end ---------------------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], name: str) -> MpiCommunicator | None:
        if self.rank not in ranks:
            return None
        members = [self.ranks[r] for r in ranks]
        part_name, mine = f"{self.name}/{name}", list(ranks).index(self.rank)
        return MpiCommunicator(self._world, self.store, members, mine, timeout_s=self.timeout_s, name=part_name)

    def bytes_sent(self) -> int:
        return self._bytes + (self._agent.traffic.sent_bytes if self._agent is not None else 0)

    def close(self) -> None:
        agent, self._agent, board, self._board = self._agent, None, self._board, None
        if agent is not None:
            self._bytes += agent.traffic.sent_bytes
            agent.close()
        if self._listening is not None:
            listening, self._listening = self._listening, None
            self.porter.drop(listening)
        if board is not None:
            board.close()
        comm, self.comm = self.comm, None
        if comm is not None and not self.broken:
            self.porter.do(comm.Free)
