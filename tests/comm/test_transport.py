"""Only those who know the job's token are let in, and strangers disturb nobody."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from roundelay.comm.gossip.thread import GossipThread, bytes_of
from roundelay.comm.gossip.transport import (
    HEADER,
    MAGIC,
    ConnectionClosed,
    MessageType,
    RemoteMemoryClient,
    accept_handshake,
    connect,
    listen,
)
from roundelay.comm.shared_memory import LocalVectors, SharedVector
from roundelay.errors import PeerLost

TOKEN = b"0123456789abcdef"
VECTOR = torch.arange(6, dtype=torch.float32)


class Host:
    """An agent that listens, with the vector it publishes."""

    def __init__(self) -> None:
        board = LocalVectors([0])
        board.publish(0, VECTOR)
        self.shared_weights = SharedVector(board.seen_by(0), 0)
        listener = listen("127.0.0.1")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.lost: list[int] = []
        self.agent = GossipThread(
            self.shared_weights, board.seen_by(0), 2, TOKEN, listener, lambda rank, why: self.lost.append(rank)
        )
        self.agent.start()

    def knock(self, *words: bytes, hang_up: bool = True) -> socket.socket:
        """A connection that says these words and, if the agent turns it away, has nothing more to read."""
        host, _, port = self.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=10)
        with suppress(OSError):  # it may have been turned away already
            for word in words:
                sock.sendall(word)
            if hang_up:
                sock.shutdown(socket.SHUT_WR)
        return sock

    def answers(self) -> bool:
        """Whether somebody who knows the token can still read the vector and add to it."""
        caller, out = RemoteMemoryClient(self.address, 1, 0, TOKEN, 10.0), torch.empty_like(VECTOR)
        before = self.shared_weights.vector.clone()
        version = caller.get(bytes_of(out))
        added = caller.add(bytes_of(torch.ones_like(VECTOR)))
        caller.close()
        return torch.equal(out, before) and added == version and torch.equal(self.shared_weights.vector, before + 1)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.agent.close()


def turned_away(sock: socket.socket) -> bool:
    """Whether the other end hangs up without a word."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    finally:
        sock.close()


def hello(rank: int, token: bytes, length: int | None = None) -> bytes:
    return HEADER.pack(MAGIC, MessageType.HELLO, rank, len(token) if length is None else length) + token


@pytest.mark.parametrize(
    "words",
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
def test_strangers_are_turned_away_and_the_agent_survives(words: list[bytes], host: Host) -> None:
    assert turned_away(host.knock(*words))
    assert torch.equal(host.shared_weights.vector, VECTOR)
    assert host.answers()
    assert host.lost == []


@pytest.mark.parametrize(
    "words",
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
def test_a_caller_who_speaks_nonsense_after_the_greeting_changes_nothing(words: bytes, host: Host) -> None:
    sock = host.knock(hello(-2, TOKEN), words)
    sock.settimeout(10)
    assert torch.equal(host.shared_weights.vector, VECTOR)
    assert host.answers()
    sock.close()
    assert host.answers()


def test_somebody_who_connects_and_says_nothing_holds_nobody_up_for_ever(host: Host) -> None:
    silent = host.knock(hang_up=False)
    assert host.answers()
    silent.close()


def test_a_partner_that_hangs_up_is_reported_lost(host: Host) -> None:
    partner = connect(host.address, 1, TOKEN, 10.0)
    host.agent.await_partners(1, 10.0)
    partner.close()
    host.agent.await_partners(1, 10.0)  # the dead count as settled
    for _ in range(500):
        if host.lost:
            break
        host.agent._pass_by()
    assert host.lost == [1]
    assert host.answers()


def test_a_caller_whose_host_is_gone_says_who_does_not_answer(host: Host) -> None:
    caller = RemoteMemoryClient(host.address, 1, 0, TOKEN, 10.0)
    host.agent.close()
    with pytest.raises(PeerLost, match="rank 0 does not answer"):
        caller.get(bytes_of(torch.empty_like(VECTOR)))


def test_admission_returns_the_rank() -> None:
    with listen("127.0.0.1") as listener:
        listener.setblocking(True)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for token, rank in ((TOKEN, 7), (TOKEN, -3)):
            with connect(address, rank, token, 5.0), listener.accept()[0] as sock:
                assert accept_handshake(sock, TOKEN) == rank
        with connect(address, 7, b"x" * 16, 5.0), listener.accept()[0] as sock, pytest.raises(ConnectionClosed, match="token"):
            accept_handshake(sock, TOKEN)
