"""A store whose server is killed, suspended or replaced, and a client that was suspended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roundelay.core.wait import wait_until
from roundelay.errors import PeerLost
from roundelay.fleet import store_client
from roundelay.fleet.store import JobStore, connect_store, serve_store
from roundelay.fleet.store_client import parse_address


def connect(address: str) -> JobStore:
    return JobStore(connect_store(*parse_address(address), 10.0))


def stop(process: subprocess.Popen[str]) -> None:
    """Suspend a process, and return when it no longer runs."""
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 10.0)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    server = serve_store("127.0.0.1")
    yield {"tcp": f"127.0.0.1:{server.port}"}
    server.close()


SERVER = """
import sys, time
from roundelay.fleet.embedded_store import serve_store, serve_store_locally
server = serve_store_locally(sys.argv[1]) if sys.argv[1:] else serve_store("127.0.0.1")
print(server.port, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start_server() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen([sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        return process, f"unix:{arguments[0]}" if arguments else f"127.0.0.1:{port}"

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "limit_s"), [("tcp", 6.0), ("unix", 2.0)])
def test_a_killed_server_is_noticed_in_seconds(start_server: Any, tmp_path: Path, kind: str, limit_s: float) -> None:
    process, address = start_server(*[str(tmp_path / "s")] * (kind == "unix"))
    store = connect(address)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.wait(60.0, "never")
        except PeerLost as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    process.kill()
    process.wait()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="no longer answers"):
        store.get("key")
    waiting.join(limit_s)
    assert len(errors) == 1
    assert time.monotonic() - began < limit_s


@pytest.mark.dist
def test_a_suspended_server_expires_nothing_and_a_silent_one_is_lost(start_server: Any) -> None:
    process, address = start_server()
    store = connect(address)
    store.set("heartbeat", "1", 1.5)
    stop(process)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    assert store.get("heartbeat") == "1"
    assert wait_until(lambda: store.get("heartbeat") is None, 10.0)
    store.client.timeout_s = 2.0
    stop(process)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="no longer answers"):
        store.get("heartbeat")
    assert 1.0 < time.monotonic() - began < 8.0


@pytest.mark.dist
def test_another_server_at_the_same_address_is_not_the_same_store() -> None:
    server = serve_store("127.0.0.1")
    store = connect(f"127.0.0.1:{server.port}")
    store.set("key", "1")
    server.close()
    other = serve_store("127.0.0.1", server.port)
    with pytest.raises(PeerLost, match="another server"):
        store.get("key")
    other.close()


@pytest.mark.dist
def test_a_lost_server_costs_one_time_out_for_all_calls_threads_and_clones(start_server: Any) -> None:
    process, address = start_server()
    store = connect(address)
    store.client.timeout_s = 3.0
    other = store.clone().under("job/")
    other.client.timeout_s = 60.0
    other.set("key", "1")
    waiting = threading.Thread(target=lambda: errors.append(raised(lambda: other.get("key"))))
    errors: list[BaseException | None] = []
    stop(process)
    waiting.start()
    assert isinstance(raised(lambda: store.get("key")), PeerLost)
    assert store.lost
    assert other.lost
    began = time.monotonic()
    waiting.join(20)
    assert [type(error) for error in errors] == [PeerLost], "a call under way ends, too"
    for each in (store, other, store.clone()):
        assert "no longer answers" in str(raised(lambda each=each: each.add("left", 1)))
    assert time.monotonic() - began < 2.0
    assert not connect_store_lost(process, address)


def connect_store_lost(process: Any, address: str) -> bool:
    """Return whether a new client of the server, which runs again, finds it lost."""
    process.send_signal(signal.SIGCONT)
    fresh = connect(address)
    fresh.set("key", "2")
    return fresh.lost


def raised(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


SUSPENDED_CLIENT = """
import sys, time
from roundelay.fleet.store import JobStore, connect_store
from roundelay.fleet.store_client import parse_address
store = JobStore(connect_store(*parse_address(sys.argv[1]), 10.0))
store.client.timeout_s = 1.0
store.set("ready", "1")
for number in range(12):
    store.pause(0.2, "never")
    store.set("number", str(number))
print("lost" if store.lost else "alive")
"""


@pytest.mark.dist
def test_a_client_that_was_suspended_does_not_take_the_server_for_lost(servers: dict[str, str]) -> None:
    store = connect(servers["tcp"])
    client = subprocess.Popen([sys.executable, "-c", SUSPENDED_CLIENT, servers["tcp"]], stdout=subprocess.PIPE, text=True)
    try:
        assert store.wait(60.0, "ready", "number")
        client.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        client.send_signal(signal.SIGCONT)
        assert client.communicate(timeout=60)[0].strip() == "alive"
        assert store.get("number") == "11"
    finally:
        client.kill()


def test_time_in_which_the_client_was_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause between two attempts takes an hour, and the server answers only the fourth attempt."""
    server = serve_store("127.0.0.1")
    store = connect(f"127.0.0.1:{server.port}")
    store.set("key", "1")
    store.close()
    attempts, late = [0], [0.0]
    opened, slept, clock = store_client._Connection.open, time.sleep, time.monotonic

    def refuse(self: Any, timeout_s: float) -> None:
        attempts[0] += 1
        if attempts[0] < 4:
            raise ConnectionResetError("reset")
        assert timeout_s > 1.0, "a full attempt after the process has resumed"
        opened(self, timeout_s)

    def suspend(seconds: float) -> None:
        slept(min(seconds, 0.05))
        late[0] += 3600.0

    monkeypatch.setattr(store_client._Connection, "open", refuse)
    monkeypatch.setattr(store_client.time, "sleep", suspend)
    monkeypatch.setattr(store_client.time, "monotonic", lambda: clock() + late[0])
    assert store.get("key") == "1"
    monkeypatch.undo()
    store.close()
    server.close()


def test_a_silent_server_has_the_whole_time_and_one_that_closes_the_connection_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended launcher is silent: it has UNIX_TIMEOUT_S. One attempt takes at most half of that."""
    clock, late = time.monotonic, [0.0]

    def attempt(error: type[OSError]) -> Any:
        def fail(self: Any, timeout_s: float) -> None:
            self._due = store_client.time.monotonic() + timeout_s
            late[0] += timeout_s if error is TimeoutError else 0.0
            raise error

        return fail

    monkeypatch.setattr(store_client.time, "sleep", lambda seconds: late.__setitem__(0, late[0] + seconds))
    monkeypatch.setattr(store_client.time, "monotonic", lambda: clock() + late[0])
    for error, least_s, most_s in ((TimeoutError, 55.0, 61.0), (ConnectionResetError, 7.0, 9.0)):
        client = store_client.StoreClient("unix:/nowhere")
        monkeypatch.setattr(store_client._Connection, "open", attempt(error))
        began = late[0]
        assert isinstance(raised(lambda client=client: client.call("get", "key")), PeerLost)
        assert least_s < late[0] - began < most_s
