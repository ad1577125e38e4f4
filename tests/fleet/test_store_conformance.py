"""One contract for all stores; for the embedded store also what the network and its server may do to it."""

from __future__ import annotations

import multiprocessing
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roundelay.fleet.store import JobStore, LocalStore, connect_store, serve_store, serve_store_locally
from roundelay.fleet.store_client import parse_address
from roundelay.simulate.event_loop import EventLoop
from roundelay.simulate.store import SimulatedStore

KINDS = ("local", "tcp", "unix")


def connect(address: str, prefix: str = "") -> JobStore:
    return JobStore(connect_store(*parse_address(address), 10.0), prefix)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the addresses of a server on TCP and of one on a Unix socket."""
    path = str(tmp_path_factory.mktemp("store") / "socket")
    tcp, unix = serve_store("127.0.0.1"), serve_store_locally(path)
    yield {"tcp": f"127.0.0.1:{tcp.port}", "unix": f"unix:{path}"}
    tcp.close()
    unix.close()


def create(kind: str, servers: dict[str, str], name: str) -> Any:
    if kind == "local":
        return LocalStore()
    return SimulatedStore(EventLoop()) if kind == "simulated" else connect(servers[kind], f"{name}/")


@pytest.fixture(params=[*KINDS, "simulated"])
def store(request: pytest.FixtureRequest, servers: dict[str, str]) -> Any:
    return create(request.param, servers, request.node.name)


@pytest.fixture(params=KINDS)
def timed_store(request: pytest.FixtureRequest, servers: dict[str, str]) -> Any:
    """A store in real time: a virtual one has neither times to live nor waits outside its event loop."""
    return create(request.param, servers, request.node.name)


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, servers: dict[str, str]) -> str:
    return servers[request.param]


# -- the contract ------------------------------------------------------------------------------------------------------


def test_values_are_set_read_and_listed(store: Any) -> None:
    assert store.get("a/1") is None
    store.set("a/1", "ä\n\0 \U0001f600")
    store.set("a/2", "")
    store.set("b", "3")
    assert store.get("a/1") == "ä\n\0 \U0001f600"
    assert store.get_many(["b", "nothing", "a/2"]) == {"b": "3", "nothing": None, "a/2": ""}
    assert store.list("a/") == {"a/1": "ä\n\0 \U0001f600", "a/2": ""}
    assert store.list("c") == {}


def test_counters_and_claims(store: Any) -> None:
    assert [store.add("n", 5), store.add("n", -7), store.add("n", 0)] == [5, -2, -2]
    assert store.get("n") == "-2"
    assert [store.claim("k", "first"), store.claim("k", "second"), store.get("k")] == ["first"] * 3


def test_several_keys_are_compared_and_set_at_once(store: Any) -> None:
    store.set("a", "1")
    assert store.compare_and_set({"a": "1", "b": None}, {"a": "2", "b": "x", "c": "y"}) is None
    assert store.get_many(["a", "b", "c"]) == {"a": "2", "b": "x", "c": "y"}
    assert store.compare_and_set({"a": "2", "b": None}, {"a": "3", "d": "z"}) == {"a": "2", "b": "x"}
    assert store.get_many(["a", "d"]) == {"a": "2", "d": None}
    assert store.compare_and_set({"b": "x"}, {"b": None, "absent": None}) is None
    assert store.list("") == {"a": "2", "c": "y"}


def test_a_key_disappears_unless_it_is_set_again(timed_store: Any) -> None:
    timed_store.set("short", "1", 0.25)
    timed_store.set("renewed", "1", 0.25)
    timed_store.set("kept", "1", 0.25)
    timed_store.set("kept", "1")
    for _ in range(4):
        time.sleep(0.1)
        timed_store.set("renewed", "1", 0.5)
    assert timed_store.list("") == {"renewed": "1", "kept": "1"}
    assert timed_store.claim("short", "2") == "2"
    assert timed_store.compare_and_set({"short": "2"}, {"short": "3"}) is None


def test_a_pause_ends_when_a_key_changes_or_expires(timed_store: Any) -> None:
    def seconds(change: Callable[[], Any] | None, limit: float = 5.0) -> float:
        timed_store.get("key")
        began = time.monotonic()
        timer = threading.Timer(0.1, change) if change else None
        if timer:
            timer.start()
        timed_store.pause(limit, "other", "key")
        return time.monotonic() - began

    assert seconds(lambda: timed_store.set("key", "1")) < 3
    assert seconds(lambda: timed_store.add("other", 1)) < 3
    assert seconds(lambda: timed_store.compare_and_set({"key": "1"}, {"key": None})) < 3
    assert seconds(lambda: timed_store.set("unrelated", "1"), 0.4) >= 0.39
    timed_store.set("key", "1", 0.2)
    assert seconds(None) < 3


def test_a_change_between_a_read_and_a_pause_is_not_missed(timed_store: Any) -> None:
    assert timed_store.get("key") is None
    writer = threading.Thread(target=timed_store.set, args=("key", "1"))
    writer.start()
    writer.join()
    began = time.monotonic()
    timed_store.pause(5.0, "key")
    assert time.monotonic() - began < 3
    timed_store.pause(0.2, "key")
    assert time.monotonic() - began >= 0.2


# -- several processes -------------------------------------------------------------------------------------------------


def move_coins(address: str, rounds: int) -> None:
    store = connect(address, "coins/")
    for number in range(rounds):
        source, target = ("a", "b") if number % 2 else ("b", "a")
        values = store.get_many(["a", "b", "moves"])
        while values is not None:
            a = {key: int(values[key] or 0) for key in values}
            new = {source: str(a[source] - 1), target: str(a[target] + 1), "moves": str(a["moves"] + 1)}
            current = store.compare_and_set(values, new)
            values = None if current is None else current
        store.add("sum", 1)


@pytest.mark.dist
def test_no_change_is_lost_among_processes(address: str) -> None:
    store = connect(address, "coins/")
    store.set("a", "100")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=move_coins, args=(address, 50)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert store.get_many(["a", "b", "moves", "sum"]) == {"a": "100", "b": "0", "moves": "200", "sum": "200"}


def test_a_long_wait_of_one_thread_does_not_delay_others(address: str) -> None:
    store = connect(address, "wait/")
    waiting = threading.Thread(target=store.wait, args=(20.0, "late"))
    waiting.start()
    began = time.monotonic()
    for _ in range(50):
        store.get("late")
    assert time.monotonic() - began < 5
    store.set("late", "1")
    waiting.join(5)
    assert not waiting.is_alive()
    assert not store.wait(0.1, "late", "never")


def test_128_clients(address: str) -> None:
    clients = [connect(address, "many/") for _ in range(128)]
    threads = [threading.Thread(target=lambda c=c: [c.add("n", 1) for _ in range(5)]) for c in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert clients[0].get("n") == "640"
    for client in clients:
        client.client.close()


# -- a network that fails ----------------------------------------------------------------------------------------------


class Proxy:
    """A TCP proxy to `port`. reset() resets all connections; with `swallow` it first discards the server's replies."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.swallow = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._pairs.append((client, server))
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(one, other, other is client), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        try:
            while chunk := source.recv(65536):
                if is_reply and self.swallow:
                    self.swallow = False
                    self.reset()
                    return
                target.sendall(chunk)
        except OSError:
            return

    def reset(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD) if sock.fileno() >= 0 else None
                sock.close()

    def close(self) -> None:
        self._listener.close()
        self.reset()


