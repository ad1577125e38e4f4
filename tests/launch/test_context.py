"""The context of a process: launcher variables, devices, machines."""

from __future__ import annotations

import pytest
import torch

from roundelay.comm.threads import ThreadGroup
from roundelay.errors import UsageError
from roundelay.launch.context import (
    choose_device,
    context_from_env,
    fake_machines,
    local_address_towards,
    single_process_context,
)


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
