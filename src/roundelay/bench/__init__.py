"""The measurements behind `roundelay bench`: is asynchronous training worth it on these machines?

The benchmarks that reproduce papers are not part of the package; they are in the folder `benchmarks` of the repository.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from roundelay import config
from roundelay.core.contracts import Task
from roundelay.errors import UsageError

COMMANDS = {
    "throughput": "compare samples/s of sync, adpsgd and torch DDP with learners that do not communicate",
    "network": "measure the links between the ranks and predict which strategy is fastest on them",
}
"""Name on the command line -> one-line help. Each name is a module of this package with a function `main(argv)`."""

EXAMPLE_TASK = "roundelay.testing.tasks:Blstm"


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands share: [FILE] [key=value ...] --quick --json."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="FILE | key=value",
        help="a configuration file that names the task (default: an LSTM of 4 M parameters on noise) and settings, "
        "for example batch=32 learners=4",
    )
    parser.add_argument("--quick", action="store_true", help="take seconds instead of minutes; the result is less certain")
    parser.add_argument("--json", action="store_true", help="print JSON")


def load_task(inputs: Sequence[str]) -> tuple[Task, config.TrainConfig]:
    """Return the task and the settings that `inputs` name: at most one file, then `key=value` pairs.

    Raises:
        UsageError: two files, an unknown setting, or a batch size that is not a number.
    """
    files, overrides = [i for i in inputs if "=" not in i], [i for i in inputs if "=" in i]
    if len(files) > 1:
        raise UsageError(f"expected at most one file (got {len(files)})", where="bench", hint="name one configuration file")
    named = bool(files) or any(i.startswith("task=") for i in overrides)
    defaults = [] if named else [f'task="{EXAMPLE_TASK}"', "batch=8", "lr=0.01", "learners=2"]
    resolved = config.load(files[0] if files else None, [*defaults, *overrides])
    if not isinstance(resolved.settings.batch, int):
        raise UsageError(f"batch must be a number (got {resolved.settings.batch!r})", where="batch", hint="set batch=N")
    return config.build_task(resolved), resolved.settings
