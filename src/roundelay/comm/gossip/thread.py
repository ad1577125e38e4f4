"""The gossip thread: drives the gossip protocol of one rank on shared memory and connections.

`protocol.py` decides; this class performs its actions. A small vector in shared memory is averaged by the training thread
itself, right after its step, if both locks are free. Everything else is done by the gossip thread. No gradient waits: the
training thread never waits for the mutex, a partner or a partner's lock.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import torch
from torch import Tensor

from roundelay.comm.gossip.connections import ConnectionSet
from roundelay.comm.gossip.pair_average import OVERTAKEN, PairAverager, relative_distance
from roundelay.comm.gossip.protocol import Action, ApplyHalfDifference, Average, Discard, GossipProtocol, Receive, SendSnapshot
from roundelay.comm.gossip.requests import RequestServer
from roundelay.comm.gossip.transport import ConnectionClosed, Message, MessageType, PeerConnection, bytes_of
from roundelay.comm.shared_memory import SECONDS_PER_BYTE
from roundelay.comm.vectors import AVERAGED, FENCED, GOSSIPS, ROUNDS, SharedVector, SharedVectors
from roundelay.core import kernels
from roundelay.core.contracts import Matching
from roundelay.core.update_log import Op, UpdateLog
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost, RoundelayError

TICK_S = 0.2
"""Interval at which the thread looks at failed, silent and suspected peers."""
INLINE_BYTES = 1 << 22
"""Vectors up to this size are averaged by the training thread itself."""
INLINE_LOCK_S, LOCK_S = 0.0005, 0.05
"""Deadlines for a partner's lock: of the training thread, and of the gossip thread (plus SECONDS_PER_BYTE)."""
DRAIN_S = 10.0
"""At the end, an exchange without progress for this time is given up."""
DRAIN_LIMIT_S = 300.0
"""At the end, all exchanges are given up after this time, also those on a link that is lost again and again."""
METRICS = ("exchanges", "exchange_s", "distance", "skipped")


