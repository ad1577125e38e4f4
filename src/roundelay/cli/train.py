"""What the engine's commands do: train, list, config. Apart from the parser, because torch takes seconds to import."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

BENCHES: dict[str, str] = {}
from roundelay import config, strategies, topology
from roundelay.engine.learner import build_strategy
from roundelay.engine.trainer import OPTIMIZERS, RunConfig, train
from roundelay.errors import UsageError
from roundelay.launch.context import (
    BACKENDS,
    check_backend,
    context_from_env,
    single_process_context,
    under_launcher,
)
from roundelay.launch.local import start_learners
from roundelay.launch.threads import run_threads
from roundelay.speech.nnet.lstm import PRESETS

# -- train -------------------------------------------------------------------------------------------------------------


def run_train(args: argparse.Namespace) -> int:
    resolved = config.load(args.file, args.overrides)
    settings = resolved.settings
    config.extend_sys_path(resolved)
    check_backend(settings.backend)
    made = build_strategy(config.engine(settings))
    topology.topology(settings.topology)
    if under_launcher():
        return _run_rank(resolved, args.json)
    run = Path(settings.run) if settings.run else _fresh_run(args.file, settings.strategy)
    task = config.build_task(resolved)  # mistakes show before anything is started
    if settings.learners > 1 and settings.backend == "mpi":
        raise UsageError(
            "backend=mpi needs learners that MPI has started",
            where=f"learners={settings.learners}",
            hint=f"mpirun -n {settings.learners} roundelay train {args.file} backend=mpi …",
        )
    if settings.learners == 1 or settings.backend == "threads":
        _write_config(run, resolved)
        return _run_threads(task, resolved, run, args.json)
    _write_config(run, resolved)
    here = f"run={json.dumps(str(run), ensure_ascii=False)}"
    command = [sys.executable, "-m", "roundelay", "train", args.file, *args.overrides, here]
    if args.json:
        command.append("--json")
    return start_learners(
        command,
        lambda: _run_rank(config.load(args.file, [*args.overrides, here]), args.json),
        settings.learners,
        bind_address="127.0.0.1" if settings.bind_address == "auto" else settings.bind_address,
        port=settings.store_port,
        run=run,
        survives_failures=made.traits.survives_failures,
    )


def _fresh_run(file: str, strategy_name: str) -> Path:
    stem = f"{Path(file).stem}-{strategy_name.replace('(', '-').replace(')', '').replace(':', '.')}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"


def _write_config(run: Path, resolved: config.ResolvedConfig) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(config.dumps(resolved.settings), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the run directory: {error.strerror}", where=f"run={run}", hint="choose another run=…"
        ) from error


def plan_of(settings: config.TrainConfig, run: Path | None) -> RunConfig:
    return RunConfig(
        epochs=settings.epochs,
        batch=settings.batch,
        optimizer=settings.optimizer,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        run=run,
        resume=settings.resume,
        checkpoint_every_epochs=settings.checkpoint_every_epochs,
        eval_at_checkpoint=settings.eval_at_checkpoint,
        keep_checkpoints=settings.keep_checkpoints,
        progress=settings.progress,
        tensorboard=settings.tensorboard,
        num_workers=settings.num_workers,
        loader_kind=settings.loader_kind,
        record_settings=config.computation_settings(settings) if settings.record_order else None,
    )


def _run_rank(resolved: config.ResolvedConfig, as_json: bool) -> int:
    """This process is one rank of a launched job."""
    settings = resolved.settings
    _one_thread_per_learner()
    options = config.engine(settings)
    agreed = {
        k: getattr(settings, k)
        for k in ("task", "strategy", "strategy_options", "topology", "backend", "epochs", "lr", "seed", "deterministic_reduce")
    }
    context = context_from_env(
        backend=settings.backend, bind_address=settings.bind_address, timeout_s=settings.timeout_s, device=settings.device,
        simulate_nodes=settings.simulate_nodes, digest=agreed,
    )  # fmt: skip
    try:
        run = Path(settings.run) if settings.run else None
        if run is not None and context.rank == 0 and not (run / "config.toml").exists():
            _write_config(run, resolved)
        result = train(config.build_task(resolved), context, options, plan_of(settings, run))
    except BaseException as error:
        context.abort_job(error)
        raise
    if context.rank == min(context.comm.live_ranks()):
        _show(result, run, as_json)
    return 0


def _run_threads(task: Any, resolved: config.ResolvedConfig, run: Path, as_json: bool) -> int:
    settings = resolved.settings
    options, plan = config.engine(settings), plan_of(settings, run)
    if settings.learners == 1:
        _one_thread_per_learner()
        result = train(task, single_process_context(settings.device), options, plan)
    else:
        results = run_threads(
            lambda context: train(task, context, options, plan), size=settings.learners, simulate_nodes=settings.simulate_nodes,
            timeout_s=threading.TIMEOUT_MAX,
        )  # fmt: skip
        result = results[0]
    _show(result, run, as_json)
    return 0


def _one_thread_per_learner() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _show(result: dict[str, Any], run: Path | None, as_json: bool) -> None:
    metrics = result.get("metrics") or {}
    if as_json:
        print(json.dumps({"run": str(run) if run else None, **result}), flush=True)
        return
    ranks = result.get("ranks", {})
    rate = sum(r["samples_per_s"] for r in ranks.values()) if ranks else result["samples_per_s"]
    held_out = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items())
    print(f"done: {held_out}  {rate:.0f} samples/s" + (f"  run: {run}" if run else ""), flush=True)


# -- replay ------------------------------------------------------------------------------------------------------------


def run_replay(args: argparse.Namespace) -> int:
    """Does a recorded run again and says whether the weights are the same."""
    from roundelay.log.progress import Progress
    from roundelay.replay.replay import replay

    run = Path(args.run)
    if not (run / "config.toml").is_file():
        raise UsageError("this is no run directory: it has no config.toml", where=str(run), hint="give the run=… of a training")
    resolved = config.load(run / "config.toml")
    config.extend_sys_path(resolved)
    settings = resolved.settings
    progress = Progress("replay", "events", "none" if args.json else "auto")
    try:
        found = replay(
            run, config.build_task(resolved), config.engine(settings), plan_of(settings, None), config.computation_settings(settings),
            progress.step,
        )  # fmt: skip
    finally:
        progress.close()
    if args.json:
        print(json.dumps(found))
        return 0
    how = f"{found['steps']} steps of {found['learners']} learners, {found['events']} events"
    if found["equal"]:
        print(f"replayed {how}: every learner's last weights are the same, bit for bit")
    else:
        apart = f"{found['largest_difference']:.3g} (largest weight {found['largest_weight']:.3g})"
        print(f"replayed {how}: the weights differ by at most {apart}")
    if "average_difference" in found:
        print(f"the average model differs from the saved one by at most {found['average_difference']:.3g}")
    return 0


# -- list and config ---------------------------------------------------------------------------------------------------


def run_list(args: argparse.Namespace) -> int:
    if args.what == "strategies":
        found: dict[str, Any] = {name: strategies.describe(name) for name in strategies.STRATEGIES}
        lines = [f"{name:<14} {d['equation']}\n{'':<14} {d['use']}" for name, d in found.items()]
    elif args.what == "topologies":
        found = {name: topology.describe(name, args.size) for name in topology.TOPOLOGIES}
        lines = [f"{name:<14} {d['description']}  (gap {d['gap']:.4f} at {args.size} learners)" for name, d in found.items()]
    elif args.what == "models":
        found = {name: {"parameters": shape.parameters, **asdict(shape), "use": use} for name, (shape, use) in PRESETS.items()}
        lines = [f"{name:<14} {d['parameters']:>11,} parameters  {d['use']}" for name, d in found.items()]
    else:
        found = PLAIN_LISTS[args.what]()
        lines = [f"{name:<14} {text}" for name, text in found.items()]
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines))
    return 0


def recipes() -> dict[str, str]:
    """Those in ./recipes, and the demo's own."""
    from roundelay.recipes import config as recipe_config
    from roundelay.recipes import demo

    found = {str(path.parent): recipe_config.load(path) for path in sorted(Path("recipes").glob(f"*/{recipe_config.FILE}"))}
    found["demo"] = recipe_config.load(demo.RECIPE)
    titles = {name: f"{recipe.title}: {', '.join(s.kind for s in recipe.sources) or 'given'}" for name, recipe in found.items()}
    return {**titles, "demo": titles["demo"] + " (roundelay demo)"}


