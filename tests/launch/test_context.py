"""All ranks agree on versions and settings, or stop with an error that names the difference."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import roundelay
from roundelay.comm.threads import ThreadGroup
from roundelay.errors import PeerLost, RoundelayError, UsageError
from roundelay.fleet.store import LocalStore
from roundelay.launch import context as launch_context
from roundelay.launch.context import (
    choose_device,
    context_from_env,
    exchange_rank_info,
    fake_machines,
    local_address_towards,
    single_process_context,
)


def exchange(*settings: dict[str, Any], sizes: tuple[int, ...] | None = None, timeout_s: float = 5.0) -> list[Any]:
    """Let all ranks exchange their info at once; return the result or the error of each."""
    store, results = LocalStore(), [None] * len(settings)

    def learner(rank: int) -> None:
        size = sizes[rank] if sizes else len(settings)
        try:
            results[rank] = exchange_rank_info(store, rank, size, f"machine-{rank % 2}", timeout_s, settings[rank])
        except RoundelayError as error:
            results[rank] = error

    threads = [threading.Thread(target=learner, args=(rank,)) for rank in range(len(settings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_ranks_that_agree_get_the_machines_of_all_ranks() -> None:
    results = exchange({"lr": 0.1}, {"lr": 0.1}, {"lr": 0.1})
    assert results[0] == results[1] == results[2]
    assert [info["machine"] for info in results[0]] == ["machine-0", "machine-1", "machine-0"]


def test_world_sizes_that_differ_are_named_with_both_ranks() -> None:
    results = exchange({}, {}, sizes=(2, 3))
    assert all(isinstance(error, UsageError) for error in results)
    assert "WORLD_SIZE must be equal on all ranks (rank 0: 2, rank 1: 3)" in str(results[0])
    assert "WORLD_SIZE must be equal on all ranks (rank 1: 3, rank 0: 2)" in str(results[1])


def test_settings_that_differ_are_named_with_both_values() -> None:
    results = exchange({"lr": 0.1, "strategy": "sync"}, {"lr": 0.2, "strategy": "sync"})
    assert "lr must be equal on all ranks (rank 0: 0.1, rank 1: 0.2)" in str(results[0])
    assert "lr must be equal on all ranks (rank 1: 0.2, rank 0: 0.1)" in str(results[1])
    assert all(isinstance(error, UsageError) and error.where == "settings, lr" for error in results)


def test_a_setting_of_only_one_rank_is_a_difference() -> None:
    results = exchange({"lr": 0.1}, {})
    assert all(isinstance(error, UsageError) for error in results)


def test_versions_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore()
    with monkeypatch.context() as patch:
        patch.setattr(launch_context, "__version__", "0.0.9")
        with pytest.raises(PeerLost):
            exchange_rank_info(store, 0, 2, "here", 0.05, {})
    with pytest.raises(
        UsageError, match=rf"roundelay must be equal on all ranks \(rank 1: {roundelay.__version__}, rank 0: 0\.0\.9\)"
    ) as caught:
        exchange_rank_info(store, 1, 2, "here", 5.0, {})
    assert "install the same versions" in str(caught.value)


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(PeerLost, match="rank 1, 2 did not connect within"):
        exchange_rank_info(LocalStore(), 0, 3, "here", 0.05, {})


def test_two_processes_with_one_rank_are_refused() -> None:
    store = LocalStore()
    with pytest.raises(PeerLost):
        exchange_rank_info(store, 0, 2, "here", 0.02, {})
    with pytest.raises(UsageError, match="two processes have rank 0"):
        exchange_rank_info(store, 0, 2, "here", 0.02, {})


@pytest.mark.parametrize(("key", "value"), [("RANK", "first"), ("WORLD_SIZE", ""), ("MASTER_PORT", "http")])
def test_invalid_launcher_variables_are_named(key: str, value: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0", "MASTER_ADDR": "127.0.0.1", key: value}
    with pytest.raises(UsageError, match=f"{key} must be an integer .got '{value}'"):
        context_from_env(
            backend="auto", bind_address="127.0.0.1", timeout_s=5, device="cpu", simulate_nodes=0, digest={}, env=env
        )


def test_one_machine_can_simulate_several_nodes() -> None:
    assert fake_machines(["a"] * 5, 2) == ["a#0", "a#0", "a#0", "a#1", "a#1"]
    assert fake_machines(["a"] * 3, 0) == ["a"] * 3
    with pytest.raises(UsageError, match="simulate_nodes must be at most"):
        fake_machines(["a"], 2)
    context = single_process_context("cpu", ThreadGroup(5), 3, simulate_nodes=2)
    assert context.machine_of(3) == [3, 4]
    assert context.node_leaders == [0, 3]


def test_devices_and_addresses() -> None:
    assert choose_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(UsageError, match="device must be"):
        choose_device("abacus", 0)
    assert local_address_towards("127.0.0.1", 80) == "127.0.0.1"
