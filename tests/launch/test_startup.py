"""Start-up checks: all ranks agree on versions, settings and addresses and reach each other, or all stop with one error."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

import roundelay
from roundelay.core.settings import common_settings
from roundelay.engine.config import TrainConfig
from roundelay.errors import PeerLost, RoundelayError, UsageError
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore
from roundelay.launch import startup
from roundelay.launch.startup import agree_to_start, peers_to_test


def agree(
    *settings: dict[str, Any],
    sizes: Sequence[int] | None = None,
    addresses: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    store: LocalStore | None = None,
    timeout_s: float = 20.0,
    **options: Any,
) -> list[Any]:
    """Let all ranks agree at once; return the result or the error of each."""
    store, results = store or LocalStore(), [None] * len(settings)

    def learner(rank: int) -> None:
        size = sizes[rank] if sizes else len(settings)
        address = addresses[rank] if addresses else "127.0.0.1"
        try:
            results[rank] = agree_to_start(
                store, rank, size, f"machine-{rank % 2}", timeout_s, settings[rank], bind_address=address, **options
            )
        except RoundelayError as error:
            results[rank] = error

    threads = [threading.Thread(target=learner, args=(rank,), daemon=True) for rank in ranks or range(len(settings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def assert_same(results: Sequence[Any], kind: type[RoundelayError], text: str) -> None:
    assert [type(error) for error in results] == [kind] * len(results)
    assert len({str(error) for error in results}) == 1
    assert text in str(results[0])


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is on a machine of its own, as it tells the other ranks."""
    original = startup.describe_rank
    names = iter(range(1000))
    monkeypatch.setattr(startup, "describe_rank", lambda *a: original(*a) | {"network": f"network-{next(names)}"})


def test_ranks_that_agree_get_the_machines_of_all_ranks() -> None:
    results = agree({"lr": 0.1}, {"lr": 0.1}, {"lr": 0.1})
    assert results[0] == results[1] == results[2]
    assert [info["machine"] for info in results[0]] == ["machine-0", "machine-1", "machine-0"]


def test_world_sizes_that_differ_are_named_with_both_ranks() -> None:
    assert_same(agree({}, {}, sizes=(2, 3)), UsageError, "WORLD_SIZE must be equal on all ranks (rank 0: 2, rank 1: 3)")


