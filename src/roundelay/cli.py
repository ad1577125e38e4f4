"""The command line: parses and calls. What a command needs is imported when it is called: `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

import roundelay
from roundelay.errors import RoundelayError
from roundelay.recipe import commands as speech

EPILOG = {
    "train": """examples:
  roundelay train examples/frames.toml strategy=adpsgd learners=2
  roundelay train examples/frames.toml strategy=kstep strategy_options.K=16 learners=4 run=runs/k16
  roundelay train examples/frames.toml run=runs/k16 resume=auto
  torchrun --nproc-per-node 4 -m roundelay train examples/frames.toml strategy=hierarchical(adpsgd)""",
    "list": """examples:
  roundelay list strategies
  roundelay list topologies --size 16 --json""",
    "simulate": """examples:
  roundelay simulate v100-8x8 strategy=hierarchical(adpsgd) steps=200
  roundelay simulate v100-8x8 strategy=sync learners=16 batch=160 samples=33860000 epochs=16 --json
  roundelay simulate my-cluster.toml task=examples/frames.toml strategy=adpsgd learners=4""",
    "config": """example:
  roundelay config examples/frames.toml strategy=kstep""",
    "demo": """example:
  roundelay demo --json""",
    "plan": """examples:
  roundelay plan examples/frames.toml cluster=v100-8x8
  roundelay plan recipes/switchboard cluster=v100-8x8 samples=33860000 --json
  roundelay plan --what-if runs/frames-sync-1 rank=7""",
    "replay": """example:
  roundelay train examples/frames.toml strategy=adpsgd learners=2 record=true run=runs/r1
  roundelay replay runs/r1""",
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
    "calibrate": "roundelay.bench.calibrate",
    "learning": "roundelay.bench.learning",
    "shapes": "roundelay.bench.shapes",
    "stragglers": "roundelay.bench.stragglers",
    "ksteps": "roundelay.bench.ksteps",
    "theory": "roundelay.bench.theory",
    "batches": "roundelay.bench.batches",
    "speech": "roundelay.recipe.strategies",
    "road": "roundelay.recipe.road",
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

    p = command("list", "list strategies, topologies, wires, acoustic models or virtual clusters", run_list)
    p.add_argument("what", choices=["strategies", "topologies", "wires", "models", "clusters"])
    p.add_argument("--size", type=int, default=8, help="learners, for the figures of topologies (default 8)")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("simulate", "train on a virtual cluster: timing alone, or a real task in virtual time", run_simulate)
    p.add_argument("cluster", metavar="CLUSTER", help="a preset (roundelay list clusters) or a TOML file")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="strategy, learners, batch, steps, model, task, …")
    p.add_argument("--json", action="store_true", help="print the figures as JSON at the end")

    p = command("config", "print the resolved settings and where each came from", run_config)
    p.add_argument("file", metavar="FILE")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("plan", "what each strategy would take on a cluster, and which to choose; or what a slow rank costs", run_plan)
    p.add_argument("file", metavar="FILE", nargs="?", default="", help="a recipe, or a settings file of roundelay train")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="cluster=NAME, samples=N, model=NAME, batch=N, …")
    p.add_argument("--what-if", metavar="RUN", help="a run's directory: what if rank=N had been as fast as the others?")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("replay", "do a recorded asynchronous run again, event by event, and compare the weights", run_replay)
    p.add_argument("run", metavar="RUN", help="the directory of a run that was trained with record=true")
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


def run_train(args: argparse.Namespace) -> int:
    from roundelay import verbs

    return verbs.run_train(args)


def run_simulate(args: argparse.Namespace) -> int:
    from roundelay.virtual import command

    return command.run_simulate(args)


def run_list(args: argparse.Namespace) -> int:
    if args.what == "clusters":
        from roundelay.virtual import command

        return command.run_list_clusters(args.json)
    from roundelay import verbs

    return verbs.run_list(args)


def run_config(args: argparse.Namespace) -> int:
    from roundelay import verbs

    return verbs.run_config(args)


def run_plan(args: argparse.Namespace) -> int:
    from roundelay.virtual import plan

    return plan.run_plan(args)


def run_replay(args: argparse.Namespace) -> int:
    from roundelay import verbs

    return verbs.run_replay(args)


def run_demo(args: argparse.Namespace) -> int:
    from roundelay.bench.demo import demo

    return demo(as_json=args.json)


def run_bench(args: argparse.Namespace) -> int:
    return int(importlib.import_module(BENCHES[args.which]).main(args.rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
