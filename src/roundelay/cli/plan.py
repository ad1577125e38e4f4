"""roundelay plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.cli.arguments import add_json, add_settings, note
from roundelay.core.settings import setting
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.config import TrainConfig
    from roundelay.simulate.plan import PlannedJob

EXAMPLES = """  roundelay plan frames cluster=v100-8x8
  roundelay plan switchboard cluster=v100-8x8 samples=33860000 --json
  roundelay plan --what-if runs/frames-sync-1 rank=7"""


@dataclass(frozen=True)
class PlanConfig:
    """Settings of roundelay plan; all other keys are settings of training."""

    cluster: str = setting("", help="A preset (roundelay list clusters) or a TOML file.")
    learners: int = setting(0, minimum=0, help="Use the first N learners of the cluster; 0 uses all.")
    samples: int | None = setting(None, minimum=1, help="Samples per epoch; default: the task's.")
    parameters: int = setting(0, minimum=0, help="Parameters of the model; default: the task's.")
    model: str = setting("", help="Acoustic model by name (roundelay list models), in place of parameters.")
    rank: int = setting(-1, minimum=-1, help="With --what-if: the slow rank.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="", help="settings of roundelay train or a recipe, by name or path"
    )
    add_settings(parser, ", ".join(f.name for f in fields(PlanConfig)) + ", or settings of the file")
    parser.add_argument(
        "--what-if", metavar="RUN", help="run directory: how fast if rank=N had been as fast as the other ranks?"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate all strategies and print a table and a recommendation."""
    from roundelay import config
    from roundelay.simulate import cluster as clusters
    from roundelay.simulate.plan import plan

    items = [*([args.file] if "=" in args.file else []), *args.overrides]
    own, rest = config.split_items(items, PlanConfig)
    options = config.load(None, own, PlanConfig).settings
    if args.what_if is not None:
        cost = what_if(Path(args.what_if), options)
        print(json.dumps(cost) if args.json else show_what_if(cost))
        return 0
    if not args.file or "=" in args.file:
        raise UsageError("plan needs a FILE", where="FILE", hint="for example: roundelay plan frames cluster=v100-8x8")
    if not options.cluster:
        raise UsageError(
            "plan needs a cluster",
            where="cluster",
            hint=f"add cluster=NAME ({', '.join(clusters.presets())}) or cluster=FILE.toml",
        )
    cluster = clusters.load(options.cluster)
    if options.learners:
        cluster = cluster.first(options.learners)
    job = planned_job(args.file, options, rest)
    result = plan(cluster, job, lambda name: None if args.json else note(f"simulated: {name}"))
    print(json.dumps(result) if args.json else show(result))
    return 0


def planned_job(file: str, options: PlanConfig, overrides: list[str]) -> PlannedJob:
    """Return the size of a training job, from settings of roundelay train or from a recipe."""
    from roundelay import config
    from roundelay.cli.inputs import is_recipe
    from roundelay.testing import examples

    if is_recipe(file):
        return _recipe_job(file, options, overrides)
    resolved = config.load(examples.find(file), overrides)
    config.extend_sys_path(resolved)
    parameters, samples = _parameters(options), options.samples
    if not (parameters and samples):
        task = config.build_task(resolved)
        samples = samples or task.samples
        parameters = parameters or sum(p.numel() for p in task.build().parameters() if p.requires_grad)
    return _job(resolved.settings, parameters, samples)


def _job(settings: TrainConfig, parameters: int, samples: int) -> PlannedJob:
    from roundelay.simulate.plan import PlannedJob

    return PlannedJob(
        parameters, samples, settings.epochs, _batch(settings), settings.optimizer, settings.momentum, settings.seed
    )


def _batch(settings: TrainConfig) -> int:
    """Return the batch size as a number; 64 if it differs between machines or is measured."""
    batch = settings.batch
    return batch if isinstance(batch, int) else int(batch) if isinstance(batch, str) and batch.isdigit() else 64