def test_a_repeated_request_is_applied_once(servers: dict[str, str]) -> None:
    proxy = Proxy(parse_address(servers["tcp"])[1])
    store = connect(f"127.0.0.1:{proxy.port}", "reset/")
    for number in range(1, 11):
        proxy.swallow = True  # the server applies the request, but its reply is lost with the connection
        assert store.add("n", 1) == number
        assert not proxy.swallow
    proxy.swallow = True
    assert store.compare_and_set({"n": "10"}, {"n": "11"}) is None
    proxy.swallow = True
    assert store.claim("owner", "me") == "me"
    assert store.list("") == {"n": "11", "owner": "me"}
    proxy.close()


def test_fifty_resets_under_load_lose_nothing(servers: dict[str, str]) -> None:
    proxy = Proxy(parse_address(servers["tcp"])[1])
    store = connect(f"127.0.0.1:{proxy.port}", "resets/")
    done = threading.Event()
    counts = [0, 0, 0]

    def work(index: int) -> None:
        while not done.is_set():
            store.add("n", 1)
            counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        time.sleep(0.03)
        proxy.reset()
    done.set()
    for thread in threads:
        thread.join(20)
    assert store.get("n") == str(sum(counts))
    proxy.close()


def test_a_wait_survives_a_reset(servers: dict[str, str]) -> None:
    proxy = Proxy(parse_address(servers["tcp"])[1])
    store = connect(f"127.0.0.1:{proxy.port}", "held/")
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(store.wait(20.0, "key")))
    waiting.start()
    time.sleep(0.2)
    proxy.reset()
    time.sleep(0.3)
    connect(servers["tcp"], "held/").set("key", "1")
    waiting.join(10)
    assert results == [True]
    proxy.close()
