"""`roundelay simulate`: a training run on a cluster that exists only in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.cli import timeline
from roundelay.cli.train import plan_of
from roundelay.errors import UsageError, did_you_mean
from roundelay.simulate import cluster as clusters
from roundelay.simulate.run import SimulationResult, simulate_task, simulate_timing
from roundelay.speech.nnet.lstm import PRESETS


@dataclass(frozen=True)
class SimulateConfig:
    """What `simulate` can be told."""

    strategy: str = ""
    strategy_options: dict[str, Any] = field(default_factory=dict)
    topology: str = ""
    learners: int = 0  # the first so many of the cluster; 0: all
    batch: int = 0  # samples per learner and step; default 128, or the task's
    steps: int = 0  # steps per learner to simulate; default 100
    epochs: float = 0.0  # of the whole run
    samples: int = 0  # in an epoch: hours are then those of all epochs
    parameters: int = 0  # of the model
    model: str = ""  # an acoustic model by name: roundelay list models
    task: str = ""  # a settings file of `roundelay train`: learns for real
    momentum: float = 0.9
    steps_per_exchange: float = 1.0
    seed: int = 0
    log_every_s: float = 0.0  # virtual seconds between two records of a learner
    run: str = ""  # the run's directory


def run_simulate(args: argparse.Namespace) -> int:
    asked, rest = parse(args.overrides)
    cluster = clusters.load(args.cluster)
    if asked.learners:
        cluster = cluster.first(asked.learners)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # strategies of one's own
    outcome, run = _learn(cluster, asked, rest) if asked.task else _time(cluster, asked)
    if not args.json:
        show(cluster, outcome, run)
    print(json.dumps({**outcome.summary(), "cluster": cluster.name, "strategy": outcome.strategy, "run": str(run)})
          if args.json else f"run: {run}", flush=True)  # fmt: skip
    return 0


def parse(overrides: list[str]) -> tuple[SimulateConfig, list[str]]:
    """The settings, and those that go to the task's own file."""
    known = {f.name: f for f in fields(SimulateConfig)}
    values: dict[str, Any] = {}
    passed_on: list[str] = []
    with_task = any(item.startswith("task=") for item in overrides)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise UsageError(
                f"'{item}' is not key=value", where="command line", hint="write for example strategy=adpsgd batch=128"
            )
        table, dot, inner = key.partition(".")
        if dot and table == "strategy_options":
            values[table] = {**values.get(table, {}), inner: literal(text)}
            passed_on.append(item)
            continue
        if key in known:
            values[key] = typed(key, literal(text), str(known[key].type))
        elif not with_task:
            raise UsageError(f"simulate has no setting '{key}'", where="command line", hint=did_you_mean(key, known))
        if with_task and key not in ("task", "learners", "steps", "parameters", "model", "samples"):
            passed_on.append(item)
    for key in ("learners", "batch", "steps", "epochs", "samples", "parameters", "seed", "log_every_s", "momentum"):
        if key in values and (values[key] < 0 or (values[key] == 0 and key in ("batch", "steps", "parameters"))):
            raise UsageError(f"{key}={values[key]}", where="command line", hint="give a number above 0")
    return SimulateConfig(**values), passed_on


