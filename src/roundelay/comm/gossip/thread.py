"""The agent: the thread that meets a learner's partners in the background, round after round.

A round has a matching; partners of a round exchange snapshots and each adds half the difference to its w. An agent plays its
rounds in order, one exchange at a time, so waits cannot form a cycle. It enters the next round when its learner has done
as many gradients as it has had exchanges, or when somebody already asks it for that round or a later one. So the fastest
learner sets the pace of exchanges, the agent of a slow one keeps it, and no gradient ever waits.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from roundelay.comm.gossip.transport import ConnectionClosed, ConnectionSet, Message, MessageType, PeerConnection
from roundelay.comm.shared_memory import DONE, ENTERED, HISTORY, VERSION, SharedVector, SharedVectors
from roundelay.core import kernels
from roundelay.core.contracts import Matching
from roundelay.core.update_log import Op, UpdateLog
from roundelay.errors import PeerLost, RoundelayError

PATIENCE_S = 0.2
"""How long an agent sleeps before it looks whether those it waits for are still alive."""
MOST_OWED = 8
"""Exchanges an agent makes up for after a delay; more would only repeat themselves."""
SAMPLE = 4096
"""Elements from which the distance between partners is estimated."""


def bytes_of(vector: Tensor) -> memoryview:
    return memoryview(vector.numpy()).cast("B")  # type: ignore[arg-type]  # numpy arrays are buffers


class GossipThread:
    """One learner's agent."""

    def __init__(
        self,
        shared_weights: SharedVector,
        board: SharedVectors,
        size: int,
        token: bytes,
        listener: socket.socket | None,
        lost: Callable[[int, str], None],
    ) -> None:
        self.rank, self.size, self.board, self.shared_weights = board.rank, size, board, shared_weights
        self.dead: set[int] = set()
        self.update_log: UpdateLog | None = None
        self.round = 0
        self.entered = -1
        self.error: BaseException | None = None
        self._lost = lost
        self.traffic = ConnectionSet(board, token, listener, self._arrived, self._bury)
        self._partners = self.traffic.partners
        self._service: Tensor | None = None
        self._snapshot: Tensor | None = None
        self._received: Tensor | None = None
        self._received_in = -1
        self._open: int | None = None
        self._opened_at = 0.0
        self._matching: Matching | None = None
        self._gradients_per_meeting = 1.0
        self._gradients, self._owed_from = 0, 0
        self._asking = True
        self._play_to: int | None = None
        self._at_rest = threading.Event()
        self._quit = False
        self._figures = {"exchanges": 0.0, "exchange_s": 0.0, "distance": 0.0, "skipped": 0.0}
        self._met = 0
        self._visitors: deque[threading.Event] = deque()
        self._taken = dict(self._figures)
        self._thread = threading.Thread(target=self._run, name=f"agent-{self.rank}", daemon=True)

    # -- called by the learner -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def await_partners(self, count: int, timeout_s: float) -> None:
        """Returns when connections to that many partners on other machines are up: every edge is touched at the start."""
        deadline = time.monotonic() + timeout_s
        while len(self._partners) + len(self.dead) < count:
            self._check()
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"only {len(self._partners)} of {count} partners on other machines have connected in {timeout_s:.0f} s",
                    where=f"rank {self.rank}",
                    hint="check that the machines reach each other on the address given as host=…, and that ports are open",
                )
            time.sleep(0.002)

    def gossip(self, matching: Matching, steps_per_exchange: float) -> None:
        self._gradients_per_meeting = steps_per_exchange
        self._matching = matching
        self.board.wake(self.rank)

    def notify_step(self) -> None:
        """The learner has done one more gradient."""
        self._gradients += 1
        self.board.wake(self.rank)

    def stop_asking(self) -> int:
        """From now on only answer; returns the round this agent has entered."""
        self._asking = False
        self._pass_by()
        return self.entered

    def play_to(self, last: int) -> None:
        """Plays on to this round, whoever asks, and rests. Returns when resting."""
        self._play_to = last
        self.board.wake(self.rank)
        while not self._at_rest.wait(1.0):
            self._check()

    def metrics(self) -> dict[str, float]:
        """Figures since the last call."""
        now = dict(self._figures)
        taken, self._taken = self._taken, now
        return {name: now[name] - taken[name] for name in now}

    def close(self) -> None:
        self._quit = True
        self.board.wake(self.rank)
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.traffic.close()

    def _pass_by(self) -> None:
        """Waits until the agent has passed the top of its loop, so that it has seen what was set before."""
        passed = threading.Event()
        self._visitors.append(passed)
        self.board.wake(self.rank)
        while not passed.wait(1.0):
            self._check()

    def _check(self) -> None:
        if isinstance(self.error, RoundelayError):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"the agent of rank {self.rank} failed: {self.error}") from self.error

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._quit:
                self.traffic.take_in()
                visitors = len(self._visitors)
                while self._advance():
                    pass
                for _ in range(visitors):
                    self._visitors.popleft().set()
                if not self.traffic.listen(PATIENCE_S):
                    self._look_for_the_dead()
        except BaseException as error:  # reported to the learner at its next call
            self.error = error
            self._at_rest.set()

    def _bury(self, peer: int, why: str) -> None:
        if peer not in self.dead:
            self.dead.add(peer)
            if not self._at_rest.is_set():
                self._lost(peer, why)

    def _look_for_the_dead(self) -> None:
        for peer in self.board.here:
            if peer not in self.dead and peer != self.rank and not self.board.alive(peer):
                self._bury(peer, "its process has ended")
        if self._open in self._partners:
            self._partners[self._open].look(time.perf_counter() - self._opened_at)

    # -- one-sided verbs of others -------------------------------------------------------------------------------------

    def _arrived(self, link: PeerConnection, arrival: Message) -> None:
        if arrival.kind is MessageType.GET:
            with self.shared_weights.locked():
                number, version = self.shared_weights.count()
                self._note(Op.REMOTE_GET, number, link.caller)
                copy = self.shared_weights.vector.clone()
            link.send(MessageType.REPLY, version, bytes_of(copy))
        elif arrival.kind is MessageType.ADD:
            if self._service is None:
                self._service = torch.empty_like(self.shared_weights.vector)
            link.read_payload(bytes_of(self._service))
            with self.shared_weights.locked():
                number, version = self.shared_weights.count(writes=1)
                self._note(Op.REMOTE_ADD, number, link.caller)
                self.shared_weights.vector.add_(self._service)
            link.send(MessageType.REPLY, version - 1)

    def _note(self, kind: Op, number: int, actor: int, round: int = -1) -> None:
        if self.update_log is not None:
            self.update_log.append(kind, self.rank, number, actor, round)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """One move, if one is possible."""
        if self._matching is None or self._at_rest.is_set():
            return False
        if self._open is not None:
            return self._try_to_close()
        # looked at once: the learner may set it meanwhile, and a round beyond the last would be waited for in vain
        last = self._play_to
        if last is not None and self.round > last:
            self._at_rest.set()
            return False
        if len(self.dead) + 1 >= self.size and last is None:
            return False
        partner = self._matching(self.round)[self.rank]
        if partner == self.rank or partner in self.dead:
            self._figures["skipped"] += partner != self.rank
            self.round += 1
            return True
        if last is None and not self._may_enter():
            return False
        self._enter(partner)
        return True

    def _may_enter(self) -> bool:
        if self._asking:
            owed = self._gradients / self._gradients_per_meeting - self._met - self._owed_from
            if owed > MOST_OWED:
                self._owed_from += int(owed - MOST_OWED)
            if owed >= 0:
                return True
        return self._asked() >= self.round

    def _asked(self) -> int:
        """The highest round somebody waits for this agent in."""
        assert self._matching is not None
        highest = -1
        for peer in self.board.here:
            if peer != self.rank:
                header = self.board.header(peer)
                entered = int(header[ENTERED])
                if entered > highest and int(header[DONE]) < entered and self._matching(entered)[peer] == self.rank:
                    highest = entered
        for link in self._partners.values():
            if link.waiting is not None and link.waiting.kind is MessageType.EXCHANGE:
                highest = max(highest, link.waiting.number)
        return highest

    def _enter(self, partner: int) -> None:
        self.entered = self.round
        self._open, self._opened_at = partner, time.perf_counter()
        if partner in self._partners:
            if self._snapshot is None:
                self._snapshot = torch.empty_like(self.shared_weights.vector)
                self._received = torch.empty_like(self.shared_weights.vector)
            with self.shared_weights.locked():
                number, _ = self.shared_weights.count()
                self._note(Op.SNAPSHOT, number, partner, self.round)
                self._snapshot.copy_(self.shared_weights.vector)
            self._partners[partner].send(MessageType.EXCHANGE, self.round, bytes_of(self._snapshot))
            self._received_in = -1
        elif partner in self.board.here:
            self.board.header(self.rank)[ENTERED] = self.round
            if not self._meet_in_place(partner):
                self.board.wake(partner)
        else:
            self._bury(partner, "there is no connection to it")

    def _try_to_close(self) -> bool:
        """Ends the open exchange if it is complete or its partner is gone."""
        partner = self._open
        assert partner is not None
        if partner in self._partners:
            return self._try_to_close_remote(self._partners[partner], partner)
        if partner in self.board.here and int(self.board.header(self.rank)[DONE]) == self.round:
            self._close(met=True)
            return True
        if partner in self.dead:
            self._figures["skipped"] += 1
            self._close(met=False)
            return True
        if partner in self.board.here and int(self.board.header(partner)[ENTERED]) == self.round:
            return self._meet_in_place(partner)
        return False

    def _try_to_close_remote(self, link: PeerConnection, partner: int) -> bool:
        assert self._snapshot is not None
        assert self._received is not None
        if link.error:
            self.traffic.hang_up(link, link.error)
            return True
        if link.waiting is not None and self._received_in != self.round:
            if link.waiting.kind is not MessageType.EXCHANGE or link.waiting.number != self.round:
                self.traffic.hang_up(link, f"it speaks of round {link.waiting.number} in round {self.round}")
                return True
            try:
                link.read_payload(bytes_of(self._received))
            except ConnectionClosed as error:
                self.traffic.hang_up(link, str(error))
                return True
            self._received_in = self.round
        if self._received_in != self.round or link.sending:
            return False
        self._note_distance(self._snapshot, self._received)
        with self.shared_weights.locked():
            number, _ = self.shared_weights.count(writes=1)
            self._note(Op.APPLY_HALF_DIFF, number, partner, self.round)
            kernels.add_half_difference(self.shared_weights.vector, self._received, self._snapshot)
        self._close(met=True)
        return True

    def _meet_in_place(self, partner: int) -> bool:
        """Averages both vectors where they lie, if both agents have entered the round and neither has done it yet."""
        mine, theirs = self.board.header(self.rank), self.board.header(partner)
        if int(theirs[ENTERED]) != self.round:
            return False
        first, second = sorted((self.rank, partner))
        with self.board.lock(first), self.board.lock(second):
            if int(mine[DONE]) == self.round:
                return False
            a, b = self.board.vector(first), self.board.vector(second)
            self._note_distance(a, b)
            kernels.pair_average(a, b)
            for header in (mine, theirs):
                header[HISTORY] += 1
                header[VERSION] += 1
                header[DONE] = self.round
            if self.update_log is not None:
                self.update_log.append(Op.PAIR_AVERAGE, self.rank, int(mine[HISTORY]), partner, self.round)
                self.update_log.append(Op.PAIR_AVERAGE, partner, int(theirs[HISTORY]), self.rank, self.round)
        self.board.wake(partner)
        return True

    def _note_distance(self, a: Tensor, b: Tensor) -> None:
        """|a - b| / |a|, from a sample: what the exchange finds apart."""
        stride = max(1, a.numel() // SAMPLE)
        x, y = a[::stride], b[::stride]
        self._figures["distance"] += float((x - y).norm() / (x.norm() + 1e-12))

    def _close(self, met: bool) -> None:
        if met:
            self._figures["exchanges"] += 1
            self._figures["exchange_s"] += time.perf_counter() - self._opened_at
            self._met += 1
        self._open = None
        self.round += 1
