"""The Python interface: `join` for people with a loop of their own, `fit` for the loop inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundelay.core.events import EventLog
from roundelay.core.task import Task
from roundelay.core.traits import Strategy
from roundelay.train.learner import Learner
from roundelay.train.loop import Plan, train
from roundelay.train.options import Options
from roundelay.train.place import Place, alone, check_wire, from_environment, under_launcher


def join(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str | Strategy = "adpsgd",
    *,
    run: str | Path | None = None,
    **options: Any,
) -> Learner:
    """This process as one learner of the job that the variables of torchrun, mpirun or srun describe; alone without them.

    `options` are those of the engine: topology, wire, seed, clip, schedule, exact, slow, timeout_s, host, … Use the result as
    a context manager: all learners start from rank 0's weights; leaving gives the module the average of the living ones.
    """
    made = Options(strategy=strategy if isinstance(strategy, str) else type(strategy).__name__, **options)
    device = next(module.parameters()).device
    place = _place(made, str(device))
    events = None
    if run is not None:
        Path(run).mkdir(parents=True, exist_ok=True)
        events = EventLog(Path(run) / "events.jsonl", place.rank)
    return Learner(place, module, optimizer, made, events, None if isinstance(strategy, str) else strategy)


def fit(task: Task, *, strategy: str = "adpsgd", run: str | Path | None = None, **settings: Any) -> dict[str, Any]:
    """Trains a task with the loop inside; returns the run's figures. `settings`: the engine's options and the loop's plan
    (epochs, batch, optimizer, lr, momentum, resume, …)."""
    engine = {k: v for k, v in settings.items() if k in Options.__dataclass_fields__}
    plan = {k: v for k, v in settings.items() if k not in engine}
    options = Options(strategy=strategy, **engine)
    return train(task, _place(options, options.device), options, Plan(run=Path(run) if run else None, **plan))


def _place(options: Options, device: str) -> Place:
    check_wire(options.wire)
    if not under_launcher():
        return alone(device)
    return from_environment(
        wire=options.wire, host=options.host, timeout_s=options.timeout_s, device=device, machines=options.machines,
        digest={"strategy": options.strategy, "topology": options.topology, "seed": options.seed},
    )  # fmt: skip
