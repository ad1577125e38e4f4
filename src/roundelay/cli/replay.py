"""roundelay replay."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_json
from roundelay.errors import UsageError

EXAMPLES = """  roundelay train frames strategy=adpsgd learners=2 record_order=true run=runs/r1
  roundelay replay runs/r1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory of a training with record_order=true")
    add_json(parser)


def load_run(run: Path) -> Path:
    """Return the settings file of a run directory."""
    if not (run / "config.toml").is_file():
        raise UsageError("not a run directory: there is no config.toml", where=str(run), hint="give the run=… of a training")
    return run / "config.toml"


def run(args: argparse.Namespace) -> int:
    """Repeat the run in its recorded order and print whether the weights are equal."""
    from roundelay import config
    from roundelay.log.progress import Progress
    from roundelay.replay.replay import replay

    folder = Path(args.run)
    resolved = config.load(load_run(folder))
    config.extend_sys_path(resolved)
    progress = Progress("replay", "events", "none" if args.json else "auto")
    try:
        result = replay(
            folder,
            config.build_task(resolved),
            resolved.settings,
            config.computation_settings(resolved.settings),
            progress.step,
        )
    finally:
        progress.close()
    if args.json:
        print(json.dumps(result))
        return 0
    summary = f"{result['steps']} steps of {result['learners']} learners, {result['events']} events"
    if result["equal"]:
        print(f"replayed {summary}: the last weights of all learners are equal, bit for bit")
    else:
        difference = f"{result['largest_difference']:.3g} (largest weight {result['largest_weight']:.3g})"
        print(f"replayed {summary}: the weights differ by at most {difference}")
    if "average_difference" in result:
        print(f"the average model differs from the saved one by at most {result['average_difference']:.3g}")
    return 0
