"""Settings: typed, from a TOML file and `key=value`; what is unknown or impossible is an error that says where it stands.

Later wins: defaults, then the file, then the command line. There is no code in a configuration; a task or a strategy of one's
own is named by its import path.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from roundelay.engine.config import EngineConfig
from roundelay.errors import UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class TrainConfig(EngineConfig):
    """Everything a run can be told. The comment behind a field says when to change it."""

    task: str = ""  # what is trained: importable.module:Class; the file's own folder and the current one are searched
    task_options: dict[str, Any] = field(default_factory=dict)  # fields of the task's class
    strategy: str = "adpsgd"  # roundelay list strategies; nested: hierarchical(kstep); your own: my.module:Mine
    strategy_options: dict[str, Any] = field(default_factory=dict)  # fields of the strategy's class, such as K
    topology: str = "ring"  # who meets whom: roundelay list topologies; random_ring from 8 learners on
    backend: str = "auto"  # who carries the vectors: auto, shm, torch, mpi, threads
    learners: int = 1  # local processes to start; ignored under torchrun
    epochs: float = 1.0  # passes over the training samples, over all learners together
    batch: int | str = 64  # samples per learner and step; "hostA:128,hostB:32" for uneven machines; "auto" finds out
    seed: int = 0  # first weights, order of samples, random matchings
    device: str = "auto"  # auto, cpu, cuda
    optimizer: str = "sgd"  # sgd, adam, adamw, ngsgd (natural gradient: makes rare averaging work)
    lr: float = 0.1  # the rate of the global batch; means the same in every strategy
    momentum: float = 0.9  # of sgd and ngsgd
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0  # largest norm of a gradient; 0: no limit. Set it when the loss jumps
    schedule: str = "constant"  # constant, cosine, ibm (times 1/sqrt(2) per epoch after anneal_after_epochs)
    warmup_epochs: float = 0.0  # linear warm-up of the rate; lengthen it when large batches diverge early
    anneal_after_epochs: float = 10.0
    num_workers: int = 1  # background loaders per learner; 0: none, the gradient waits. More: for slow storage
    loader_kind: str = "thread"  # thread, or process: where the task's own Python makes the batches
    deterministic_reduce: bool = False  # sums in rank order: repeatable to the bit, slower
    simulate_nodes: int = 0  # pretend that this machine is so many (for testing hierarchies)
    steps_per_exchange: float = 1.0  # above 1: meet more rarely, when exchanges cost CPU that training needs
    run: str = ""  # the run's directory; default runs/<name>-<strategy>-<number>
    resume: str = "no"  # no, auto (newest whole checkpoint of the run), or a checkpoint's path
    checkpoint_every_epochs: float = 1.0  # checkpoint and evaluation
    keep_checkpoints: int = 3  # checkpoints kept
    eval_at_checkpoint: bool = True  # judge the average model at every checkpoint
    straggler: str = ""  # straggler injection: "1:2.0" makes rank 1 take twice its time
    timeout_s: float = 60.0  # how long a rendezvous may wait
    log_every_s: float = 1.0  # how often a learner writes its metrics
    bind_address: str = "127.0.0.1"  # the address that sockets bind; "auto": the one that reaches MASTER_ADDR
    store_port: int = 0  # of the job's store; 0: the system chooses
    progress: str = "auto"  # auto, rich, plain, none
    tensorboard: bool = True  # write the run's metrics for TensorBoard, too
    record_order: bool = False  # note the order of events down, so that roundelay replay can do an asynchronous run again


CHOICES = {
    "backend": ("auto", "shm", "torch", "mpi", "threads"),
    "schedule": ("constant", "cosine", "sqrt2_decay"),
    "optimizer": ("sgd", "adam", "adamw", "ngsgd"),
    "loader_kind": ("thread", "process"),
    "progress": ("auto", "rich", "plain", "none"),
}
MINIMUM: dict[str, float] = {
    "learners": 1, "epochs": 0, "seed": 0, "lr": 0, "momentum": 0, "weight_decay": 0, "max_grad_norm": 0, "warmup_epochs": 0,
    "anneal_after_epochs": 0, "simulate_nodes": 0, "steps_per_exchange": 0.01, "num_workers": 0, "checkpoint_every_epochs": 0.001, "keep_checkpoints": 1,
    "timeout_s": 1, "log_every_s": 0.01, "store_port": 0,
}  # fmt: skip
KINDS = {"int": int, "float": float, "bool": bool, "str": str}
TABLES = ("task_options", "strategy_options")


@dataclass(frozen=True)
class ResolvedConfig:
    """Settings and where each came from."""

    settings: TrainConfig
    origin: dict[str, str]
    folder: Path
    """Where the file lies: a task named in it is looked for there first."""


def load(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> ResolvedConfig:
    """Settings from a file (or none) and `key=value` pairs."""
    values: dict[str, Any] = {}
    origin = {f.name: "default" for f in fields(TrainConfig)}
    folder = Path.cwd()
    if path is not None:
        folder = Path(path).resolve().parent
        for key, value, line in _read(Path(path)):
            _set(values, key, value, f"{path}:{line}" if line else str(path))
            origin[key.split(".")[0]] = f"{Path(path).name}:{line}" if line else Path(path).name
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise UsageError(f"'{item}' is not key=value", where="command line", hint="write for example strategy=kstep lr=0.1")
        _set(values, key.strip(), _literal(text), "command line")
        origin[key.strip().split(".")[0]] = "command line"
    return ResolvedConfig(TrainConfig(**values), origin, folder)


def _read(path: Path) -> list[tuple[str, Any, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(f"cannot read {path}: {why}", where="FILE", hint="give the path of a TOML file") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not valid TOML: {error}", where=str(path), hint='values of text need quotes: key = "text"'
        ) from error
    lines = text.splitlines()

    def line_of(key: str) -> int:
        pattern = re.compile(rf"^\s*\[?{re.escape(key)}\b")
        return next((n for n, line in enumerate(lines, 1) if pattern.match(line)), 0)

    return [(key, value, line_of(key)) for key, value in tree.items()]


def _literal(text: str) -> Any:
    """A value as TOML would read it; anything else is text."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _set(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    known = {f.name: f for f in fields(TrainConfig)}
    table, dot, inner = key.partition(".")
    if dot and table in TABLES:
        values[table] = {**values.get(table, {}), inner: value}
        return
    if key not in known:
        raise UsageError(f"there is no setting '{key}'", where=where, hint=did_you_mean(key, known))
    if key in TABLES:
        if not isinstance(value, dict):
            raise UsageError(f"{key} must be a table", where=where, hint=f"write [{key}] in the file, or {key}.name=value")
        values[key] = {**values.get(key, {}), **value}
        return
    values[key] = _checked(key, value, str(known[key].type), where)