def stages() -> dict[str, str]:
    from roundelay.recipes.pipeline import STAGES

    return {stage.name: "decided by " + (", ".join(stage.parts) or "the stages before it") for stage in STAGES}


def benchmarks() -> dict[str, str]:
    return {name: f"roundelay bench {name} --help" for name in BENCHES}


PLAIN_LISTS: dict[str, Callable[[], dict[str, Any]]] = {
    "backends": lambda: dict(BACKENDS),
    "recipes": recipes,
    "stages": stages,
    "optimizers": lambda: {name: f"torch.optim.{made.__name__}" for name, made in OPTIMIZERS.items()},  # type: ignore[attr-defined]
    "schedules": lambda: {
        "constant": "the rate as it is, after warmup_epochs",
        "cosine": "down to 0 at the end, along half a cosine",
        "sqrt2_decay": "times 1/sqrt(2) per epoch from anneal_after_epochs on",
    },
    "benchmarks": benchmarks,
}


def run_config(args: argparse.Namespace) -> int:
    if Path(args.file).is_dir() or Path(args.file).name == "recipe.toml":
        from roundelay.recipes import explain

        print(explain.as_json(args.file, args.overrides) if args.json else explain.as_text(args.file, args.overrides))
        return 0
    resolved = config.load(args.file, args.overrides)
    config.extend_sys_path(resolved)
    build_strategy(config.engine(resolved.settings))
    if args.json:
        rows = {k: {"value": getattr(resolved.settings, k), "from": o} for k, o in resolved.origin.items()}
        print(json.dumps(rows, indent=1))
    else:
        print(config.explain(resolved))
    return 0


# -- completion --------------------------------------------------------------------------------------------------------

VALUES: Mapping[str, Sequence[str]] = {
    "strategy": (*strategies.STRATEGIES, "hierarchical(adpsgd)"),
    "topology": tuple(topology.TOPOLOGIES),
    "model": tuple(PRESETS),
    "device": ("auto", "cpu", "cuda"),
    "resume": ("no", "auto"),
    **config.CHOICES,
}
"""What settings may be, for shells that complete them."""


def keys_of_commands() -> dict[str, list[str]]:
    """The settings that each command takes as key=value."""
    from roundelay.recipes import explain

    engine = [f.name for f in fields(config.TrainConfig)]
    recipe = explain.keys()
    return {
        "train": engine,
        "config": engine,
        "check": ["learners", "host", "port", "run", "device", "timeout_s"],
        "run": ["run", "progress", *recipe],
        "demo": ["progress", *recipe],
    }
