"""`roundelay.fit`: train a task with the built-in training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundelay.api.connect import connect
from roundelay.core.contracts import Task
from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train


def fit(task: Task, *, strategy: str = "adpsgd", run: str | Path | None = None, **settings: Any) -> dict[str, Any]:
    """Train a task as one rank of the job and return the run's metrics. All ranks must call it with equal settings.
    A process may call it, or open a `Session`, several times; all ranks must do so in the same order.

    `run` is the run directory, for checkpoints, events and the model. `settings` are those of `roundelay train`: epochs, batch,
    optimizer, lr, momentum, resume, topology, backend, and so on.
    """
    config = TrainConfig(strategy=strategy, run=str(run or ""), **settings)
    with connect(config, config.device) as context:
        return train(task, context, config)