def literal(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def typed(key: str, value: Any, kind: str) -> Any:
    wanted = {"int": int, "float": float, "str": str}.get(kind)
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is str:
        value = str(value)
    if wanted is not None and type(value) is not wanted:
        raise UsageError(
            f"{key} is {value!r}, not a number of type {kind}", where="command line", hint=f"write {key}=8 or the like"
        )
    return value


def _parameters(asked: SimulateConfig) -> int:
    if asked.parameters:
        return asked.parameters
    if not asked.model:
        return PRESETS["swb2000"][0].parameters
    if asked.model not in PRESETS:
        raise UsageError(f"there is no model '{asked.model}'", where="model", hint=did_you_mean(asked.model, PRESETS))
    return PRESETS[asked.model][0].parameters


def _time(cluster: clusters.Cluster, asked: SimulateConfig) -> tuple[SimulationResult, Path]:
    strategy = asked.strategy or "adpsgd"
    run = Path(asked.run) if asked.run else fresh_run(cluster.name, strategy)
    run.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "strategy": strategy,
        "topology": asked.topology or "ring",
        "batch": asked.batch or 128,
        "momentum": asked.momentum,
        "steps_per_exchange": asked.steps_per_exchange,
        "seed": asked.seed,
        "strategy_options": asked.strategy_options,
    }
    outcome = simulate_timing(
        cluster,
        parameters=_parameters(asked),
        steps=asked.steps or 100,
        epochs=asked.epochs or None,
        samples=asked.samples or None,
        log_every_s=asked.log_every_s or None,
        run=run,
        spans=True,
        **settings,
    )
    known = config.TrainConfig(learners=cluster.learners, run=str(run), **settings)
    (run / "config.toml").write_text(f"# simulated on the cluster '{cluster.name}'\n{config.dumps(known)}", encoding="utf-8")
    return outcome, run


def _learn(cluster: clusters.Cluster, asked: SimulateConfig, overrides: list[str]) -> tuple[SimulationResult, Path]:
    resolved = config.load(asked.task, overrides)
    settings = resolved.settings
    run = Path(settings.run) if settings.run else fresh_run(cluster.name, settings.strategy)
    settings = replace(settings, learners=cluster.learners, run=str(run), device="cpu")
    task = config.build_task(resolved)
    if asked.steps:
        settings = replace(settings, epochs=asked.steps * int(settings.batch) * cluster.learners / task.samples)
    run.mkdir(parents=True, exist_ok=True)
    head = f"# trained in virtual time on the cluster '{cluster.name}'\n"
    (run / "config.toml").write_text(head + config.dumps(settings), encoding="utf-8")
    outcome = simulate_task(cluster, task, config.engine(settings), plan_of(settings, run), spans=True)
    return outcome, run


def fresh_run(cluster: str, strategy: str) -> Path:
    stem = f"{cluster}-{strategy.replace('(', '-').replace(')', '').replace(':', '.')}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"


def show(cluster: clusters.Cluster, outcome: SimulationResult, run: Path) -> None:
    """For people."""
    print(f"{outcome.strategy} on {cluster.name}: {outcome.learners} learners, {outcome.machines} machines")
    print(f"  {outcome.hours:.4g} hours, {outcome.samples_per_s:.6g} samples/s, efficiency {100 * outcome.efficiency:.1f} %")
    print(
        f"  {outcome.steps} steps in {outcome.elapsed_s:.6g} s of virtual time, {outcome.bytes_per_step / 1e6:.4g} MB sent per "
        f"learner and step, {outcome.exchanges} exchanges, mean staleness {outcome.staleness_mean:.3g}"
    )
    if outcome.metrics:
        print("  held-out " + "  ".join(f"{name} {value:.4f}" for name, value in outcome.metrics.items()))
    for rank, why in outcome.lost.items():
        print(f"  rank {rank}: {why}")
    for block in (
        timeline.shares(outcome),
        timeline.timeline(outcome.spans, outcome.learners),
        timeline.histogram(outcome.staleness),
    ):
        print("\n" + "\n".join(block))


def run_list_clusters(as_json: bool) -> int:
    found: dict[str, Any] = {}
    for name in clusters.presets():
        made = clusters.load(name)
        found[name] = {
            "about": made.about,
            "machines": len(set(made.machine_names())),
            "learners": made.learners,
            "seconds_per_sample": made.learner.seconds_per_sample,
            "gbit_per_s_between": made.link.between.gbit_per_s,
            "file": str(clusters.PRESET_FOLDER.name) + f"/{name}.toml",
            "sources": made.sources,
        }
    lines = [
        f"{name:<14} {d['learners']:>4} learners on {d['machines']:>2} machines  {d['about']}" for name, d in found.items()
    ]
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines))
    return 0
