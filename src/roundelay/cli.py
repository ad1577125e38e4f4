"""The command line: parses, builds, calls."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import roundelay
from roundelay import config, strategy, topology
from roundelay.errors import RoundelayError, UsageError
from roundelay.recipe import commands as speech
from roundelay.train.launch import start_learners
from roundelay.train.learner import build_strategy
from roundelay.train.loop import Plan, train
from roundelay.train.place import WIRES, alone, check_wire, from_environment, under_launcher
from roundelay.train.pool import run_threads

EPILOG = {
    "train": """examples:
  roundelay train examples/frames.toml strategy=adpsgd learners=2
  roundelay train examples/frames.toml strategy=kstep strategy_options.K=16 learners=4 run=runs/k16
  roundelay train examples/frames.toml run=runs/k16 resume=auto
  torchrun --nproc-per-node 4 -m roundelay train examples/frames.toml strategy=hierarchical(adpsgd)""",
    "list": """examples:
  roundelay list strategies
  roundelay list topologies --size 16 --json""",
    "config": """example:
  roundelay config examples/frames.toml strategy=kstep""",
    "demo": """example:
  roundelay demo --json""",
    "bench": """examples:
  roundelay bench throughput --quick
  roundelay bench overhead --json
  sudo roundelay bench network --quick""",
    **speech.EPILOG,
}
BENCHES = {
    "throughput": "roundelay.bench.throughput",
    "network": "roundelay.bench.network",
    "overhead": "roundelay.bench.overhead",
    "learning": "roundelay.bench.learning",
    "speech": "roundelay.recipe.strategies",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="roundelay",
        description="Distributed training in which learners talk to their neighbours, one step behind.",
        epilog="example:\n  roundelay train examples/frames.toml strategy=adpsgd learners=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"roundelay {roundelay.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, help: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=help, description=help, epilog=EPILOG[name], formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.set_defaults(run_command=run)
        return made

    p = command("train", "train a task: alone, on local learners, or as one rank under torchrun", run_train)
    p.add_argument("file", metavar="FILE", help="a TOML file with settings")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    p.add_argument("--json", action="store_true", help="print the run's figures as JSON at the end")

    p = command("list", "list strategies, topologies, wires or acoustic models", run_list)
    p.add_argument("what", choices=["strategies", "topologies", "wires", "models"])
    p.add_argument("--size", type=int, default=8, help="learners, for the figures of topologies (default 8)")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("config", "print the resolved settings and where each came from", run_config)
    p.add_argument("file", metavar="FILE")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("demo", "train the example task with several strategies on two learners and compare them", run_demo)
    p.add_argument("--json", action="store_true", help="print the table as JSON at the end")

    p = command("bench", f"measure: {', '.join(BENCHES)}", run_bench)
    p.add_argument("which", choices=BENCHES)
    p.add_argument("rest", nargs=argparse.REMAINDER, help="options of that benchmark; see roundelay bench WHICH --help")
    speech.add(command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return int(args.run_command(args) or 0)
    except RoundelayError as error:
        print(f"roundelay: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("roundelay: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


# -- train -------------------------------------------------------------------------------------------------------------


def run_train(args: argparse.Namespace) -> int:
    resolved = config.load(args.file, args.overrides)
    settings = resolved.settings
    config.search_beside(resolved)
    check_wire(settings.wire)
    made = build_strategy(config.engine(settings))
    topology.topology(settings.topology)
    if under_launcher():
        return _run_rank(resolved, args.json)
    run = Path(settings.run) if settings.run else _fresh_run(args.file, settings.strategy)
    task = config.build_task(resolved)  # mistakes show before anything is started
    if settings.learners == 1 or settings.wire == "inproc":
        _write_config(run, resolved)
        return _run_threads(task, resolved, run, args.json)
    _write_config(run, resolved)
    here = f"run={json.dumps(str(run), ensure_ascii=False)}"
    command = [sys.executable, "-m", "roundelay", "train", args.file, *args.overrides, here]
    if args.json:
        command.append("--json")
    return start_learners(
        command,
        settings.learners,
        host="127.0.0.1" if settings.host == "auto" else settings.host,
        port=settings.port,
        run=run,
        survives_death=made.traits.survives_death,
    )


def _fresh_run(file: str, strategy_name: str) -> Path:
    stem = f"{Path(file).stem}-{strategy_name.replace('(', '-').replace(')', '').replace(':', '.')}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"


def _write_config(run: Path, resolved: config.Resolved) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(config.dumps(resolved.settings), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the run directory: {error.strerror}", where=f"run={run}", do="choose another run=…"
        ) from error


def plan_of(settings: config.Settings, run: Path | None) -> Plan:
    return Plan(
        epochs=settings.epochs,
        batch=settings.batch,
        optimizer=settings.optimizer,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        run=run,
        resume=settings.resume,
        save_every_epochs=settings.save_every_epochs,
        evaluate=settings.evaluate,
        keep=settings.keep,
        progress=settings.progress,
    )


def _run_rank(resolved: config.Resolved, as_json: bool) -> int:
    """This process is one rank of a launched job."""
    settings = resolved.settings
    _one_thread_per_learner()
    options = config.engine(settings)
    agreed = {
        k: getattr(settings, k)
        for k in ("task", "strategy", "strategy_options", "topology", "wire", "epochs", "lr", "seed", "exact")
    }
    place = from_environment(
        wire=settings.wire, host=settings.host, timeout_s=settings.timeout_s, device=settings.device,
        machines=settings.machines, digest=agreed,
    )  # fmt: skip
    run = Path(settings.run) if settings.run else None
    if run is not None and place.rank == 0 and not (run / "config.toml").exists():
        _write_config(run, resolved)
    result = train(config.build_task(resolved), place, options, plan_of(settings, run))
    if place.rank == min(place.net.living()):
        _show(result, run, as_json)
    return 0


def _run_threads(task: Any, resolved: config.Resolved, run: Path, as_json: bool) -> int:
    settings = resolved.settings
    options, plan = config.engine(settings), plan_of(settings, run)
    if settings.learners == 1:
        _one_thread_per_learner()
        result = train(task, alone(settings.device), options, plan)
    else:
        results = run_threads(
            lambda place: train(task, place, options, plan), size=settings.learners, machines=settings.machines,
            timeout_s=threading.TIMEOUT_MAX,
        )  # fmt: skip
        result = results[0]
    _show(result, run, as_json)
    return 0


def _one_thread_per_learner() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _show(result: dict[str, Any], run: Path | None, as_json: bool) -> None:
    figures = result.get("figures") or {}
    if as_json:
        print(json.dumps({"run": str(run) if run else None, **result}), flush=True)
        return
    ranks = result.get("ranks", {})
    rate = sum(r["samples_per_s"] for r in ranks.values()) if ranks else result["samples_per_s"]
    held_out = "  ".join(f"{k} {v:.4f}" for k, v in figures.items())
    print(f"done: {held_out}  {rate:.0f} samples/s" + (f"  run: {run}" if run else ""), flush=True)


# -- list, config, demo, bench -----------------------------------------------------------------------------------------


def run_list(args: argparse.Namespace) -> int:
    if args.what == "strategies":
        found: dict[str, Any] = {name: strategy.describe(name) for name in strategy.STRATEGIES}
        lines = [f"{name:<14} {d['equation']}\n{'':<14} {d['use']}" for name, d in found.items()]
    elif args.what == "topologies":
        found = {name: topology.describe(name, args.size) for name in topology.TOPOLOGIES}
        lines = [f"{name:<14} {d['description']}  (gap {d['gap']:.4f} at {args.size} learners)" for name, d in found.items()]
    elif args.what == "models":
        from roundelay.asr.model import PRESETS

        found = {name: {"parameters": shape.parameters, **asdict(shape), "use": use} for name, (shape, use) in PRESETS.items()}
        lines = [f"{name:<14} {d['parameters']:>11,} parameters  {d['use']}" for name, d in found.items()]
    else:
        found = dict(WIRES)
        lines = [f"{name:<14} {text}" for name, text in found.items()]
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines))
    return 0


def run_config(args: argparse.Namespace) -> int:
    resolved = config.load(args.file, args.overrides)
    config.search_beside(resolved)
    build_strategy(config.engine(resolved.settings))
    if args.json:
        rows = {k: {"value": getattr(resolved.settings, k), "from": o} for k, o in resolved.origin.items()}
        print(json.dumps(rows, indent=1))
    else:
        print(config.explain(resolved))
    return 0


def run_demo(args: argparse.Namespace) -> int:
    from roundelay.bench.demo import demo

    return demo(as_json=args.json)


def run_bench(args: argparse.Namespace) -> int:
    return int(importlib.import_module(BENCHES[args.which]).main(args.rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