def _recipe_job(file: str, options: PlanConfig, overrides: list[str]) -> PlannedJob:
    from roundelay.config import TrainConfig
    from roundelay.recipes import config as recipe_config
    from roundelay.speech.nnet.lstm import preset_shape

    recipe = recipe_config.load(file, overrides)
    changes = {k: v for k in ("layers", "hidden", "bottleneck") if (v := getattr(recipe.network, k)) is not None}
    parameters = _parameters(options) or preset_shape(recipe.network.model, **changes).parameters
    if not options.samples:
        raise UsageError(
            "a recipe does not determine the number of samples",
            where=file,
            hint="add samples=N: windows per epoch, such as hours x 3600 x 100 / window",
        )
    return _job(TrainConfig(**recipe.train), parameters, options.samples)


def _parameters(options: PlanConfig) -> int:
    from roundelay.speech.nnet.lstm import preset_shape

    if options.parameters:
        return options.parameters
    return preset_shape(options.model).parameters if options.model else 0


def what_if(run: Path, options: PlanConfig) -> dict[str, Any]:
    """Return what one slow rank cost a finished run."""
    from roundelay import config
    from roundelay.cli.replay import load_run
    from roundelay.simulate.straggler_cost import straggler_cost
    from roundelay.speech.nnet.lstm import PRESETS

    if options.rank < 0:
        raise UsageError("--what-if needs a rank", where="--what-if", hint="add rank=N, for example rank=7")
    settings = config.load(load_run(run)).settings
    parameters = _parameters(options) or PRESETS["tiny"][0].parameters
    return straggler_cost(run, options.rank, settings, _batch(settings), parameters)


# -- tables ------------------------------------------------------------------------------------------------------------

HEAD = ["strategy", "hours", "efficiency", "memory GB", "MB per step", "gap", "rounds to 1 %", "staleness", "stable rate x h"]


def show(result: dict[str, Any]) -> str:
    """Return the table and the recommendation as text."""
    from roundelay.cli.tables import markdown

    rows = []
    for r in result["strategies"]:
        memory = r["memory_gb"] + r["host_memory_gb"]
        if not r["fits"]:
            rows.append([r["name"], "does not fit", None, memory, None, None, None, None, None])
            continue
        rows.append(
            [
                r["name"], r["hours"], f"{100 * r['efficiency']:.0f} %", memory, r["bytes_per_step"] / 1e6, r["gap"],
                r["rounds_to_agreement"], r["staleness"], r["stable_rate"],
            ]
        )  # fmt: skip
    best, job = result["recommendation"], result["job"]
    lines = [
        f"{job['parameters']:,} parameters, {job['epochs']:g} epochs of {job['samples']:,} samples, "
        f"batch {job['batch']} per learner, on {result['cluster']}",
        "",
        markdown(HEAD, rows),
        "",
        "recommended: "
        + " ".join(f"{key}={best[key]}" for key in ("strategy", "topology", "learners", "batch"))
        + (f"  (about {best['hours']:.3g} hours)" if "hours" in best else ""),
        *(f"  because {reason}" for reason in best["reason"]),
        "",
        "stable rate x h: largest stable learning rate times the curvature of a quadratic, for plain SGD (2 for one learner).",
        "Scale a rate tuned for sync by its ratio to 2. Memory excludes activations. Accuracy is not simulated.",
    ]
    return "\n".join(lines)


def show_what_if(cost: dict[str, Any]) -> str:
    """Return the cost of a slow rank as text."""
    return "\n".join(
        [
            f"rank {cost['rank']} took {cost['slowdown']:.2f} times the usual seconds per sample ({cost['strategy']})",
            f"  measured            {cost['measured_samples_per_s']:10.1f} samples/s",
            f"  simulated, slow     {cost['simulated_samples_per_s']:10.1f} samples/s",
            f"  simulated, normal   {cost['if_normal_samples_per_s']:10.1f} samples/s: {cost['gain']:.2f} times as fast",
        ]
    )