class GossipThread:
    """The gossip thread of one rank.

    Public methods may be called from any other thread. `on_failure` is called with the rank of a peer whose process has ended,
    and the reason. `known_failures` returns the failed ranks of the group without blocking. `address` returns the address of a
    peer's gossip thread; it may block. An exception of the thread is raised by the next call of a blocking method.
    """

    def __init__(
        self,
        shared_weights: SharedVector,
        vectors: SharedVectors,
        size: int,
        token: bytes,
        listener: socket.socket | None,
        on_failure: Callable[[int, str], None],
        known_failures: Callable[[], Collection[int]] = tuple,
        address: Callable[[int], str] | None = None,
    ) -> None:
        self.rank, self.size, self.vectors, self.shared_weights = vectors.rank, size, vectors, shared_weights
        self.update_log: UpdateLog | None = None
        self.error: BaseException | None = None
        self.protocol: GossipProtocol | None = None
        self.connections = ConnectionSet(self.rank, token, listener, vectors.wakeups(), self._wake)
        self._on_failure, self._known_failures, self._address = on_failure, known_failures, address
        self._pairs, self._requests = PairAverager(vectors), RequestServer(shared_weights)
        self._mutex = threading.Lock()
        self._steps = self._counted_steps = self._seen_averaged = 0
        self._queued: list[Action] = []
        self._snapshots: dict[int, list[Tensor | None]] = {}
        self._opened_at: dict[int, float] = {}
        self._free: list[Tensor] = []
        self._awaited: dict[PeerConnection, Tensor] = {}
        self._moved: dict[int, int] = {}
        self._early: list[tuple[int, int, socket.socket | PeerConnection, bool]] = []
        nbytes = shared_weights.vector.numel() * shared_weights.vector.element_size()
        self._inline = nbytes <= INLINE_BYTES and len(vectors.here) > 1
        self._lock_s = LOCK_S + SECONDS_PER_BYTE * nbytes
        self._ticked_at = 0.0
        self._watches_peers = True
        self._quit = False
        self._metrics = dict.fromkeys(METRICS, 0.0)
        self._reported = dict(self._metrics)
        self._thread = threading.Thread(target=self._run, name=f"gossip-{self.rank}", daemon=True)

    # -- called by other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread if it is not running."""
        if not self._thread.is_alive():
            self._thread.start()

    def record(self, update_log: UpdateLog) -> None:
        """Log all accesses of this thread to shared vectors from now on."""
        self.update_log = self._pairs.update_log = self._requests.update_log = update_log

    def gossip(self, matching: Matching, steps_per_exchange: float) -> None:
        """Begin to exchange by this matching, and connect to the partners that share no memory with this rank."""
        with self._mutex:
            local = [peer for peer in self.vectors.here if peer != self.rank]
            self.protocol = GossipProtocol(self.rank, self.size, matching, steps_per_exchange, local)
            with self.vectors.lock(self.rank) as segment:
                segment.header[GOSSIPS] = 1
        for peer in sorted(self.protocol.edges):
            self._connect(peer)
        self._wake()

    def await_partners(self, timeout_s: float) -> list[int]:
        """Block until all partners on other nodes have connected or failed; return those that have not after `timeout_s`."""
        protocol = self.protocol
        assert protocol is not None

        def missing() -> list[int]:
            self.raise_if_failed()
            return [p for p, edge in protocol.edges.items() if not edge.connected and p not in protocol.failed]

        wait_until(lambda: not missing(), timeout_s, poll_s=0.002)
        return missing()

    def notify_step(self) -> None:
        """Count one local step, which may start an exchange. Never waits for another thread or rank.

        Raises the exception that has ended the gossip thread, if there is one.
        """
        if self.error is not None:
            self.raise_if_failed()
        self._steps += 1
        if self._inline and self._mutex.acquire(blocking=False):
            try:
                self._advance(inline=True)
                if not self._queued:
                    return
            finally:
                self._mutex.release()
        self._wake()

    @property
    def exchanges(self) -> int:
        """Exchanges completed so far, including those that partners started. Does not block."""
        if self.protocol is None:
            return 0
        return self.protocol.exchanges + int(self.vectors.header(self.rank)[AVERAGED]) - self._seen_averaged

    @property
    def rounds(self) -> int:
        """The logical clock of this rank: the number of the next round."""
        if self.protocol is None:
            return 0
        return max(self.protocol.rounds, int(self.vectors.header(self.rank)[ROUNDS]))

    def silent_peers(self) -> list[int]:
        """Return the live partners whose rounds are skipped now: suspected, or without a connection. Does not block."""
        return self.protocol.silent_peers() if self.protocol is not None else []

    def stop_initiating(self) -> None:
        """Only answer partners from now on."""
        with self._mutex:
            if self.protocol is not None:
                self.protocol.stop_initiating()
                self._queued = [action for action in self._queued if not isinstance(action, Average)]

    def drain(self) -> None:
        """Block until all exchanges that have begun are complete, or no longer make progress. Call it after stop_initiating."""
        protocol, end = self.protocol, time.monotonic() + DRAIN_LIMIT_S
        assert protocol is not None

        def waits() -> bool:
            self.raise_if_failed()
            now = time.monotonic()
            with self._mutex:
                edges = [protocol.edges[p] for p in protocol.open_edges if p in protocol.edges and p not in protocol.failed]
            return now < end and any(now - edge.progress_at < DRAIN_S for edge in edges)

        wait_until(lambda: not waits(), float("inf"), poll_s=0.001)

    def let_peers_leave(self) -> None:
        """From now on, a peer that closes its vectors has left and not failed."""
        self._watches_peers = False

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        now = dict(self._metrics)
        now["distance"] += self._pairs.distance
        now["exchanges"] = self.exchanges
        now["skipped"] = self.protocol.skipped if self.protocol is not None else 0
        before, self._reported = self._reported, now
        return {name: now[name] - before[name] for name in now}

    def raise_if_failed(self) -> None:
        """Raise the exception that ended the thread, if there is one."""
        if isinstance(self.error, RoundelayError):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"the gossip thread of rank {self.rank} failed: {self.error}") from self.error

    def close(self) -> None:
        """Stop the thread and close its connections."""
        self._quit = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.connections.close()

    def _wake(self) -> None:
        self.vectors.wake(self.rank)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._quit:
                with self._mutex:
                    self._advance(inline=False)
                    self.connections.watch()
                ready = self.connections.select(TICK_S)
                with self._mutex:
                    self._advance(inline=False)  # what the training thread has left over comes before what arrives
                    for connection in ready:
                        self._serve(connection)
        except BaseException as error:  # raised by raise_if_failed
            self.error = error

    def _advance(self, inline: bool) -> None:
        """Feed the protocol with what has happened in memory, and perform its actions. Call it under the mutex."""
        now = time.monotonic()
        protocol = self.protocol
        if protocol is not None and not inline:  # first: the protocol counts on them
            actions, self._queued = self._queued, []
            self._perform(actions, inline=False)
        if not inline:
            self._register_added(now)
        if protocol is None:
            return
        self._note_averages(protocol)
        actions, self._queued = self._queued, []
        while self._counted_steps < self._steps:
            self._counted_steps += 1
            actions += protocol.step(now)
        if not inline and now - self._ticked_at > TICK_S:
            self._ticked_at = now
            actions += self._tick(protocol, now)
        self._perform(actions, inline)

    def _note_averages(self, protocol: GossipProtocol) -> None:
        """Tell the protocol of the averages that other ranks of the node have made with this one."""
        header = self.vectors.header(self.rank)
        averaged, rounds = int(header[AVERAGED]), int(header[ROUNDS])
        if (
            averaged != self._seen_averaged or rounds > protocol.rounds
        ):  # a rank that dies in between has written the latter only
            count, self._seen_averaged = averaged - self._seen_averaged, averaged
            protocol.averaged_by_peer(count, rounds)

    def _tick(self, protocol: GossipProtocol, now: float) -> list[Action]:
        for peer in self.vectors.here if self._watches_peers else ():
            if peer not in protocol.failed and peer != self.rank and not self.vectors.alive(peer):
                self._on_failure(peer, "its process has ended")
                self._perform(protocol.fail(peer, now), False)
        failures = self._known_failures()
        if self.rank in failures:  # the next step raises; until then this rank averages with no other
            protocol.stop_initiating()
        for peer in set(failures) - protocol.failed - {self.rank}:
            self._perform(protocol.fail(peer, now), False)
            if peer in self.connections.partners:
                self._close(self.connections.partners[peer])
            if peer in self.vectors.here:  # it may be suspended, and must not average when it wakes up
                with suppress(PeerLost):
                    self.vectors.header(peer)[FENCED] = 1
        for peer, connection in list(self.connections.partners.items()):
            if peer in protocol.edges and protocol.edges[peer].open:
                if (moved := connection.bytes_moved()) != self._moved.get(peer):
                    self._moved[peer] = moved
                    protocol.progress(peer, now)
                connection.check_alive(now - protocol.edges[peer].progress_at)
        for peer, edge in protocol.edges.items():
            if not edge.connected and peer not in protocol.failed:
                self._connect(peer)
        return protocol.tick(now)

    # -- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action], inline: bool) -> None:
        """Perform actions and those that follow from them. Inline, what might take time is left to the thread."""
        assert self.protocol is not None
        while actions:
            action = actions.pop(0)
            if inline and not isinstance(action, Average):
                self._queued += [action, *actions]
                return
            if isinstance(action, Average):
                began = time.monotonic()
                rounds = self._pairs.average(action.peer, action.round, INLINE_LOCK_S if inline else self._lock_s)
                now = time.monotonic()
                if rounds == OVERTAKEN:
                    self._note_averages(self.protocol)
                    actions += self.protocol.overtaken(action.peer, now)
                elif rounds is not None:
                    self._metrics["exchange_s"] += now - began
                    actions += self.protocol.averaged(action.peer, rounds, now)
                elif inline:
                    self._queued += [action, *actions]
                    return
                else:
                    actions += self.protocol.busy(action.peer, now)
            elif isinstance(action, SendSnapshot):
                self._send_snapshot(action)
            elif isinstance(action, Receive):
                self._receive(action)
            elif isinstance(action, ApplyHalfDifference):
                self._apply(action)
            else:
                self._discard(action)

    def _send_snapshot(self, action: SendSnapshot) -> None:
        connection = self.connections.partners.get(action.peer)
        if action.fresh:
            snapshot = self._free.pop() if self._free else torch.empty_like(self.shared_weights.vector)
            with self.shared_weights.locked():
                number, _ = self.shared_weights.count()
                self._log(Op.SNAPSHOT, number, action.peer, action.number)
                snapshot.copy_(self.shared_weights.vector)
            self._snapshots[action.peer] = [snapshot, None]
            self._opened_at[action.peer] = time.monotonic()
        own = self._snapshots[action.peer][0]
        if connection is not None and own is not None:
            connection.send(MessageType.EXCHANGE, action.number, bytes_of(own))

    def _receive(self, action: Receive) -> None:
        connection = self.connections.partners.get(action.peer)
        if connection is None:
            return
        buffer = self._free.pop() if self._free else torch.empty_like(self.shared_weights.vector)
        self._awaited[connection] = buffer
        try:
            connection.receive(bytes_of(buffer))
        except ConnectionClosed:
            self._drop(connection)

    def _apply(self, action: ApplyHalfDifference) -> None:
        own, received = self._snapshots[action.peer]
        assert own is not None
        assert received is not None
        self._metrics["distance"] += relative_distance(own, received)
        with self.shared_weights.locked():
            number, _ = self.shared_weights.count(writes=1)
            self._log(Op.APPLY_HALF_DIFF, number, action.peer, action.number)
            kernels.add_half_difference(self.shared_weights.vector, received, own)
        self._snapshots[action.peer][1] = None
        self._release(received)
        self._metrics["exchange_s"] += time.monotonic() - self._opened_at.pop(action.peer, time.monotonic())
        if (connection := self.connections.partners.get(action.peer)) is not None:
            connection.send(MessageType.ACK, action.number)

    def _discard(self, action: Discard) -> None:
        for tensor in self._snapshots.pop(action.peer, ()):
            self._release(tensor)
        self._opened_at.pop(action.peer, None)

    def _release(self, tensor: Tensor | None) -> None:
        if tensor is not None and len(self._free) < 4:  # for the next exchanges
            self._free.append(tensor)

    def _log(self, op: Op, number: int, actor: int, round: int = -1) -> None:
        if self.update_log is not None:
            self.update_log.append(op, self.rank, number, actor, round)

    # -- connections -------------------------------------------------------------------------------------------------

    def _connect(self, peer: int) -> None:
        """Connect to a partner in the background; the lower rank of an edge does so."""
        protocol, address = self.protocol, self._address
        if protocol is not None and address is not None and self.rank < peer:
            self.connections.connect_to(
                peer,
                lambda: address(peer),
                lambda: protocol.edges[peer].applied,
                lambda: peer not in protocol.failed and not self._quit,
            )

    def _register_added(self, now: float) -> None:
        protocol = self.protocol
        early, self._early = self._early, []
        for peer, applied, transport, answer in [*early, *self.connections.take_added()]:
            if peer >= 0 and protocol is None:
                self._early.append((peer, applied, transport, answer))  # until this rank gossips too
                continue
            if peer < 0:
                self.connections.register(peer, transport, answer, 0)
                continue
            assert protocol is not None
            if peer not in protocol.edges or peer in protocol.failed:
                transport.close()
                continue
            if peer in self.connections.partners:
                self._close(self.connections.partners[peer])
                self._perform(protocol.disconnected(peer, now), False)
            if self.connections.register(peer, transport, answer, protocol.edges[peer].applied):
                self._perform(protocol.connected(peer, applied, now), False)

    def _close(self, connection: PeerConnection) -> None:
        self.connections.remove(connection)
        self._release(self._awaited.pop(connection, None))

    def _drop(self, connection: PeerConnection) -> None:
        """Close a connection. A partner is not failed: the edge is connected again, and its open exchange completed then."""
        if connection not in self.connections:
            return
        self._close(connection)
        if connection.peer is not None and self.protocol is not None and connection.peer in self.protocol.edges:
            self._perform(self.protocol.disconnected(connection.peer, time.monotonic()), False)
            if connection.peer not in self.protocol.failed:
                self._connect(connection.peer)

    def _serve(self, connection: PeerConnection) -> None:
        """Read and write what is possible now."""
        if connection not in self.connections:  # it has been replaced since it was selected
            return
        try:
            if connection.writes:
                connection.flush()
            while connection.reads and (message := connection.read()) is not None:
                self._on_message(connection, message)
        except (ConnectionClosed, ValueError):
            self._drop(connection)

    def _on_message(self, connection: PeerConnection, message: Message) -> None:
        """Handle a header, or a message whose payload is complete. Raises ConnectionClosed or ValueError if it is invalid."""
        now, buffer = time.monotonic(), self._awaited.pop(connection, None)
        if connection.peer is None:
            self._requests.serve(connection, message, buffer, self._awaited)
            return
        protocol = self.protocol
        assert protocol is not None
        if buffer is not None:
            self._snapshots[connection.peer][1] = buffer
            self._perform(protocol.received(connection.peer, message.number, now), False)
        elif message.kind is MessageType.EXCHANGE:
            self._perform(protocol.announced(connection.peer, message.number, now), False)
        elif message.kind is MessageType.ACK and not message.bytes:
            self._perform(protocol.acknowledged(connection.peer, message.number, now), False)
        else:
            raise ConnectionClosed(f"unexpected message {message.kind.name}")
