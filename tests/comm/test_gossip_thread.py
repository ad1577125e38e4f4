"""The gossip thread by itself: who averages, what happens with a locked or silent partner, and errors."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
import torch

from roundelay.comm.gossip import thread as thread_module
from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.gossip.transport import listen
from roundelay.comm.vectors import GOSSIPS, ROUNDS, LocalVectors, SharedVector
from roundelay.core.wait import wait_until


class Pair:
    """Ranks 0 and 1 are partners in every round; `on_lookup` runs whenever a thread looks up its partner."""

    edges = frozenset({(0, 1)})

    def __init__(self) -> None:
        self.on_lookup = lambda: None

    def __call__(self, round: int) -> Sequence[int]:
        self.on_lookup()
        return (1, 0)


@pytest.fixture
def vectors() -> LocalVectors:
    vectors = LocalVectors(range(2))
    for rank in range(2):
        vectors.publish(rank, torch.full((4,), float(rank)))
    return vectors


def thread_of(vectors: LocalVectors, rank: int) -> GossipThread:
    view = vectors.view(rank)
    return GossipThread(SharedVector(view, rank), view, 2, b"", None, lambda peer, reason: None)


def test_an_exchange_needs_one_side_only(vectors: LocalVectors) -> None:
    thread = thread_of(vectors, 0)
    vectors.headers[1][GOSSIPS] = 1  # rank 1 gossips, but its thread never runs
    thread.gossip(Pair(), 1.0)
    thread.notify_step()
    assert vectors.vectors[0].tolist() == vectors.vectors[1].tolist() == [0.5] * 4
    assert thread.exchanges == 1
    thread.close()


def test_a_partner_that_does_not_gossip_yet_is_left_alone(vectors: LocalVectors) -> None:
    thread = thread_of(vectors, 0)
    thread.gossip(Pair(), 1.0)
    thread.notify_step()
    assert vectors.vectors[1].tolist() == [1.0] * 4
    thread.close()


def test_exchanges_by_the_partner_count_and_give_limited_credit(vectors: LocalVectors) -> None:
    threads = [thread_of(vectors, rank) for rank in range(2)]
    for thread in threads:
        thread.gossip(Pair(), 1.0)
    for _ in range(10):
        threads[0].notify_step()
    assert [thread.exchanges for thread in threads] == [10, 10]
    for _ in range(10):
        threads[1].notify_step()
    assert threads[1].exchanges >= 18  # its own, although its partner's were ten ahead
    for thread in threads:
        thread.close()


def test_a_step_does_not_wait_for_a_partner_that_holds_its_lock(vectors: LocalVectors) -> None:
    thread = thread_of(vectors, 0)
    vectors.headers[1][GOSSIPS] = 1
    thread.start()
    thread.gossip(Pair(), 1.0)
    done = threading.Event()
    with vectors.locks[1]:

        def steps() -> None:
            for _ in range(20):
                thread.notify_step()
            done.set()

        threading.Thread(target=steps, daemon=True).start()
        assert done.wait(5.0)
        assert thread.exchanges == 0
    wait_until(lambda: thread.notify_step() or thread.exchanges, 10.0, lambda: TimeoutError("no exchange"), poll_s=0.05)
    thread.close()


def test_an_error_of_the_thread_is_raised_in_the_caller(vectors: LocalVectors) -> None:
    thread, pair = thread_of(vectors, 0), Pair()
    thread._inline = False
    thread.start()
    thread.gossip(pair, 1.0)
    pair.on_lookup = lambda: 1 / 0
    thread.notify_step()
    wait_until(lambda: thread.error, 10.0, lambda: TimeoutError("no error"))
    with pytest.raises(RuntimeError, match="the gossip thread of rank 0 failed: division by zero"):
        thread.raise_if_failed()
    thread.close()


def test_a_partner_that_dies_in_an_average_stops_no_other_rank(vectors: LocalVectors) -> None:
    thread = thread_of(vectors, 0)
    vectors.headers[1][GOSSIPS] = 1
    thread.gossip(Pair(), 1.0)
    vectors.headers[0][ROUNDS] = 1  # and AVERAGED was not reached
    steps = threading.Thread(target=thread.notify_step, daemon=True)
    steps.start()
    steps.join(10.0)
    assert not steps.is_alive()
    assert thread.exchanges == 1
    thread.close()


TOKEN = b"0123456789abcdef"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


class Remote:
    """Two gossip threads that share no memory, on loopback."""

    def __init__(self, elements: int = 4) -> None:
        self.threads: list[GossipThread] = []
        self.addresses: list[str] = []
        self.failures: set[int] = set()
        for rank in range(2):
            vectors, listener = LocalVectors([rank]), listen("127.0.0.1")
            vectors.publish(rank, torch.full((elements,), float(rank)))
            self.addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
            view = vectors.view(rank)
            self.threads.append(
                GossipThread(
                    SharedVector(view, rank),
                    view,
                    2,
                    TOKEN,
                    listener,
                    lambda peer, reason: None,
                    lambda: self.failures,
                    self.addresses.__getitem__,
                )
            )
        for thread in self.threads:
            thread.start()
            thread.gossip(Pair(), 1.0)
        for thread in self.threads:
            assert thread.await_partners(10.0) == []

    def connected(self) -> bool:
        for thread in self.threads:
            thread.raise_if_failed()
        return all(t.protocol is not None and t.protocol.edges[1 - t.rank].connected for t in self.threads)

    def exchange(self, count: int = 1) -> None:
        """Make steps until both ranks have completed `count` more exchanges."""
        goals = [thread.exchanges + count for thread in self.threads]

        def done() -> bool:
            for thread in self.threads:
                thread.notify_step()
            return all(thread.exchanges >= goal for thread, goal in zip(self.threads, goals, strict=True))

        wait_until(done, 20.0, lambda: TimeoutError("no exchange"), poll_s=0.001)

    def drop(self, rank: int) -> None:
        """Lose the connection of a rank."""
        thread = self.threads[rank]
        with thread._mutex:
            connection = thread.connections.partners.get(1 - rank)
            if connection is not None:
                with suppress(OSError):  # it is lost already
                    connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    for thread in remote.threads:
        thread.close()


def test_connections_that_are_lost_again_and_again_lose_no_exchange(remote: Remote) -> None:
    rng = random.Random(5)
    for number in range(40):
        remote.drop(rng.randrange(2))
        if number % 8 == 0:
            remote.exchange()
        for thread in remote.threads:
            thread.notify_step()
    remote.exchange(3)
    for thread in remote.threads:
        thread.stop_initiating()
    for thread in remote.threads:
        thread.drain()
    wait_until(remote.connected, 10.0, lambda: TimeoutError("not connected again"))
    total = sum(float(thread.shared_weights.vector[0]) for thread in remote.threads)
    assert total == pytest.approx(1.0, abs=1e-6)
    assert not any(thread._snapshots for thread in remote.threads)


def test_a_replaced_connection_is_not_served(remote: Remote) -> None:
    thread = remote.threads[1]
    with thread._mutex:
        first = thread.connections.partners[0]
    remote.drop(0)
    wait_until(
        lambda: remote.connected() and thread.connections.partners.get(0) not in (None, first),
        10.0,
        lambda: TimeoutError("not connected again"),
    )
    with thread._mutex:
        thread._serve(first)  # select had returned it before
        assert thread.protocol is not None
        assert thread.protocol.edges[0].connected
    remote.exchange()


def test_a_second_connection_starts_no_further_ones(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    thread, attempts = remote.threads[0], []
    connect_to = thread.connections.connect_to
    monkeypatch.setattr(thread.connections, "connect_to", lambda peer, *args: (attempts.append(peer), connect_to(peer, *args)))
    with thread._mutex:
        first = thread.connections.partners[1]
        ends = tcp_pair()
        thread.connections.add(1, ends[0])
    wait_until(lambda: thread.connections.partners.get(1) is not first, 10.0, lambda: TimeoutError("not replaced"))
    assert attempts == []
    ends[1].close()
    remote.exchange()


def test_an_attempt_to_connect_ends_when_its_connection_is_registered(remote: Remote) -> None:
    connections, ends = remote.threads[0].connections, tcp_pair()
    with remote.threads[0]._mutex:
        connections._connecting.add(1)
        connections.add(1, ends[0])
        assert 1 in connections._connecting
    wait_until(lambda: 1 not in connections._connecting, 10.0, lambda: TimeoutError("still connecting"))
    ends[1].close()


def test_a_failed_partner_leaves_no_buffer(remote: Remote) -> None:
    thread = remote.threads[0]
    with thread._mutex:
        connection = thread.connections.partners[1]
        thread._awaited[connection] = torch.empty(4)
        remote.failures.add(1)
    wait_until(lambda: thread.protocol is not None and 1 in thread.protocol.failed, 10.0, lambda: TimeoutError("not failed"))
    with thread._mutex:
        assert thread._awaited == {}


def test_the_end_does_not_wait_for_a_link_that_is_lost_all_the_time(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "DRAIN_LIMIT_S", 0.2)
    thread = remote.threads[0]
    assert thread.protocol is not None
    with thread._mutex:
        edge = thread.protocol.edges[1]
        edge.sent, edge.progress_at = edge.sent + 1, float("inf")  # open, and making progress for ever
    drain = threading.Thread(target=thread.drain, daemon=True)
    drain.start()
    drain.join(10.0)
    assert not drain.is_alive()
