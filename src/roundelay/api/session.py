"""The Python interface: `join` for people with a loop of their own, `fit` for the loop inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundelay.core.contracts import Task
from roundelay.engine.config import EngineConfig, TrainConfig
from roundelay.engine.learner import Learner
from roundelay.engine.trainer import train
from roundelay.launch.context import (
    DistributedContext,
    check_backend,
    context_from_env,
    single_process_context,
    under_launcher,
)
from roundelay.metrics.events import EventLog
from roundelay.strategies.base import Strategy


def join(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str | Strategy = "adpsgd",
    *,
    run: str | Path | None = None,
    **options: Any,
) -> Learner:
    """This process as one learner of the job that the variables of torchrun, mpirun or srun describe; alone without them.

    `options` are those of the engine: topology, backend, seed, clip, schedule, deterministic_reduce, slow, timeout_s, host, … Use the result as
    a context manager: all learners start from rank 0's weights; leaving gives the module the average of the living ones.
    """
    made = EngineConfig(strategy=strategy if isinstance(strategy, str) else type(strategy).__name__, **options)
    device = next(module.parameters()).device
    context = _place(made, str(device))
    events = None
    if run is not None:
        Path(run).mkdir(parents=True, exist_ok=True)
        events = EventLog(Path(run) / "events.jsonl", context.rank)
    return Learner(context, module, optimizer, made, events, None if isinstance(strategy, str) else strategy)


def fit(task: Task, *, strategy: str = "adpsgd", run: str | Path | None = None, **settings: Any) -> dict[str, Any]:
    """Trains a task with the loop inside; returns the run's metrics. `settings`: the engine's options and the loop's plan
    (epochs, batch, optimizer, lr, momentum, resume, …)."""
    config = TrainConfig(strategy=strategy, run=str(run or ""), **settings)
    return train(task, _place(config, config.device), config)


def _place(options: EngineConfig, device: str) -> DistributedContext:
    check_backend(options.backend)
    if not under_launcher():
        return single_process_context(device)
    return context_from_env(
        backend=options.backend, bind_address=options.bind_address, timeout_s=options.timeout_s, device=device, simulate_nodes=options.simulate_nodes,
        digest={"strategy": options.strategy, "topology": options.topology, "seed": options.seed},
    )  # fmt: skip
