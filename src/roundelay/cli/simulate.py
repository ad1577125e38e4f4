"""roundelay simulate."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.cli.arguments import add_json, add_settings, next_run_dir
from roundelay.core.settings import setting
from roundelay.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from roundelay.simulate.cluster import Cluster
    from roundelay.simulate.run import SimulationResult

EXAMPLES = """  roundelay simulate v100-8x8 'strategy=hierarchical(adpsgd)' steps=200
  roundelay simulate v100-8x8 strategy=sync learners=16 batch=160 samples=33860000 epochs=16 --json
  roundelay simulate v100-4x8 task=frames strategy=adpsgd learners=4"""
TASK_KEYS = (
    "strategy",
    "strategy_options",
    "topology",
    "batch",
    "epochs",
    "momentum",
    "steps_per_exchange",
    "seed",
    "log_every_s",
    "run",
)
"""Keys that are also settings of a task's file; with task=… they override the file."""


@dataclass(frozen=True)
class SimulateConfig:
    """Settings of roundelay simulate."""

    strategy: str = setting("", help="Strategy; default adpsgd, or the task's.")
    strategy_options: dict[str, Any] = setting(factory=dict, help="Fields of the strategy's class, such as K.")
    topology: str = setting("", help="Topology; default ring, or the task's.")
    learners: int = setting(0, minimum=0, help="Use the first N learners of the cluster; 0 uses all.")
    batch: int = setting(128, minimum=1, help="Samples per learner and step; default 128, or the task's.")
    steps: int = setting(0, minimum=0, help="Steps per learner to simulate; default 100, or all epochs of the task.")
    epochs: float = setting(0.0, minimum=0, help="Epochs of the whole run.")
    samples: int = setting(0, minimum=0, help="Samples per epoch: the predicted hours are then those of all epochs.")
    parameters: int = setting(0, minimum=0, help="Parameters of the model; default: those of model.")
    model: str = setting("swb2000", help="Acoustic model by name (roundelay list models).")
    task: str = setting("", help="Settings of roundelay train, by name or path: train the task in virtual time.")
    momentum: float = setting(0.9, minimum=0, help="Momentum of sgd.")
    steps_per_exchange: float = setting(1.0, minimum=0.01, help="Gradient steps per exchange.")
    seed: int = setting(0, minimum=0, maximum=10**12, help="Seed.")
    log_every_s: float = setting(0.0, minimum=0, help="Virtual seconds between two records of a learner.")
    run: str = setting("", help="Run directory.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", metavar="CLUSTER", help="a preset (roundelay list clusters) or a TOML file")
    add_settings(parser, ", ".join(f.name for f in fields(SimulateConfig)) + "; with task=… also settings of roundelay train")
    add_json(parser, "print the metrics as JSON at the end")


def run(args: argparse.Namespace) -> int:
    """Simulate a run and print its timing."""
    from roundelay import config
    from roundelay.simulate import cluster as clusters

    own, rest = config.split_items(args.overrides, SimulateConfig)
    options = config.load(None, own, SimulateConfig).settings
    if rest and not options.task:
        config.load(None, args.overrides, SimulateConfig)  # raises: the key is unknown
    cluster = clusters.load(args.cluster)
    if options.learners:
        cluster = cluster.first(options.learners)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # for strategies in the current folder
    if options.task:
        shared = [item for item in own if config.parse_item(item)[0].partition(".")[0] in TASK_KEYS]
        result, run_dir = _simulate_task(cluster, options, [*shared, *rest])
    else:
        result, run_dir = _simulate_timing(cluster, options)
    if args.json:
        print(
            json.dumps({**result.summary(), "cluster": cluster.name, "strategy": result.strategy, "run": str(run_dir)}),
            flush=True,
        )
    else:
        show(cluster, result)
        print(f"run: {run_dir}", flush=True)
    return 0


def parameters_of(options: SimulateConfig) -> int:
    """Return the number of parameters of the simulated model."""
    from roundelay.speech.nnet.lstm import PRESETS

    if options.parameters:
        return options.parameters
    if options.model not in PRESETS:
        raise UsageError(f"unknown model '{options.model}'", where="model", hint=did_you_mean(options.model, PRESETS))
    return PRESETS[options.model][0].parameters


def _simulate_timing(cluster: Cluster, options: SimulateConfig) -> tuple[SimulationResult, Path]:
    from roundelay import config
    from roundelay.simulate.run import simulate_timing

    strategy = options.strategy or "adpsgd"
    run_dir = Path(options.run) if options.run else next_run_dir(cluster.name, strategy)
    settings: dict[str, Any] = {
        "strategy": strategy,
        "topology": options.topology or "ring",
        "batch": options.batch,
        "momentum": options.momentum,
        "steps_per_exchange": options.steps_per_exchange,
        "seed": options.seed,
        "strategy_options": options.strategy_options,
    }
    result = simulate_timing(
        cluster,
        parameters=parameters_of(options),
        steps=options.steps or 100,
        epochs=options.epochs or None,
        samples=options.samples or None,
        log_every_s=options.log_every_s or None,
        run=run_dir,
        spans=True,
        **settings,
    )
    written = config.TrainConfig(learners=cluster.learners, run=str(run_dir), **settings)
    (run_dir / "config.toml").write_text(
        f"# simulated on the cluster '{cluster.name}'\n{config.dumps(written)}", encoding="utf-8"
    )
    return result, run_dir


def _simulate_task(cluster: Cluster, options: SimulateConfig, overrides: list[str]) -> tuple[SimulationResult, Path]:
    from roundelay import config
    from roundelay.cli.train import check_writable, validate
    from roundelay.engine.validate import validate_run
    from roundelay.simulate.run import simulate_task
    from roundelay.testing import examples

    resolved = config.load(examples.find(options.task), overrides)
    validate(resolved)
    settings = resolved.settings
    run_dir = settings.run_dir or next_run_dir(cluster.name, settings.strategy)
    settings = replace(settings, learners=cluster.learners, run=str(run_dir), device="cpu")
    task = config.build_task(resolved)
    if options.steps:
        settings = replace(settings, epochs=options.steps * int(settings.batch) * cluster.learners / task.samples)  # type: ignore[arg-type]
    validate_run(settings, cluster.learners)
    check_writable(run_dir)
    result = simulate_task(cluster, task, settings, spans=True)
    head = f"# trained in virtual time on the cluster '{cluster.name}'\n"
    (run_dir / "config.toml").write_text(head + config.dumps(settings), encoding="utf-8")
    return result, run_dir


def show(cluster: Cluster, result: SimulationResult) -> None:
    """Print the result for a terminal."""
    from roundelay.cli import timeline

    print(f"{result.strategy} on {cluster.name}: {result.learners} learners, {result.machines} machines")
    print(f"  {result.hours:.4g} hours, {result.samples_per_s:.6g} samples/s, efficiency {100 * result.efficiency:.1f} %")
    print(
        f"  {result.steps} steps in {result.elapsed_s:.6g} s of virtual time, {result.bytes_per_step / 1e6:.4g} MB sent per "
        f"learner and step, {result.exchanges} exchanges, mean staleness {result.staleness_mean:.3g}"
    )
    if result.metrics:
        print("  held-out " + "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
    for rank, cause in result.lost.items():
        print(f"  rank {rank}: {cause}")
    for block in (
        timeline.shares(result),
        timeline.timeline(result.spans, result.learners),
        timeline.histogram(result.staleness),
    ):
        print("\n" + "\n".join(block))