def test_settings_that_differ_are_named_with_both_values() -> None:
    results = agree({"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2})
    assert_same(results, UsageError, "lr must be equal on all ranks (rank 0: 0.1, rank 2: 0.2)")
    assert results[0].where == "settings, lr"


def test_a_setting_of_only_one_rank_is_a_difference() -> None:
    assert_same(agree({"lr": 0.1}, {}), UsageError, "lr must be equal")


LOCAL = {"bind_address", "device", "learners", "loader_kind", "num_workers", "progress", "store_port"}
"""The settings that may differ between ranks."""


def test_few_settings_are_local() -> None:
    assert {field.name for field in fields(TrainConfig)} - set(common_settings(TrainConfig())) == LOCAL


@pytest.mark.parametrize("key", sorted({field.name for field in fields(TrainConfig)} - LOCAL))
def test_every_setting_that_is_not_local_is_compared(key: str) -> None:
    value = getattr(TrainConfig(), key)
    different = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else type(value)()
    different = {"a": 1} if value == {} else "other" if value == "" else different
    other = common_settings(replace(TrainConfig(), **{key: different}))
    same = common_settings(TrainConfig())
    rows = f"rank 0: {json.dumps(value)}, rank 2: {json.dumps(different)}"
    assert_same(agree(same, same, other, test_links=False), UsageError, f"{key} must be equal on all ranks ({rows})")


def test_local_settings_may_differ() -> None:
    other = common_settings(TrainConfig(device="cpu", num_workers=3, bind_address="auto", progress="none", learners=7))
    results = agree(common_settings(TrainConfig()), other, test_links=False)
    assert all(isinstance(result, list) for result in results)


def test_different_releases_refuse_each_other_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    versions, lock = iter(["1.0", "1.0", "1.1"]), threading.Lock()

    def description(*args: Any) -> dict[str, Any]:
        with lock:
            return original(*args) | {"versions": {"roundelay": next(versions)}}

    original = startup.describe_rank
    monkeypatch.setattr(startup, "describe_rank", description)
    results = agree({}, {}, {}, test_links=False)
    assert_same(results, UsageError, "roundelay must be equal on all ranks (rank 0: 1.")
    assert results[0].where == "versions, roundelay"


def test_versions_that_differ_are_named() -> None:
    store = LocalStore()
    other = startup.describe_rank(2, "there", {}, "127.0.0.1")
    other["versions"]["roundelay"] = "0.0.9"
    store.set("rank-info/0", json.dumps(other))
    store.set("vote/start/0", "ok")
    error = agree({}, {}, store=store, ranks=[1])[1]
    assert f"roundelay must be equal on all ranks (rank 0: 0.0.9, rank 1: {roundelay.__version__})" in str(error)
    assert "install the same versions" in str(error)


def test_a_missing_rank_is_named_and_finds_the_decision_later() -> None:
    store = LocalStore()
    first = agree({}, {}, {}, store=store, ranks=[0], timeout_s=0.05)[0]
    assert isinstance(first, PeerLost)
    assert "rank 1, 2 did not connect within" in str(first)
    second = agree({}, {}, {}, store=store, ranks=[1])[1]
    assert str(second) == str(first), "a rank that comes too late does not wait"


def test_a_rank_killed_during_start_up_ends_the_wait_at_once() -> None:
    store, began = LocalStore(), time.monotonic()
    timer = threading.Timer(0.1, StoreMembership(store).report, (2, "killed by signal SIGKILL"))
    timer.start()
    results = agree({}, {}, {}, store=store, ranks=[0, 1], timeout_s=60.0)[:2]
    timer.join()
    assert_same(results, PeerLost, "rank 2 (killed by signal SIGKILL) was lost")
    assert time.monotonic() - began < 10


def test_two_processes_with_one_rank_stop_all() -> None:
    store = LocalStore()
    store.add("incarnation/0", 1)
    assert_same(agree({}, {}, store=store), UsageError, "two processes have rank 0")


def test_a_bind_address_of_another_machine_is_named_on_all_ranks() -> None:
    results = agree({}, {}, addresses=("127.0.0.1", "192.0.2.1"))  # RFC 5737
    assert_same(results, UsageError, "bind_address must be an address of this machine (rank 1 cannot listen on 192.0.2.1")
    assert "bind_address" in results[0].where


def test_loopback_across_machines_names_the_setting(two_networks: None) -> None:
    results = agree({}, {})
    assert_same(results, UsageError, "bind_address must be reachable from 2 machines (got 127.0.0.1 on rank 0, 1)")
    assert results[0].where == "bind_address"


def test_pairs_on_different_machines_are_tested(two_networks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "is_loopback", lambda address: False)
    assert isinstance(agree({}, {}, {})[2], list)

    def impostor(self: Any, connection: socket.socket) -> None:
        with connection:
            connection.recv(100)
            connection.sendall(b"220 mail.example.org ESMTP")

    monkeypatch.setattr(startup.ProbeServer, "_answer", impostor)
    results = agree({}, {}, {})
    assert_same(results, PeerLost, "another process answers there")


def test_an_unreachable_pair_is_named_in_both_directions_or_reported(
    two_networks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "is_loopback", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    original = startup.ProbeServer.__init__

    def elsewhere(self: Any, address: str, rank: int) -> None:
        original(self, address, rank)
        if rank == 1:
            self.address = [address, port]

    monkeypatch.setattr(startup.ProbeServer, "__init__", elsewhere)
    results = agree({}, {}, {})
    assert_same(results, PeerLost, f"rank 0 cannot connect to rank 1 at 127.0.0.1:{port}: Connection refused")
    assert "rank 2 cannot connect to rank 1" in str(results[1])
    assert "bind_address=auto" in results[0].hint
    entries = agree({}, {}, {}, report_links=True)[2]
    assert [sorted(entry["unreachable"]) for entry in entries] == [[1], [], [1]]


def test_many_ranks_test_neighbors_and_first_ranks_only() -> None:
    networks = [f"machine-{rank // 16}" for rank in range(128)]
    assert peers_to_test(networks[:64], 5) == list(range(16, 64))
    assert peers_to_test(networks, 5) == []
    assert peers_to_test(networks, 15) == [16]
    assert peers_to_test(networks, 0) == sorted([127, *range(16, 128, 16)])
    tested = {(min(r, p), max(r, p)) for r in range(128) for p in peers_to_test(networks, r)}
    assert len(tested) <= 128
