"""What the engine can be told. The command line's settings and `roundelay.join` both end here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's settings; what each does is said in roundelay.config.TrainConfig."""

    strategy: str = "adpsgd"
    strategy_options: dict[str, Any] = field(default_factory=dict)
    topology: str = "ring"
    backend: str = "auto"
    seed: int = 0
    max_grad_norm: float = 0.0
    schedule: str = "constant"
    warmup_epochs: float = 0.0
    anneal_after_epochs: float = 10.0
    deterministic_reduce: bool = False
    simulate_nodes: int = 0
    steps_per_exchange: float = 1.0
    straggler: str = ""
    timeout_s: float = 60.0
    bind_address: str = "127.0.0.1"
    device: str = "auto"
    log_every_s: float = 1.0
