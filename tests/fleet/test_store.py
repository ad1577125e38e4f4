"""The job's store: one contract for threads and processes, and a server that listens on one address only."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.core.contracts import Store
from roundelay.errors import PeerLost, UsageError
from roundelay.fleet.store import JobStore, LocalStore, connect_store, serve_store

LISTENING = "0A"


def listening_addresses(port: int) -> set[str]:
    """Return the addresses on which a port of this machine is open, read from the kernel."""
    addresses = set()
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(table).read_text().splitlines()[1:] if os.path.exists(table) else []:
            local, state = line.split()[1], line.split()[3]
            address, _, number = local.partition(":")
            if int(number, 16) == port and state == LISTENING:
                raw = bytes.fromhex(address)
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                addresses.add(socket.inet_ntop(family, b"".join(words)))
    return addresses


def test_the_store_listens_on_its_address_only() -> None:
    server = serve_store("127.0.0.1")
    assert listening_addresses(server.port) == {"127.0.0.1"}
    other = serve_store("127.0.0.2")
    assert listening_addresses(other.port) == {"127.0.0.2"}


def test_the_kernel_tables_show_an_open_port() -> None:
    with socket.create_server(("", 0)) as everywhere:
        assert listening_addresses(everywhere.getsockname()[1]) == {"0.0.0.0"}


def test_a_port_in_use_and_a_foreign_address_are_usage_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used, pytest.raises(UsageError, match="cannot listen"):
        serve_store("127.0.0.1", used.getsockname()[1])
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):  # an address reserved for documentation
        serve_store("192.0.2.1")


def test_a_store_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(PeerLost, match=rf"127\.0\.0\.1:{port} does not answer"):
        connect_store("127.0.0.1", port, 1.0)


@pytest.fixture(scope="module", params=["threads", "processes"])
def stores(request: pytest.FixtureRequest):
    """Return a factory of empty stores."""
    if request.param == "threads":
        yield LocalStore
        return
    server = serve_store("127.0.0.1")
    numbers = iter(range(10**6))
    client = connect_store("127.0.0.1", server.port, 10.0)
    yield lambda: JobStore(client, f"test/{next(numbers)}/")


keys = st.sampled_from(["a", "b", "c/d"])
texts = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), keys, texts),
        st.tuples(st.just("get"), keys),
        st.tuples(st.just("claim"), keys, texts),
        st.tuples(st.just("add"), st.just("counter"), st.integers(-5, 5)),
        st.tuples(st.just("get"), st.just("counter")),
    ),
    max_size=15,
)


@given(operations)
def test_a_store_behaves_like_a_dictionary(stores, steps: list[tuple]) -> None:
    store: Store = stores()
    model: dict[str, str] = {}
    for name, key, *value in steps:
        result = getattr(store, name)(key, *value)
        if name == "set":
            model[key] = value[0]
        elif name == "get":
            assert result == model.get(key)
        elif name == "claim":
            assert result == model.setdefault(key, value[0])
        else:
            model[key] = str(int(model.get(key, "0")) + value[0])
            assert result == int(model[key])


def test_one_claim_wins_and_no_addition_is_lost(stores) -> None:
    store, claims = stores(), []

    def learner(rank: int) -> None:
        for _ in range(50):
            store.add("count", 1)
        claims.append(store.claim("first", str(rank)))

    threads = [threading.Thread(target=learner, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert store.get("count") == "200"
    assert len(set(claims)) == 1
    assert claims[0] == store.get("first")


def test_jobs_on_one_server_do_not_see_each_other() -> None:
    server = serve_store("127.0.0.1")
    client = connect_store("127.0.0.1", server.port, 10.0)
    one, two = JobStore(client, "one/"), JobStore(client, "two/")
    one.set("key", "1")
    assert two.get("key") is None
    assert one.under("deeper/").get("key") is None
    one.under("deeper/").set("key", "2")
    assert one.get("deeper/key") == "2"
