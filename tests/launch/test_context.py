"""All ranks agree on what they are about to do, or stop with a sentence that says who differs in what."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import roundelay
from roundelay.comm.threads import ThreadGroup
from roundelay.errors import PeerLost, RoundelayError, UsageError
from roundelay.fleet.store import LocalStore
from roundelay.launch.context import (
    choose_device,
    context_from_env,
    exchange_rank_info,
    fake_machines,
    local_address_towards,
    single_process_context,
)


def membership(*cards: dict[str, Any], sizes: tuple[int, ...] | None = None, timeout_s: float = 5.0) -> list[Any]:
    """Everybody calls the membership at once; returns what each heard."""
    store, heard = LocalStore(), [None] * len(cards)

    def learner(rank: int) -> None:
        size = sizes[rank] if sizes else len(cards)
        try:
            heard[rank] = exchange_rank_info(store, rank, size, f"machine-{rank % 2}", timeout_s, cards[rank])
        except RoundelayError as error:
            heard[rank] = error

    threads = [threading.Thread(target=learner, args=(rank,)) for rank in range(len(cards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return heard


def test_ranks_that_agree_learn_of_each_others_machines() -> None:
    heard = membership({"lr": 0.1}, {"lr": 0.1}, {"lr": 0.1})
    assert heard[0] == heard[1] == heard[2]
    assert [card["machine"] for card in heard[0]] == ["machine-0", "machine-1", "machine-0"]


def test_world_sizes_that_differ_are_named_with_both_ranks() -> None:
    heard = membership({}, {}, sizes=(2, 3))
    assert all(isinstance(error, UsageError) for error in heard)
    assert "rank 0 was told of 2 learners, rank 1 of 3" in str(heard[0])
    assert "rank 1 was told of 3 learners, rank 0 of 2" in str(heard[1])


def test_settings_that_differ_are_named_with_both_values() -> None:
    heard = membership({"lr": 0.1, "strategy": "sync"}, {"lr": 0.2, "strategy": "sync"})
    assert "rank 0 has lr 0.1, rank 1 has 0.2" in str(heard[0])
    assert "rank 1 has lr 0.2, rank 0 has 0.1" in str(heard[1])
    assert all(isinstance(error, UsageError) and error.where == "settings, lr" for error in heard)


def test_a_setting_that_only_one_rank_knows_is_a_difference() -> None:
    heard = membership({"lr": 0.1}, {})
    assert all(isinstance(error, UsageError) for error in heard)


def test_versions_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore()
    with monkeypatch.context() as patch:
        patch.setattr(roundelay, "__version__", "0.0.9")
        with pytest.raises(PeerLost):
            exchange_rank_info(store, 0, 2, "here", 0.05, {})
    with pytest.raises(UsageError, match=rf"rank 1 has roundelay {roundelay.__version__}, rank 0 has 0\.0\.9") as caught:
        exchange_rank_info(store, 1, 2, "here", 5.0, {})
    assert "install the same versions" in str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(PeerLost, match="rank 1, 2 did not answer the membership"):
        exchange_rank_info(LocalStore(), 0, 3, "here", 0.05, {})


def test_two_processes_cannot_be_one_rank() -> None:
    store = LocalStore()
    with pytest.raises(PeerLost):
        exchange_rank_info(store, 0, 2, "here", 0.02, {})
    with pytest.raises(UsageError, match="two processes say they are rank 0"):
        exchange_rank_info(store, 0, 2, "here", 0.02, {})


@pytest.mark.parametrize(("key", "value"), [("RANK", "first"), ("WORLD_SIZE", ""), ("MASTER_PORT", "http")])
def test_bad_variables_of_the_launcher_are_named(key: str, value: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0", "MASTER_ADDR": "127.0.0.1", key: value}
    with pytest.raises(UsageError, match=f"{key} is '{value}', not a number"):
        context_from_env(
            backend="auto", bind_address="127.0.0.1", timeout_s=5, device="cpu", simulate_nodes=0, digest={}, env=env
        )


def test_one_machine_can_pretend_to_be_several() -> None:
    assert fake_machines(["a"] * 5, 2) == ["a#0", "a#0", "a#0", "a#1", "a#1"]
    assert fake_machines(["a"] * 3, 0) == ["a"] * 3
    with pytest.raises(UsageError, match="cannot be split"):
        fake_machines(["a"], 2)
    context = single_process_context("cpu", ThreadGroup(5), 3, simulate_nodes=2)
    assert context.machine_of(3) == [3, 4]
    assert context.node_leaders == [0, 3]


def test_devices_and_addresses() -> None:
    assert choose_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(UsageError, match="there is no device"):
        choose_device("abacus", 0)
    assert local_address_towards("127.0.0.1", 80) == "127.0.0.1"
