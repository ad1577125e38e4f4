"""The command line: parses and calls. What a command needs is imported when it is called: `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

import roundelay
from roundelay import log
from roundelay.cli import speech
from roundelay.core import interrupts

BENCHES: dict[str, str] = {}
EPILOG = {
    "train": """examples:
  roundelay train examples/frames.toml strategy=adpsgd learners=2
  roundelay train examples/frames.toml strategy=kstep strategy_options.K=16 learners=4 run=runs/k16
  roundelay train examples/frames.toml run=runs/k16 resume=auto
  torchrun --nproc-per-node 4 -m roundelay train examples/frames.toml 'strategy=hierarchical(adpsgd)'
  mpirun -n 4 roundelay train examples/frames.toml backend=mpi strategy=kstep""",
    "list": """examples:
  roundelay list strategies
  roundelay list recipes
  roundelay list topologies --size 16 --json""",
    "simulate": """examples:
  roundelay simulate v100-8x8 'strategy=hierarchical(adpsgd)' steps=200
  roundelay simulate v100-8x8 strategy=sync learners=16 batch=160 samples=33860000 epochs=16 --json
  roundelay simulate my-cluster.toml task=examples/frames.toml strategy=adpsgd learners=4""",
    "config": """examples:
  roundelay config examples/frames.toml strategy=kstep
  roundelay config recipes/spoken train.learners=4""",
    "plan": """examples:
  roundelay plan examples/frames.toml cluster=v100-8x8
  roundelay plan recipes/switchboard cluster=v100-8x8 samples=33860000 --json
  roundelay plan --what-if runs/frames-sync-1 rank=7""",
    "replay": """example:
  roundelay train examples/frames.toml strategy=adpsgd learners=2 record_order=true run=runs/r1
  roundelay replay runs/r1""",
    "bench": """examples:
  roundelay bench throughput --quick
  roundelay bench overhead --json
  sudo roundelay bench network --quick""",
    "check": """examples:
  roundelay check
  roundelay check learners=2 run=runs/next
  torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr first --master-port 29500 -m roundelay check bind_address=auto""",
    "completion": """examples:
  roundelay completion bash > ~/.local/share/bash-completion/completions/roundelay
  source <(roundelay completion zsh)
  roundelay completion fish > ~/.config/fish/completions/roundelay.fish""",
    "report": """examples:
  roundelay report runs/frames-adpsgd-1
  roundelay report runs/adpsgd runs/sync --out compared.html""",
    "compare": """examples:
  roundelay compare runs/sync-0 runs/sync-1 runs/adpsgd-0 runs/adpsgd-1
  roundelay compare runs/* --json""",
    **speech.EPILOG,
}
LISTS = [
    "strategies",
    "topologies",
    "backends",
    "models",
    "recipes",
    "stages",
    "optimizers",
    "schedules",
    "benchmarks",
    "clusters",
]


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

    p = command("train", "train a task: alone, on local learners, or as one rank under torchrun, mpirun or srun", run_train)
    p.add_argument("file", metavar="FILE", help="a TOML file with settings")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    p.add_argument("--json", action="store_true", help="print the run's metrics as JSON at the end")

    p = command("list", f"list {', '.join(LISTS[:-1])} or {LISTS[-1]}", run_list)
    p.add_argument("what", choices=LISTS)
    p.add_argument("--size", type=int, default=8, help="learners, for the metrics of topologies (default 8)")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("simulate", "train on a virtual cluster: timing alone, or a real task in virtual time", run_simulate)
    p.add_argument("cluster", metavar="CLUSTER", help="a preset (roundelay list clusters) or a TOML file")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="strategy, learners, batch, steps, model, task, …")
    p.add_argument("--json", action="store_true", help="print the metrics as JSON at the end")

    p = command("config", "print the resolved settings and where each came from", run_config)
    p.add_argument("file", metavar="FILE", help="a TOML file with settings, or the folder of a recipe")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("plan", "what each strategy would take on a cluster, and which to choose; or what a slow rank costs", run_plan)
    p.add_argument("file", metavar="FILE", nargs="?", default="", help="a recipe, or a settings file of roundelay train")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="cluster=NAME, samples=N, model=NAME, batch=N, …")
    p.add_argument("--what-if", metavar="RUN", help="a run's directory: what if rank=N had been as fast as the others?")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("replay", "do a recorded asynchronous run again, event by event, and compare the weights", run_replay)
    p.add_argument("run", metavar="RUN", help="the directory of a run that was trained with record_order=true")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("check", "will a run work here, and what would it use? Alone, with learners=N, or under torchrun", run_check)
    p.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run: learners, host, port, run, device")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command("completion", "print a script that completes commands, options and settings in your shell", run_completion)
    p.add_argument("shell", choices=["bash", "zsh", "fish"])

    p = command("bench", f"measure: {', '.join(BENCHES)}", run_bench)
    p.add_argument("which", choices=BENCHES)
    p.add_argument("rest", nargs=argparse.REMAINDER, help="options of that benchmark; see roundelay bench WHICH --help")

    p = command("report", "write one HTML page about a run, or about several side by side", run_report)
    p.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, of training or of a recipe")
    p.add_argument("--out", default="", metavar="FILE", help="default: report.html in the run; for several runs, here")
    p.add_argument("--json", action="store_true", help="print the page's path and the runs' metrics as JSON")

    p = command("compare", "compare groups of runs with equal settings, paired by seed, with intervals", run_compare)
    p.add_argument("runs", nargs="+", metavar="RUN", help="run directories; the first one's group is the base")
    p.add_argument("--json", action="store_true", help="print JSON")
    speech.add(command)
    return top


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; settings (key=value) may stand before and behind options, which argparse by itself does not allow."""
    top = parser()
    args, late = top.parse_known_args(argv)
    strange = [a for a in late if not hasattr(args, "overrides") or a.startswith("-") or "=" not in a]
    if strange:
        top.error(f"unrecognized arguments: {' '.join(strange)}")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    log.configure()
    with interrupts.install_handlers():
        return interrupts.exit_code_of(lambda: args.run_command(args))


def run_train(args: argparse.Namespace) -> int:
    from roundelay.cli import train

    return train.run_train(args)


def run_simulate(args: argparse.Namespace) -> int:
    from roundelay.cli import simulate

    return simulate.run_simulate(args)


def run_list(args: argparse.Namespace) -> int:
    if args.what == "clusters":
        from roundelay.cli import simulate

        return simulate.run_list_clusters(args.json)
    from roundelay.cli import train

    return train.run_list(args)


def run_config(args: argparse.Namespace) -> int:
    from roundelay.cli import train

    return train.run_config(args)


def run_plan(args: argparse.Namespace) -> int:
    from roundelay.cli import plan

    return plan.run_plan(args)


def run_replay(args: argparse.Namespace) -> int:
    from roundelay.cli import train

    return train.run_replay(args)


def run_check(args: argparse.Namespace) -> int:
    from roundelay.cli import check

    return check.run(args)


def run_completion(args: argparse.Namespace) -> int:
    from roundelay import completion
    from roundelay.cli import train

    print(completion.script(args.shell, completion.words_of(parser(), train.keys_of_commands()), train.VALUES), end="")
    return 0


def run_report(args: argparse.Namespace) -> int:
    from roundelay.recipes import hypotheses

    return hypotheses.run_report(args)


def run_compare(args: argparse.Namespace) -> int:
    from roundelay.recipes import compare

    return compare.run_compare(args)


def run_bench(args: argparse.Namespace) -> int:
    return int(importlib.import_module(BENCHES[args.which]).main(args.rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
