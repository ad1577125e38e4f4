"""roundelay compare."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_json

EXAMPLES = """  roundelay compare runs/sync-0 runs/sync-1 runs/adpsgd-0 runs/adpsgd-1
  roundelay compare runs/* --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories; the group of the first one is the baseline")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print metrics by group and paired differences."""
    from roundelay.recipes.compare import compare, text_of

    result = compare([Path(path) for path in args.runs])
    print(json.dumps(result, indent=1) if args.json else text_of(result))
    return 0
