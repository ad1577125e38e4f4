"""Entry point of the command line. A command's module is imported only if it is called, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from roundelay import log
from roundelay.core import interrupts
from roundelay.errors import UsageError, did_you_mean
from roundelay.log.output import surviving_output
from roundelay.version import __version__

COMMANDS = {
    "train": "train a task: in one process, with N local learners, or as one rank under torchrun, mpirun or srun",
    "simulate": "train on a simulated cluster: timing only, or a real task in virtual time",
    "plan": "predict the time of each strategy on a cluster and recommend one, or the cost of a slow rank",
    "replay": "repeat a recorded asynchronous run and compare the weights",
    "check": "check the environment: versions, devices, ports, disk, links between ranks",
    "config": "print the resolved settings and the origin of each",
    "list": "list strategies, topologies, examples, recipes, clusters and more",
    "report": "write an HTML page about one run or several runs",
    "compare": "compare groups of runs, paired by seed, with confidence intervals",
    "run": "run all stages of a speech recipe: from recordings to word error rates",
    "demo": "synthesize, align, train twice, decode and compare: the whole pipeline in a few minutes",
    "synth": "synthesize a corpus: many speakers, noise, reverberation",
    "lexicon": "generate pronunciations for the words of a text",
    "prepare": "check a data directory and extract features",
    "align": "align a data directory with a trained system: tied states and word times",
    "pack": "pack the training examples of a run into an archive",
    "decode": "recognize a data directory with a run",
    "score": "compute the word error rate of hypotheses, with confidence intervals",
    "export": "export the average model: safetensors, model card, ONNX, Kaldi posteriors",
    "bench": "measure throughput or network benefit on this machine",
    "calibrate": "measure this machine and write a cluster file for simulate and plan",
}
FORWARDED = {"bench": "roundelay.cli.bench", "calibrate": "roundelay.simulate.calibrate"}
"""Commands whose module parses its own arguments: main(argv)."""
EXTRAS = {
    "kaldifst": "speech", "kaldi_decoder": "speech", "kaldialign": "speech", "soundfile": "speech", "soxr": "speech",
    "espeakng_loader": "speech", "tensorboard": "tensorboard", "onnx": "onnx", "onnxruntime": "onnx", "onnxscript": "onnx",
    "mpi4py": "mpi", "shtab": "completion",
}  # fmt: skip
"""Module -> the optional dependency that installs it."""
SHELLS = ("bash", "zsh", "tcsh")


def top_parser() -> argparse.ArgumentParser:
    """Return the parser of the options before the command."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="roundelay",
        usage="roundelay [--help] [--version] COMMAND …",
        description="Asynchronous decentralized training for PyTorch.",
        epilog=f"commands:\n{commands}\n\nexamples:\n  roundelay train frames learners=2\n  roundelay train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"roundelay {__version__}")
    parser.add_argument(
        "--print-completion", choices=SHELLS, metavar="SHELL", help="print a completion script (bash, zsh, tcsh)"
    )
    return parser


def command_parser(name: str, parser: argparse.ArgumentParser | None = None) -> tuple[argparse.ArgumentParser, Any]:
    """Return the parser of one command, and its module."""
    module = importlib.import_module(f"roundelay.cli.{name}")
    parser = parser or argparse.ArgumentParser(prog=f"roundelay {name}")
    parser.description = COMMANDS[name][0].upper() + COMMANDS[name][1:] + "."
    parser.epilog = f"examples:\n{module.EXAMPLES}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    return parser, module


def full_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands, for completion scripts."""
    parser = top_parser()
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text)
        if name not in FORWARDED:
            command_parser(name, subparser)
    return parser


def dispatch(argv: list[str]) -> int:
    """Run the command that the arguments name and return its exit code."""
    if not argv or argv[0].startswith("-"):
        parser = top_parser()
        args = parser.parse_args(argv)
        if args.print_completion:
            return _print_completion(args.print_completion)
        parser.error("a COMMAND is required")
    name, *rest = argv
    if name not in COMMANDS:
        raise UsageError(f"unknown command '{name}'", where="command line", hint=did_you_mean(name, COMMANDS))
    log.configure()
    try:
        if name in FORWARDED:
            return int(importlib.import_module(FORWARDED[name]).main(rest) or 0)
        parser, module = command_parser(name)
        return int(module.run(parser.parse_intermixed_args(rest)) or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise missing_extra(EXTRAS[package], package, f"roundelay {name}") from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        path = str(error.filename)
        raise UsageError(
            f"a path must be shorter (got {len(path)} characters)",
            where=f"{path[:100]}…",
            hint="correct the argument or setting",
        ) from error


def missing_extra(extra: str, package: str, where: str) -> UsageError:
    """Return the error for an optional dependency that is not installed."""
    return UsageError(
        f"this command needs the {extra} extra ({package} is not installed)",
        where=where,
        hint=f"pip install 'roundelay[{extra}]'",
    )


def _print_completion(shell: str) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise missing_extra("completion", "shtab", "--print-completion") from error
    print(shtab.complete(full_parser(), shell))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and turn errors of this package into a message and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with surviving_output(), interrupts.install_handlers():
        return interrupts.exit_code_of(lambda: dispatch(arguments))


if __name__ == "__main__":
    sys.exit(main())
