"""roundelay report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_json

EXAMPLES = """  roundelay report runs/frames-adpsgd-1
  roundelay report runs/adpsgd runs/sync --out compared.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories of training or of recipes")
    parser.add_argument(
        "--out", default="", metavar="FILE", help="page to write; default: RUN/report.html, or report.html for several runs"
    )
    add_json(parser, "print the page's path and the runs' metrics as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from roundelay.recipes.hypotheses import metrics, report

    page, runs = report([Path(path) for path in args.runs], Path(args.out) if args.out else None)
    print(json.dumps({"report": str(page), "runs": [metrics(run) for run in runs]}, indent=1) if args.json else page)
    return 0
