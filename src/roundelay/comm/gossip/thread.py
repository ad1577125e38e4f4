"""The gossip thread: exchanges weights with this rank's partners in the background, round after round.

A round has a matching. The two partners of a round exchange snapshots, and each adds half the difference to its w. In shared
memory one of the two averages both vectors in place. A thread completes its rounds in order, one exchange at a time, so waits
cannot form a cycle. It enters the next round when its rank has taken enough local steps since its last exchange, or when a
partner already requests that round or a later one. The fastest rank therefore sets the pace of exchanges, the thread of a slow
rank keeps up with it, and no gradient ever waits.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from roundelay.comm.gossip.transport import ConnectionClosed, ConnectionSet, Message, MessageType, PeerConnection, bytes_of
from roundelay.comm.shared_memory import COMPLETED_ROUND, CURRENT_ROUND, SEQUENCE, VERSION, SharedVector, SharedVectors
from roundelay.core import kernels
from roundelay.core.contracts import Matching
from roundelay.core.update_log import Op, UpdateLog
from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost, RoundelayError

LIVENESS_POLL_S = 0.2
"""Seconds without a message after which the thread checks whether its peers are alive."""
MAX_OWED = 8
"""Exchanges that are made up for after a delay; averaging more often would change little."""
DISTANCE_SAMPLE = 4096
"""Number of elements from which the distance between partners is estimated."""
METRICS = ("exchanges", "exchange_s", "distance", "skipped")


class GossipThread:
    """The gossip thread of one rank.

    Public methods may be called from any other thread. `on_failure` is called on the gossip thread with the rank of a failed
    peer and the reason. An exception of the thread is raised by the next call of a blocking method.
    """

    def __init__(
        self,
        shared_weights: SharedVector,
        vectors: SharedVectors,
        size: int,
        token: bytes,
        listener: socket.socket | None,
        on_failure: Callable[[int, str], None],
    ) -> None:
        self.rank, self.size, self.vectors, self.shared_weights = vectors.rank, size, vectors, shared_weights
        self.failed: set[int] = set()
        self.update_log: UpdateLog | None = None
        self.exchanges = 0
        """Exchanges completed so far."""
        self.error: BaseException | None = None
        self.connections = ConnectionSet(vectors, token, listener, self._on_message, self._mark_failed)
        self._partners = self.connections.partners
        self._on_failure = on_failure
        self._add_buffer: Tensor | None = None
        # rounds
        self._matching: Matching | None = None
        self._round = 0  # the next round to enter or skip, or the open one
        self._current_round = -1  # the last round entered
        self._partner: int | None = None  # the partner of the open exchange
        self._exchange_start = 0.0
        self._snapshot: Tensor | None = None
        self._received: Tensor | None = None
        self._received_round = -1
        # pace
        self._steps_per_exchange = 1.0
        self._steps, self._forgiven = 0, 0
        # leaving
        self._initiating = True
        self._last_round: int | None = None
        self._drained = threading.Event()
        self._quit = False
        self._sync_requests: deque[threading.Event] = deque()
        self._metrics = dict.fromkeys(METRICS, 0.0)
        self._reported = dict(self._metrics)
        self._thread = threading.Thread(target=self._run, name=f"gossip-{self.rank}", daemon=True)

    # -- called by other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread if it is not running."""
        if not self._thread.is_alive():
            self._thread.start()

    def await_partners(self, count: int, timeout_s: float) -> None:
        """Block until `count` partners on other nodes have connected or failed. Raises PeerLost after `timeout_s`."""

        def connected() -> bool:
            self.raise_if_failed()
            return len(self._partners) + len(self.failed) >= count

        wait_until(
            connected,
            timeout_s,
            lambda: PeerLost(
                f"only {len(self._partners)} of {count} partners on other nodes connected within {timeout_s:.0f} s",
                where=f"rank {self.rank}",
                hint="check that the nodes reach each other at the address set by bind_address=…, and that ports are open",
            ),
            poll_s=0.002,
        )

    def gossip(self, matching: Matching, steps_per_exchange: float) -> None:
        """Begin the rounds of this matching."""
        self._steps_per_exchange = steps_per_exchange
        self._matching = matching
        self.vectors.wake(self.rank)

    def notify_step(self) -> None:
        """Count one local step, which may start an exchange. Does not block."""
        self._steps += 1
        self.vectors.wake(self.rank)

    def stop_initiating(self) -> int:
        """Only answer partners from now on; return the last round entered."""
        self._initiating = False
        self.sync()
        return self._current_round

    def drain_to(self, last_round: int) -> None:
        """Complete or skip all rounds up to `last_round`; block until that is done."""
        self._last_round = last_round
        self.vectors.wake(self.rank)
        while not self._drained.wait(1.0):
            self.raise_if_failed()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        now = dict(self._metrics)
        before, self._reported = self._reported, now
        return {name: now[name] - before[name] for name in now}

    def sync(self) -> None:
        """Block until the thread has begun a new turn of its loop, so that it has seen everything set before this call."""
        seen = threading.Event()
        self._sync_requests.append(seen)
        self.vectors.wake(self.rank)
        while not seen.wait(1.0):
            self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the exception that ended the thread, if there is one."""
        if isinstance(self.error, RoundelayError):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"the gossip thread of rank {self.rank} failed: {self.error}") from self.error

    def close(self) -> None:
        """Stop the thread and close its connections."""
        self._quit = True
        self.vectors.wake(self.rank)
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.connections.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._quit:
                self.connections.register_added()
                requests = len(self._sync_requests)
                while self._advance():
                    pass
                for _ in range(requests):
                    self._sync_requests.popleft().set()
                if not self.connections.poll(LIVENESS_POLL_S):
                    self._check_peers()
        except BaseException as error:  # raised by raise_if_failed
            self.error = error
            self._drained.set()

    def _mark_failed(self, peer: int, reason: str) -> None:
        if peer not in self.failed:
            self.failed.add(peer)
            if not self._drained.is_set():
                self._on_failure(peer, reason)

    def _check_peers(self) -> None:
        for peer in self.vectors.here:
            if peer not in self.failed and peer != self.rank and not self.vectors.alive(peer):
                self._mark_failed(peer, "its process has ended")
        if self._partner in self._partners:
            self._partners[self._partner].check_alive(time.perf_counter() - self._exchange_start)

    # -- one-sided operations of other ranks -----------------------------------------------------------------------

    def _on_message(self, connection: PeerConnection, message: Message) -> None:
        if message.kind is MessageType.GET:
            with self.shared_weights.locked():
                number, version = self.shared_weights.count()
                self._log(Op.REMOTE_GET, number, connection.client)
                copy = self.shared_weights.vector.clone()
            connection.send(MessageType.REPLY, version, bytes_of(copy))
        elif message.kind is MessageType.ADD:
            if self._add_buffer is None:
                self._add_buffer = torch.empty_like(self.shared_weights.vector)
            connection.read_payload(bytes_of(self._add_buffer))
            with self.shared_weights.locked():
                number, version = self.shared_weights.count(writes=1)
                self._log(Op.REMOTE_ADD, number, connection.client)
                self.shared_weights.vector.add_(self._add_buffer)
            connection.send(MessageType.REPLY, version - 1)
        # EXCHANGE: the header stays in connection.unread until _advance reaches its round

    def _log(self, op: Op, number: int, actor: int, round: int = -1) -> None:
        if self.update_log is not None:
            self.update_log.append(op, self.rank, number, actor, round)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Make one move of the protocol; return whether there was one."""
        if self._matching is None or self._drained.is_set():
            return False
        if self._partner is not None:
            return self._try_complete(self._partner)
        last = self._last_round  # read once: another thread may set it now, and a round after it would never complete
        if last is not None and self._round > last:
            self._drained.set()
            return False
        if len(self.failed) + 1 >= self.size and last is None:
            return False
        partner = self._matching(self._round)[self.rank]
        if partner == self.rank or partner in self.failed:
            self._metrics["skipped"] += partner != self.rank
            self._round += 1
            return True
        if last is None and not self._may_enter():
            return False
        self._enter(partner)
        return True

    def _may_enter(self) -> bool:
        if self._initiating:
            owed = self._steps / self._steps_per_exchange - self.exchanges - self._forgiven
            if owed > MAX_OWED:
                self._forgiven += int(owed - MAX_OWED)
            if owed >= 0:
                return True
        return self._requested_round() >= self._round

    def _requested_round(self) -> int:
        """Return the highest round in which a partner waits for this rank; -1 if none does."""
        assert self._matching is not None
        highest = -1
        for peer in self.vectors.here:
            if peer != self.rank:
                header = self.vectors.header(peer)
                current = int(header[CURRENT_ROUND])
                is_open = int(header[COMPLETED_ROUND]) < current
                if current > highest and is_open and self._matching(current)[peer] == self.rank:
                    highest = current
        for connection in self._partners.values():
            if connection.unread is not None and connection.unread.kind is MessageType.EXCHANGE:
                highest = max(highest, connection.unread.number)
        return highest

    def _enter(self, partner: int) -> None:
        self._current_round = self._round
        self._partner, self._exchange_start = partner, time.perf_counter()
        if partner in self._partners:
            if self._snapshot is None:
                self._snapshot = torch.empty_like(self.shared_weights.vector)
                self._received = torch.empty_like(self.shared_weights.vector)
            with self.shared_weights.locked():
                number, _ = self.shared_weights.count()
                self._log(Op.SNAPSHOT, number, partner, self._round)
                self._snapshot.copy_(self.shared_weights.vector)
            self._partners[partner].send(MessageType.EXCHANGE, self._round, bytes_of(self._snapshot))
            self._received_round = -1
        elif partner in self.vectors.here:
            self.vectors.header(self.rank)[CURRENT_ROUND] = self._round
            if not self._average_in_place(partner):
                self.vectors.wake(partner)
        else:
            self._mark_failed(partner, "there is no connection to it")

    def _try_complete(self, partner: int) -> bool:
        """End the open exchange if it is complete or its partner has failed."""
        if partner in self._partners:
            return self._try_complete_remote(self._partners[partner], partner)
        if partner in self.vectors.here and int(self.vectors.header(self.rank)[COMPLETED_ROUND]) == self._round:
            self._end_exchange(completed=True)
            return True
        if partner in self.failed:
            self._metrics["skipped"] += 1
            self._end_exchange(completed=False)
            return True
        if partner in self.vectors.here and int(self.vectors.header(partner)[CURRENT_ROUND]) == self._round:
            return self._average_in_place(partner)
        return False

    def _try_complete_remote(self, connection: PeerConnection, partner: int) -> bool:
        assert self._snapshot is not None
        assert self._received is not None
        if connection.error:
            self.connections.drop(connection, connection.error)
            return True
        if connection.unread is not None and self._received_round != self._round:
            if connection.unread.kind is not MessageType.EXCHANGE or connection.unread.number != self._round:
                self.connections.drop(connection, f"it sent round {connection.unread.number} in round {self._round}")
                return True
            try:
                connection.read_payload(bytes_of(self._received))
            except ConnectionClosed as error:
                self.connections.drop(connection, str(error))
                return True
            self._received_round = self._round
        if self._received_round != self._round or connection.unsent:
            return False
        self._measure_distance(self._snapshot, self._received)
        with self.shared_weights.locked():
            number, _ = self.shared_weights.count(writes=1)
            self._log(Op.APPLY_HALF_DIFF, number, partner, self._round)
            kernels.add_half_difference(self.shared_weights.vector, self._received, self._snapshot)
        self._end_exchange(completed=True)
        return True

    def _average_in_place(self, partner: int) -> bool:
        """Average both vectors in shared memory if both ranks have entered the round and neither has averaged yet."""
        own, other = self.vectors.header(self.rank), self.vectors.header(partner)
        if int(other[CURRENT_ROUND]) != self._round:
            return False
        first, second = sorted((self.rank, partner))
        with self.vectors.lock(first), self.vectors.lock(second):
            if int(own[COMPLETED_ROUND]) == self._round:
                return False
            a, b = self.vectors.vector(first), self.vectors.vector(second)
            self._measure_distance(a, b)
            kernels.pair_average(a, b)
            for header in (own, other):
                header[SEQUENCE] += 1
                header[VERSION] += 1
                header[COMPLETED_ROUND] = self._round
            if self.update_log is not None:
                self.update_log.append(Op.PAIR_AVERAGE, self.rank, int(own[SEQUENCE]), partner, self._round)
                self.update_log.append(Op.PAIR_AVERAGE, partner, int(other[SEQUENCE]), self.rank, self._round)
        self.vectors.wake(partner)
        return True

    def _measure_distance(self, a: Tensor, b: Tensor) -> None:
        """Add |a - b| / |a| before the exchange to the metrics, estimated from a sample of elements."""
        stride = max(1, a.numel() // DISTANCE_SAMPLE)
        x, y = a[::stride], b[::stride]
        self._metrics["distance"] += float((x - y).norm() / (x.norm() + 1e-12))

    def _end_exchange(self, completed: bool) -> None:
        if completed:
            self._metrics["exchanges"] += 1
            self._metrics["exchange_s"] += time.perf_counter() - self._exchange_start
            self.exchanges += 1
        self._partner = None
        self._round += 1
