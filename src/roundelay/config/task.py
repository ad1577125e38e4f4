"""Build the task that settings name, and select the settings that determine a run's weights."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from roundelay.config.loader import ResolvedConfig, check_partial
from roundelay.engine.config import TrainConfig
from roundelay.errors import PARSE_ERRORS, RoundelayError, UsageError, did_you_mean

NON_NUMERIC_KEYS = frozenset(
    {
        "run", "resume", "keep_checkpoints", "best_metric", "best_goal",
        "eval_at_checkpoint", "checkpoint_every_epochs", "straggler", "timeout_s",
        "log_every_s", "bind_address", "store_port", "progress", "record_order", "backend", "device", "learners",
    }
)  # fmt: skip
"""Settings that do not change the weights, given the order of updates."""


def computation_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that determine the weights, as JSON values. Runs that differ in one of them are different runs."""
    plain = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in NON_NUMERIC_KEYS}
    return dict(json.loads(json.dumps(plain)))


def extend_sys_path(resolved: ResolvedConfig[Any]) -> None:
    """Make modules in the file's folder, then in the current folder, importable."""
    for folder in (str(Path.cwd()), str(resolved.folder)):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def build_task(resolved: ResolvedConfig[TrainConfig]) -> Any:
    """Import the task's class and construct it with `task_options`.

    A task with a field `seed` gets the run's seed unless `task_options` sets one.

    Raises:
        UsageError: There is no such class, or it does not accept the options.
    """
    name, options = resolved.settings.task, resolved.settings.task_options
    if not name:
        raise UsageError("task must be set", where="task", hint='set task = "importable.module:Class" in the file')
    module, colon, attribute = name.partition(":")
    extend_sys_path(resolved)
    try:
        cls = getattr(importlib.import_module(module), attribute if colon else "Task")
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"task '{name}' cannot be loaded: {error}", where="task", hint="give importable.module:Class"
        ) from error
    names = {f.name for f in fields(cls) if f.init} if is_dataclass(cls) else None
    for key in options:
        if names is not None and key not in names:
            raise UsageError(
                f"unknown key '{key}' in [task_options] of task '{name}'",
                where=resolved.origin(f"task_options.{key}"),
                hint=did_you_mean(key, names),
            )
    if names is not None and "seed" in names:
        options = {"seed": resolved.settings.seed, **options}
    if names is not None:
        options = check_partial(cls, options, resolved.origin("task_options"), "task_options")
    try:
        return cls(**options)
    except RoundelayError:
        raise
    except (*PARSE_ERRORS, RuntimeError) as error:
        raise UsageError(
            f"task '{name}' does not accept its [task_options]: {error}", where="task_options", hint="see the task's class"
        ) from error