def check(values: Mapping[str, Any], where: str) -> None:
    """An error for what could not be a setting, in a table that stands elsewhere."""
    for key, value in values.items():
        _set({}, key, value, where)


def _checked(key: str, value: Any, kind: str, where: str) -> Any:
    wanted = [KINDS[k.strip()] for k in kind.split("|")]
    if float in wanted and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    fits = any(type(value) is k for k in wanted)
    if not fits and str in wanted and not isinstance(value, dict | list):
        value, fits = str(value).lower() if isinstance(value, bool) else str(value), True
    if not fits:
        raise UsageError(
            f"{key} is {value!r}, but must be {' or '.join(k.__name__ for k in wanted)}",
            where=where,
            hint=f"for example {key}={_example(key)}",
        )
    if key in CHOICES and value not in CHOICES[key]:
        raise UsageError(f"{key} cannot be '{value}'", where=where, hint=did_you_mean(str(value), CHOICES[key]))
    if key in MINIMUM and not MINIMUM[key] <= value < float("inf"):  # nan is refused too
        raise UsageError(f"{key} is {value}", where=where, hint=f"give a number of at least {MINIMUM[key]:g}")
    return value


def _example(key: str) -> str:
    default = getattr(TrainConfig(), key)
    return json.dumps(default)


def dumps(settings: TrainConfig) -> str:
    """TOML that loads back to the same settings."""
    plain = {f.name: getattr(settings, f.name) for f in fields(settings)}
    text = [f"{key} = {_toml(value)}" for key, value in plain.items() if key not in TABLES]
    for table in TABLES:
        if plain[table]:
            text += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in plain[table].items())]
    return "\n".join(text) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    # TOML's basic strings take JSON's escapes, but neither a bare DEL nor pairs of surrogates for rare characters
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def explain(resolved: ResolvedConfig) -> str:
    """Every setting, its value and where it came from."""
    rows = [
        (f.name, _toml(v) if not isinstance(v := getattr(resolved.settings, f.name), dict) else json.dumps(v))
        for f in fields(TrainConfig)
    ]
    wide, far = max(len(k) for k, _ in rows), max(len(v) for _, v in rows)
    return "\n".join(f"{key:<{wide}} = {value:<{far}}  # {resolved.origin[key]}" for key, value in rows)


def extend_sys_path(resolved: ResolvedConfig) -> None:
    """Tasks and strategies of one's own are looked for beside the file, then in the current folder."""
    for place in (str(Path.cwd()), str(resolved.folder)):
        if place not in sys.path:
            sys.path.insert(0, place)


def build_task(resolved: ResolvedConfig) -> Any:
    """The task that the settings name."""
    name, options = resolved.settings.task, resolved.settings.task_options
    if not name:
        raise UsageError("no task is named", where="task", hint='set task = "importable.module:Class" in the file')
    module, colon, attribute = name.partition(":")
    extend_sys_path(resolved)
    try:
        cls = getattr(importlib.import_module(module), attribute if colon else "Task")
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"task '{name}' cannot be loaded: {error}", where="task", hint="give importable.module:Class"
        ) from error
    known = {f.name for f in fields(cls) if f.init} if hasattr(cls, "__dataclass_fields__") else None
    for key in options:
        if known is not None and key not in known:
            raise UsageError(
                f"task '{name}' has no setting '{key}'", where=f"task_options.{key}", hint=did_you_mean(key, known)
            )
    if known is not None and "seed" in known:
        options = {"seed": resolved.settings.seed, **options}
    try:
        return cls(**options)
    except TypeError as error:
        raise UsageError(
            f"task '{name}' does not take these settings: {error}", where="task_options", hint="see the class"
        ) from error


def engine(settings: TrainConfig) -> EngineConfig:
    """The part of the settings that the engine takes."""
    return EngineConfig(**{f.name: getattr(settings, f.name) for f in fields(EngineConfig)})


NON_NUMERIC_KEYS = frozenset(
    {
        "run",
        "resume",
        "keep_checkpoints",
        "eval_at_checkpoint",
        "checkpoint_every_epochs",
        "straggler",
        "timeout_s",
        "log_every_s",
        "bind_address",
        "store_port",
        "progress",
    }
    | {"record_order", "backend", "device", "learners"}
)
"""Settings that leave no trace in the weights, once the order of events is known."""


def computation_settings(settings: TrainConfig) -> dict[str, Any]:
    """The settings that decide what a run computes: two runs that differ in one of them are different runs."""
    plain = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in NON_NUMERIC_KEYS}
    return dict(json.loads(json.dumps(plain)))
