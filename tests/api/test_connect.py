"""Sessions under a launcher: the settings that all ranks compare."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.api import connect
from roundelay.core.settings import common_settings
from roundelay.engine.config import EngineConfig


def test_a_session_compares_all_settings_of_the_engine_but_local_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(connect, "under_launcher", lambda: True)
    monkeypatch.setattr(connect, "context_from_env", lambda **options: calls.append(options))
    options = EngineConfig(strategy="sync", schedule="cosine", warmup_epochs=2.0, simulate_nodes=2)
    connect.connect(options, "cpu")
    assert calls[0]["digest"] == common_settings(options)
    assert {"schedule", "warmup_epochs", "simulate_nodes", "timeout_s"} <= set(calls[0]["digest"])
