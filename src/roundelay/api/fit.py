"""`roundelay.fit`: train a task with the built-in training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundelay.api.connect import connect
from roundelay.core.contracts import Task
from roundelay.engine.config import EngineConfig
from roundelay.engine.trainer import RunConfig, train


def fit(task: Task, *, strategy: str = "adpsgd", run: str | Path | None = None, **settings: Any) -> dict[str, Any]:
    """Train a task as one rank of the job and return the run's metrics. All ranks must call it with equal settings.

    `run` is the run directory, for checkpoints, events and the model. `settings` are those of `roundelay train`: epochs, batch,
    optimizer, lr, momentum, resume, topology, backend, and so on.
    """
    engine = {k: v for k, v in settings.items() if k in EngineConfig.__dataclass_fields__}
    loop = {k: v for k, v in settings.items() if k not in engine}
    options = EngineConfig(strategy=strategy, **engine)
    return train(task, connect(options, options.device), options, RunConfig(run=Path(run) if run else None, **loop))
