"""roundelay train."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.cli.arguments import add_json, add_settings, next_run_dir
from roundelay.errors import DataError, RoundelayError, UsageError

if TYPE_CHECKING:
    from roundelay.config import ResolvedConfig, TrainConfig
    from roundelay.launch.context import DistributedContext

EXAMPLES = """  roundelay train frames strategy=adpsgd learners=2
  roundelay train frames strategy=kstep strategy_options.K=16 learners=4 run=runs/k16
  roundelay train frames run=runs/k16 resume=auto
  torchrun --nproc-per-node 4 -m roundelay train frames 'strategy=hierarchical(adpsgd)'
  mpirun -n 4 roundelay train frames backend=mpi strategy=kstep

settings and their defaults: roundelay config frames"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a TOML file of settings, or an example by name (roundelay list examples)")
    add_settings(parser, "settings that override those of the file")
    add_json(parser, "print the run's metrics as JSON at the end")


def run(args: argparse.Namespace) -> int:
    """Validate all settings, then train here or start the local learners."""
    from roundelay import config
    from roundelay.engine.validate import validate_run
    from roundelay.launch.context import under_launcher
    from roundelay.launch.local import start_learners
    from roundelay.testing import examples

    file = examples.find(args.file)
    resolved = config.load(file, args.overrides)
    settings = resolved.settings
    strategy = validate(resolved)
    if under_launcher():
        return _run_rank(resolved, args.json)
    run_dir = settings.run_dir or next_run_dir(file.stem, settings.strategy)
    settings = replace(settings, run=str(run_dir))
    validate_run(settings, settings.learners)
    task = config.build_task(resolved)
    if settings.learners > 1 and settings.backend == "mpi":
        raise UsageError(
            "backend=mpi needs learners that MPI has started",
            where=f"learners={settings.learners}",
            hint=f"run mpirun -n {settings.learners} roundelay train {args.file} backend=mpi …",
        )
    check_writable(run_dir)
    if settings.learners == 1 or settings.backend == "threads":
        return _run_threads(task, settings, args.json)
    override = f"run={json.dumps(str(run_dir), ensure_ascii=False)}"
    command = [sys.executable, "-m", "roundelay", "train", args.file, *args.overrides, override]
    if args.json:
        command.append("--json")
    return start_learners(
        command,
        lambda: _run_rank(config.load(file, [*args.overrides, override]), args.json),
        settings.learners,
        bind_address="127.0.0.1" if settings.bind_address == "auto" else settings.bind_address,
        port=settings.store_port,
        run=run_dir,
        survives_failures=strategy.traits.survives_failures,
        model=run_dir / "model.safetensors",
    )


def validate(resolved: ResolvedConfig[TrainConfig]) -> Any:
    """Return the strategy of the settings; raise a UsageError if strategy, topology, backend or device do not exist."""
    from roundelay import config, topology
    from roundelay.engine.learner import build_strategy
    from roundelay.launch.context import check_backend, choose_device

    config.extend_sys_path(resolved)
    check_backend(resolved.settings.backend)
    strategy = build_strategy(resolved.settings)
    topology.topology(resolved.settings.topology)
    choose_device(resolved.settings.device, 0)
    return strategy


def check_writable(run: Path) -> None:
    """Raise a UsageError if the run directory cannot be created or written; create nothing."""
    try:
        existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:  # too long, or a NUL byte
        cause = getattr(error, "strerror", None) or error
        raise UsageError(f"run must be a usable path: {cause}", where="run", hint="choose another run=…") from error
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        cause = "permission denied" if existing.is_dir() else f"{existing} is not a directory"
        raise UsageError(f"cannot write the run directory: {cause}", where=f"run={run}", hint="choose another run=…")


def write_config(run: Path, settings: TrainConfig) -> None:
    """Write RUN/config.toml. Called when the run starts: a refused run changes nothing on disk."""
    from roundelay import config

    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(config.dumps(settings), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the run directory: {error.strerror}", where=f"run={run}", hint="choose another run=…"
        ) from error


def _train(task: Any, context: DistributedContext, settings: TrainConfig) -> dict[str, Any]:
    from roundelay import config
    from roundelay.engine.trainer import train

    def on_start() -> None:
        if context.rank == 0 and settings.run_dir is not None:
            write_config(settings.run_dir, settings)

    recorded = config.computation_settings(settings) if settings.record_order else None
    try:
        return train(task, context, settings, record_settings=recorded, on_start=on_start)
    except RoundelayError:
        raise
    except Exception as error:
        if settings.run_dir is None or settings.run_dir.is_dir():
            raise
        raise DataError(
            "the run directory was removed during the run",
            where=f"run={settings.run_dir}",
            hint="start again; leave the directory in place until the run ends",
        ) from error


def _run_rank(resolved: ResolvedConfig[TrainConfig], as_json: bool) -> int:
    """Train as one rank of a launched job."""
    from roundelay import config
    from roundelay.core.settings import common_settings
    from roundelay.launch.context import context_from_env

    settings = resolved.settings
    _limit_threads()
    with context_from_env(
        backend=settings.backend, bind_address=settings.bind_address, timeout_s=settings.timeout_s, device=settings.device,
        simulate_nodes=settings.simulate_nodes, digest=common_settings(settings),
        failure_s=settings.failure_s,
    ) as context:  # fmt: skip
        try:
            result = _train(config.build_task(resolved), context, settings)
        except BaseException as error:
            context.abort_job(error)
            raise
    if "ranks" in result:  # this rank has collected the metrics of the run
        _show(result, settings.run_dir, as_json)
    return 0


def _run_threads(task: Any, settings: TrainConfig, as_json: bool) -> int:
    """Train in this process: one learner, or several in threads."""
    from roundelay.launch.context import single_process_context
    from roundelay.launch.threads import run_threads

    if settings.learners == 1:
        _limit_threads()
        result = _train(task, single_process_context(settings.device), settings)
    else:
        result = run_threads(
            lambda context: _train(task, context, settings), size=settings.learners, simulate_nodes=settings.simulate_nodes,
            timeout_s=threading.TIMEOUT_MAX,
        )[0]  # fmt: skip
    _show(result, settings.run_dir, as_json)
    return 0


def _limit_threads() -> None:
    """Use one intra-op thread per learner unless OMP_NUM_THREADS says otherwise."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _show(result: dict[str, Any], run: Path | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": str(run) if run else None, **result}), flush=True)
        return
    ranks = result.get("ranks", {})
    speed = sum(r["samples_per_s"] for r in ranks.values()) if ranks else result["samples_per_s"]
    held_out = "  ".join(f"{k} {v:.4f}" for k, v in (result.get("metrics") or {}).items())
    print(f"done: {held_out}  {speed:.0f} samples/s" + (f"  run: {run}" if run else ""), flush=True)
