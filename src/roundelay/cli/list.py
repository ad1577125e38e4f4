"""roundelay list."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from roundelay.cli.arguments import add_json

EXAMPLES = """  roundelay list strategies
  roundelay list recipes
  roundelay list topologies --size 16 --json"""
Table = tuple[dict[str, Any], list[str]]
"""What --json prints, and the lines for a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=list(LISTS), metavar="WHAT", help=", ".join(LISTS))
    parser.add_argument("--size", type=int, default=8, help="number of learners for the spectra of topologies (default 8)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print one list."""
    rows, lines = LISTS[args.what](args)
    print(json.dumps(rows, indent=1) if args.json else "\n".join(lines))
    return 0


def strategies(args: argparse.Namespace) -> Table:
    from roundelay import strategies as package

    rows: dict[str, Any] = {name: package.describe(name) for name in package.STRATEGIES}
    return rows, [f"{name:<14} {d['equation']}\n{'':<14} {d['use']}" for name, d in rows.items()]


def topologies(args: argparse.Namespace) -> Table:
    from roundelay import topology

    rows: dict[str, Any] = {name: topology.describe(name, args.size) for name in topology.TOPOLOGIES}
    return rows, [f"{name:<14} {d['description']}  (gap {d['gap']:.4f} at {args.size} learners)" for name, d in rows.items()]


def models(args: argparse.Namespace) -> Table:
    from roundelay.speech.nnet.lstm import PRESETS

    rows = {name: {"parameters": shape.parameters, **asdict(shape), "use": use} for name, (shape, use) in PRESETS.items()}
    return rows, [f"{name:<14} {d['parameters']:>11,} parameters  {d['use']}" for name, d in rows.items()]


def clusters(args: argparse.Namespace) -> Table:
    from roundelay.simulate import cluster

    rows: dict[str, Any] = {}
    for name in cluster.presets():
        preset = cluster.load(name)
        rows[name] = {
            "about": preset.about,
            "machines": len(set(preset.machine_names())),
            "learners": preset.learners,
            "seconds_per_sample": preset.learner.seconds_per_sample,
            "gbit_per_s_between": preset.link.between.gbit_per_s,
            "file": f"{cluster.PRESET_FOLDER.name}/{name}.toml",
            "sources": preset.sources,
        }
    return rows, [
        f"{name:<14} {d['learners']:>4} learners on {d['machines']:>2} machines  {d['about']}" for name, d in rows.items()
    ]


def recipes(args: argparse.Namespace) -> Table:
    from roundelay.config import read_toml
    from roundelay.recipes import FILE, FOLDER, names

    rows = {}
    for name in names():
        tree = read_toml(FOLDER / name / FILE)[0]
        corpora = ", ".join(source.get("kind", "") for source in tree.get("source", [])) or "Kaldi features"
        rows[name] = f"{tree.get('title', name)}: {corpora}"
    return _plain(rows)


def examples(args: argparse.Namespace) -> Table:
    from roundelay.testing import examples as package

    return _plain({name: package.describe(name) for name in package.names()})


def stages(args: argparse.Namespace) -> Table:
    from roundelay.recipes.pipeline import STAGES

    return _plain({stage.name: "depends on " + (", ".join(stage.parts) or "the stages before it") for stage in STAGES})


def backends(args: argparse.Namespace) -> Table:
    from roundelay.launch.context import BACKENDS

    return _plain(dict(BACKENDS))


def optimizers(args: argparse.Namespace) -> Table:
    from roundelay.engine.optimizer import OPTIMIZERS

    return _plain({name: f"{cls.__module__.split('.')[0]}: {cls.__name__}" for name, cls in OPTIMIZERS.items()})  # type: ignore[attr-defined]


def schedules(args: argparse.Namespace) -> Table:
    return _plain(
        {
            "constant": "lr, after warmup_epochs",
            "cosine": "lr decays to 0 at the end, along half a cosine",
            "sqrt2_decay": "lr is multiplied by 1/sqrt(2) per epoch after anneal_after_epochs",
        }
    )


def benchmarks(args: argparse.Namespace) -> Table:
    from roundelay.cli.bench import BENCHES

    return _plain({name: f"roundelay bench {name} --help" for name in BENCHES})


def _plain(rows: dict[str, str]) -> Table:
    return dict(rows), [f"{name:<14} {text}" for name, text in rows.items()]


LISTS: dict[str, Callable[[argparse.Namespace], Table]] = {
    function.__name__: function
    for function in (
        strategies,
        topologies,
        backends,
        optimizers,
        schedules,
        models,
        clusters,
        examples,
        recipes,
        stages,
        benchmarks,
    )
}
