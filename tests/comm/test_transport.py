"""Connections: only peers with the job's token are accepted, and invalid messages change nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from roundelay.comm.gossip.thread import GossipThread
from roundelay.comm.gossip.transport import (
    HEADER,
    MAGIC,
    ConnectionClosed,
    MessageType,
    RemoteMemoryClient,
    accept_handshake,
    bytes_of,
    connect,
    listen,
)
from roundelay.comm.shared_memory import LocalVectors, SharedVector
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
    return HEADER.pack(MAGIC, MessageType.HELLO, rank, len(token) if length is None else length) + token


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
        [hello(1, TOKEN[:4], length=16)],
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


def test_a_partner_that_closes_its_connection_is_reported_lost(listener: Listener) -> None:
    partner = connect(listener.address, 1, TOKEN, 10.0)
    listener.thread.await_partners(1, 10.0)
    partner.close()
    listener.thread.await_partners(1, 10.0)  # failed partners count
    for _ in range(500):
        if listener.lost:
            break
        listener.thread.sync()
    assert listener.lost == [1]
    assert listener.answers()


def test_a_client_names_the_rank_that_does_not_answer(listener: Listener) -> None:
    client = RemoteMemoryClient(listener.address, 1, 0, TOKEN, 10.0)
    listener.thread.close()
    with pytest.raises(PeerLost, match="rank 0 does not answer"):
        client.get(bytes_of(torch.empty_like(VECTOR)))


def test_a_handshake_returns_the_rank() -> None:
    with listen("127.0.0.1") as listener:
        listener.setblocking(True)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for token, rank in ((TOKEN, 7), (TOKEN, -3)):
            with connect(address, rank, token, 5.0), listener.accept()[0] as sock:
                assert accept_handshake(sock, TOKEN) == rank
        with connect(address, 7, b"x" * 16, 5.0), listener.accept()[0] as sock, pytest.raises(ConnectionClosed, match="token"):
            accept_handshake(sock, TOKEN)


def test_a_listener_is_reachable_at_its_address_only() -> None:
    with listen("127.0.0.2") as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
