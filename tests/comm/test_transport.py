"""Connections: only peers with the job's token are accepted, and invalid messages change nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.gossip.transport import (
    APPLIED,
    HEADER,
    MAGIC,
    ConnectionClosed,
    MessageType,
    RemoteMemoryClient,
    accept_handshake,
    answer_handshake,
    bytes_of,
    connect,
    listen,
    receive_into,
)
from roundelay.comm.vectors import LocalVectors, SharedVector
from roundelay.errors import PeerLost

TOKEN = b"0123456789abcdef"
VECTOR = torch.arange(6, dtype=torch.float32)


class Listener:
    """A gossip thread that listens, with its shared vector."""

    def __init__(self) -> None:
        vectors = LocalVectors([0])
        vectors.publish(0, VECTOR)
        self.shared_weights = SharedVector(vectors.view(0), 0)
        listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.lost: list[int] = []
        self.thread = GossipThread(
            self.shared_weights, vectors.view(0), 2, TOKEN, listener, lambda rank, reason: self.lost.append(rank)
        )
        self.thread.start()

    def connect(self, *messages: bytes, end: bool = True) -> socket.socket:
        """Open a connection, send the messages and, with `end`, close the sending side."""
        host, _, port = self.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=10)
        with suppress(OSError):  # it may have been rejected already
            for message in messages:
                sock.sendall(message)
            if end:
                sock.shutdown(socket.SHUT_WR)
        return sock

    def answers(self) -> bool:
        """Return whether a client with the token can still read the vector and add to it."""
        client, out = RemoteMemoryClient(self.address, 1, 0, TOKEN, 10.0), torch.empty_like(VECTOR)
        before = self.shared_weights.vector.clone()
        version = client.get(bytes_of(out))
        added = client.add(bytes_of(torch.ones_like(VECTOR)))
        client.close()
        return torch.equal(out, before) and added == version and torch.equal(self.shared_weights.vector, before + 1)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.thread.close()


def rejected(sock: socket.socket) -> bool:
    """Return whether the other end closes the connection without an answer."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    finally:
        sock.close()


def hello(rank: int, token: bytes, length: int | None = None) -> bytes:
    payload = token + APPLIED.pack(0)
    return HEADER.pack(MAGIC, MessageType.HELLO, rank, len(payload) if length is None else length) + payload


@pytest.mark.parametrize(
    "messages",
    [
        [b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"],
        [b"\x00" * 100],
        [b""],
        [b"RD"],
        [hello(1, b"fedcba9876543210")],
        [hello(1, TOKEN[:-1])],
        [hello(1, TOKEN + b"!")],
        [hello(1, b"", length=1 << 60)],
        [hello(1, TOKEN[:4], length=24)],
        [HEADER.pack(MAGIC, MessageType.ADD, 0, 24) + bytes(24)],
        [HEADER.pack(MAGIC, MessageType.GET, 0, 0)],
        [HEADER.pack(MAGIC, 77, 0, 0)],
    ],
)
def test_an_invalid_handshake_is_rejected_and_the_thread_survives(messages: list[bytes], listener: Listener) -> None:
    assert rejected(listener.connect(*messages))
    assert torch.equal(listener.shared_weights.vector, VECTOR)
    assert listener.answers()
    assert listener.lost == []


@pytest.mark.parametrize(
    "message",
    [
        b"not a message at all, but long enough for a header",
        HEADER.pack(MAGIC, MessageType.ADD, 0, 5) + bytes(5),
        HEADER.pack(MAGIC, MessageType.ADD, 0, 1 << 50),
        HEADER.pack(MAGIC, MessageType.GET, 0, -1),
        HEADER.pack(MAGIC, 99, 0, 0),
        HEADER.pack(MAGIC, MessageType.EXCHANGE, 0, 24) + bytes(24),
        HEADER.pack(MAGIC, MessageType.REPLY, 0, 0),
    ],
)
def test_an_invalid_message_after_the_handshake_changes_nothing(message: bytes, listener: Listener) -> None:
    sock = listener.connect(hello(-2, TOKEN), message)
    sock.settimeout(10)
    assert torch.equal(listener.shared_weights.vector, VECTOR)
    assert listener.answers()
    sock.close()
    assert listener.answers()


def test_a_silent_connection_delays_no_other_connection(listener: Listener) -> None:
    silent = listener.connect(end=False)
    assert listener.answers()
    silent.close()


class Pair:
    """Ranks 0 and 1 are partners in every round."""

    edges = frozenset({(0, 1)})

    def __call__(self, round: int) -> tuple[int, int]:
        return (1, 0)


def test_a_partner_that_closes_its_connection_is_not_failed_and_may_come_back(listener: Listener) -> None:
    listener.thread.gossip(Pair(), 1.0)
    for _ in range(3):
        partner, applied = connect(listener.address, 1, TOKEN, 10.0)
        assert applied == 0
        partner.close()
    assert listener.lost == []
    assert listener.answers()


def test_an_exchange_that_a_lost_connection_interrupts_is_completed_later(listener: Listener) -> None:
    listener.thread.gossip(Pair(), 1.0)
    sock, _ = connect(listener.address, 1, TOKEN, 10.0)
    theirs = torch.full_like(VECTOR, 10.0)
    sock.sendall(HEADER.pack(MAGIC, MessageType.EXCHANGE, 1, VECTOR.nbytes) + bytes_of(theirs)[:7])
    receive_into(sock, memoryview(bytearray(HEADER.size + VECTOR.nbytes)))  # its snapshot 1
    sock.close()
    assert torch.equal(listener.shared_weights.vector, VECTOR)
    sock, applied = connect(listener.address, 1, TOKEN, 10.0, applied=1)  # this side has applied it
    assert applied == 0
    sock.sendall(HEADER.pack(MAGIC, MessageType.EXCHANGE, 1, VECTOR.nbytes) + bytes_of(theirs))
    answer = bytearray(HEADER.size)
    receive_into(sock, memoryview(answer))
    assert HEADER.unpack(answer)[1:] == (MessageType.ACK, 1, 0)
    assert torch.allclose(listener.shared_weights.vector, (VECTOR + 10.0) / 2)
    sock.close()


def test_a_client_names_the_rank_that_does_not_answer(listener: Listener) -> None:
    client = RemoteMemoryClient(listener.address, 1, 0, TOKEN, 10.0)
    listener.thread.close()
    with pytest.raises(PeerLost, match="rank 0 does not answer"):
        client.get(bytes_of(torch.empty_like(VECTOR)))


def test_a_handshake_returns_the_rank_and_the_last_exchange() -> None:
    with listen("127.0.0.1") as listener:
        listener.setblocking(True)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        results: list[tuple[int, int]] = []

        def accept() -> None:
            sock, _ = listener.accept()
            try:
                results.append(accept_handshake(sock, TOKEN))
                answer_handshake(sock, 0, 5)
            except ConnectionClosed:
                sock.close()

        for token, rank in ((TOKEN, 7), (TOKEN, -3), (b"x" * 16, 7)):
            thread = threading.Thread(target=accept)
            thread.start()
            if token == TOKEN:
                sock, applied = connect(address, rank, token, 5.0, applied=3)
                assert applied == 5
                sock.close()
            else:
                with pytest.raises(ConnectionClosed):
                    connect(address, rank, token, 5.0)
            thread.join(10)
        assert results == [(7, 3), (-3, 3)]


def test_a_listener_is_reachable_at_its_address_only() -> None:
    with listen("127.0.0.2") as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
