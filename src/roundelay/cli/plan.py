"""`roundelay plan`: what every strategy would take on a cluster, and which to choose; or what one slow rank has cost a run."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.cli.tables import markdown
from roundelay.errors import UsageError
from roundelay.recipes import config as recipe_config
from roundelay.simulate import cluster as clusters
from roundelay.simulate.plan import PlannedJob, plan
from roundelay.simulate.straggler_cost import straggler_cost
from roundelay.speech.nnet.lstm import PRESETS, preset_shape

OWN = ("cluster", "learners", "samples", "parameters", "model", "rank")
"""Keys that are plan's own; all others are settings of training."""


def run_plan(args: argparse.Namespace) -> int:
    own, rest = split_overrides(args.overrides)
    if args.what_if is not None:
        given = [args.file] if args.file else []
        own, rest = split_overrides([*given, *args.overrides])
        found = run_what_if(Path(args.what_if), own)
        print(json.dumps(found) if args.json else show_what_if(found))
        return 0
    if not args.file:
        raise UsageError(
            "plan what?", where="FILE", hint="name a recipe or a settings file: roundelay plan examples/frames.toml cluster=…"
        )
    if "cluster" not in own:
        raise UsageError(
            "plan needs a cluster",
            where="cluster",
            hint=f"add cluster=NAME ({', '.join(clusters.presets())}) or cluster=FILE.toml",
        )
    cluster = clusters.load(own["cluster"])
    if "learners" in own:
        cluster = cluster.first(whole(own, "learners"))
    job = job_of(args.file, own, rest)

    def done(name: str) -> None:
        if not args.json:
            print(f"simulated: {name}", file=sys.stderr, flush=True)

    found = plan(cluster, job, done)
    print(json.dumps(found) if args.json else show(found))
    return 0


def split_overrides(overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    own: dict[str, str] = {}
    rest: list[str] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise UsageError(f"'{item}' is not key=value", where="command line", hint="write for example cluster=v100-8x8")
        if key in OWN:
            own[key] = text
        else:
            rest.append(item)
    return own, rest


def whole(own: dict[str, str], key: str) -> int:
    """A count; '1e6' is one too."""
    try:
        value = float(own[key])
        if value >= 1 and value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{key}={own[key]}", where="command line", hint="give a whole number of at least 1")


def job_of(file: str, own: dict[str, str], overrides: list[str]) -> PlannedJob:
    """What is to be trained: from a recipe, or from a settings file of `roundelay train`."""
    if is_recipe(file):
        return _recipe_job(file, own, overrides)
    resolved = config.load(file, overrides)
    settings = resolved.settings
    config.extend_sys_path(resolved)
    parameters = _size(own)
    samples = whole(own, "samples") if "samples" in own else 0
    if not (parameters and samples):
        task = config.build_task(resolved)
        samples = samples or task.samples
        parameters = parameters or sum(p.numel() for p in task.build().parameters() if p.requires_grad)
    return _job(settings, parameters, samples)


def _job(settings: config.TrainConfig, parameters: int, samples: int) -> PlannedJob:
    batch = settings.batch if isinstance(settings.batch, int) else int(settings.batch) if settings.batch.isdigit() else 64
    return PlannedJob(parameters, samples, settings.epochs, batch, settings.optimizer, settings.momentum, settings.seed)


def is_recipe(file: str) -> bool:
    path = Path(file)
    if path.is_dir():
        return True
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the settings reader says what is wrong with it
    return "source" in tree or "kaldi" in tree or "network" in tree


def _recipe_job(file: str, own: dict[str, str], overrides: list[str]) -> PlannedJob:
    recipe = recipe_config.load(file, overrides)
    settings = config.TrainConfig(**{k: v for k, v in recipe.train.items() if k != "learners"})
    changes = {k: v for k in ("layers", "hidden", "bottleneck") if (v := getattr(recipe.network, k)) is not None}
    parameters = _size(own) or preset_shape(recipe.network.model, **changes).parameters
    if "samples" not in own:
        raise UsageError(
            "a recipe does not say how many samples its corpus has",
            where=file,
            hint="add samples=N: chunks in an epoch, such as hours x 3600 x 100 / window",
        )
    return _job(settings, parameters, whole(own, "samples"))


def _size(own: dict[str, str]) -> int:
    if "parameters" in own:
        return whole(own, "parameters")
    return preset_shape(own["model"]).parameters if "model" in own else 0


def run_what_if(run: Path, own: dict[str, str]) -> dict[str, Any]:
    if "rank" not in own or not own["rank"].isdigit():
        raise UsageError("which rank?", where="--what-if", hint="add rank=7")
    if not (run / "config.toml").is_file():
        raise UsageError("this is no run directory: it has no config.toml", where=str(run), hint="give the run=… of a training")
    settings = config.load(run / "config.toml").settings
    batch = settings.batch if isinstance(settings.batch, int) else 64
    parameters = _size(own) or PRESETS["tiny"][0].parameters
    return straggler_cost(run, int(own["rank"]), config.engine(settings), batch, parameters)


# -- for people --------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> str:
    head = [
        "strategy",
        "hours",
        "efficiency",
        "memory GB",
        "MB per step",
        "gap",
        "rounds to 1 %",
        "staleness",
        "stable rate x h",
    ]
    rows = []
    for r in found["strategies"]:
        if not r["fits"]:
            rows.append([r["name"], "does not fit", None, r["memory_gb"] + r["host_memory_gb"], None, None, None, None, None])
            continue
        rows.append(
            [
                r["name"], r["hours"], f"{100 * r['efficiency']:.0f} %", r["memory_gb"] + r["host_memory_gb"],
                r["bytes_per_step"] / 1e6, r["gap"], r["rounds_to_agreement"], r["staleness"], r["stable_rate"],
            ]
        )  # fmt: skip
    said = found["recommendation"]
    job = found["job"]
    lines = [
        f"{job['parameters']:,} parameters, {job['epochs']:g} epochs of {job['samples']:,} samples, "
        f"batch {job['batch']} per learner, on {found['cluster']}",
        "",
        markdown(head, rows),
        "",
        "recommended: "
        + " ".join(f"{key}={said[key]}" for key in ("strategy", "topology", "learners", "batch"))
        + (f"  (about {said['hours']:.3g} hours)" if "hours" in said else ""),
        *(f"  because {reason}" for reason in said["reason"]),
        "",
        "stable rate x h: the largest rate times the loss's curvature that plain SGD bears on a quadratic (2 for one learner).",
        "A rate tuned for sync may have to come down by its ratio to 2. Memory: without activations. Accuracy: not simulated.",
    ]
    return "\n".join(lines)


def show_what_if(found: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"rank {found['rank']} took {found['slowdown']:.2f} times the usual seconds per sample ({found['strategy']})",
            f"  measured            {found['measured_samples_per_s']:10.1f} samples/s",
            f"  simulated as it was {found['simulated_samples_per_s']:10.1f} samples/s",
            f"  if it were normal   {found['if_normal_samples_per_s']:10.1f} samples/s: {found['gain']:.2f} times as fast",
        ]
    )
