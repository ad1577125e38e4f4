"""The embedded store and clients that misbehave: none of them harms the server or another client."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.errors import UsageError
from roundelay.fleet.frames import HEADER, MAX_BYTES
from roundelay.fleet.store import JobStore, connect_store, serve_store, serve_store_locally
from roundelay.fleet.store_client import parse_address


def connect(address: str, prefix: str = "") -> JobStore:
    return JobStore(connect_store(*parse_address(address), 10.0), prefix)


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "s")
    server = serve_store("127.0.0.1") if request.param == "tcp" else serve_store_locally(path)
    yield f"127.0.0.1:{server.port}" if request.param == "tcp" else f"unix:{path}"
    server.close()


def frame(text: str) -> bytes:
    return HEADER.pack(len(text)) + text.encode()


HELLO = frame('["roundelay-store-1","unknown"]')
GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(4096),
    b"\x00" * 64,
    HEADER.pack(MAX_BYTES + 1) + b"x" * 100,
    frame("[" * 1000),
    frame("{}"),
    frame("[]"),
    frame('["roundelay-store-1",7]'),
    HELLO + frame("nonsense"),
    HELLO + frame('["1","get","key"]'),
    HELLO + frame("[1]"),
    HELLO + frame('[1,"nothing"]'),
    HELLO + frame('[1,"set","key",7,null]'),
    HELLO + frame('[1,"set","key","value",NaN]'),
    HELLO + frame('[1,"add",{},[]]'),
    HELLO + frame('[1,"get",["key"]]'),
    HELLO + frame('[1,"compare_and_set",[],7]'),
    HELLO + frame('[1,"watch",NaN,["key"]]') + frame('[2,"wait",-1,["key"]]'),
    HELLO + frame('[1,"watch","x",7]'),
    HELLO + frame('[1,"wait",1e300,[]]'),
    HELLO + frame('[1,"wait",5,["never"]]') + frame('[2,"wait",5,["never"]]'),
    HELLO + frame('[1,"get","key"]')[:9],
]


def open_socket(address: str) -> socket.socket:
    host, port = parse_address(address)
    if port:
        return socket.create_connection((host, port), timeout=5)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(host.removeprefix("unix:"))
    return sock


def test_garbage_and_half_open_connections_do_no_harm(address: str) -> None:
    store = connect(address, "safe/")
    store.set("key", "1")
    silent = [open_socket(address) for _ in range(500)]
    for data in GARBAGE * 3:
        with open_socket(address) as sock:
            sock.sendall(data)
        assert store.get("key") == "1"
    assert connect(address, "safe/").list("") == {"key": "1"}
    for sock in silent:
        sock.close()
    store.set("text", "x")
    with pytest.raises(UsageError, match="invalid literal"):
        store.add("text", 1)
    assert store.get("key") == "1"


def send_requests(sock: socket.socket, count: int) -> None:
    for number in range(1, count):
        sock.sendall(frame(f'[{number},"get","greedy/big"]'))


def test_a_client_that_never_reads_is_closed(address: str) -> None:
    store = connect(address, "greedy/")
    store.set("big", "x" * 1_000_000)
    with open_socket(address) as sock:
        sock.sendall(HELLO)
        with pytest.raises(OSError):
            send_requests(sock, 200_000)
    assert store.add("n", 1) == 1
    store.set("big", "")


def test_a_value_that_is_too_long_is_an_error(address: str) -> None:
    store = connect(address, "long/")
    with pytest.raises(UsageError, match="at most"):
        store.set("key", "x" * (MAX_BYTES + 1))
    store.set("key", "x" * (MAX_BYTES // 2))
    assert len(store.get("key") or "") == MAX_BYTES // 2
    store.delete("key")


def test_the_socket_is_private_and_removed(tmp_path: Path) -> None:
    server = serve_store_locally(str(tmp_path / "s"))
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    server.close()
    assert not (tmp_path / "s").exists()
