"""roundelay align."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_jobs, add_json

EXAMPLES = """  roundelay align runs/spoken --data data/new --out alignments/new"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory of a recipe")
    parser.add_argument("--data", required=True, metavar="DIR", help="a Kaldi data directory")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--system", default="tri", choices=["mono", "tri", "sat", "lstm"], help="system to align with (default tri)"
    )
    add_jobs(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Align a data directory and write word times."""
    from roundelay.recipes.inference import align_data

    summary = align_data(Path(args.run), Path(args.data), Path(args.out), args.system, args.jobs)
    print(json.dumps({"folder": args.out, "system": args.system, "summary": summary}) if args.json else summary)
    return 0
