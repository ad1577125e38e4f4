"""roundelay export."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_jobs, add_json

EXAMPLES = """  roundelay export runs/spoken exported
  roundelay export runs/spoken exported --onnx --posteriors data/test"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory of a recipe")
    parser.add_argument("out", metavar="OUT", help="folder to create")
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx and verify its posteriors (extra: onnx)")
    parser.add_argument(
        "--posteriors",
        default="",
        metavar="DATA",
        help="also write posteriors as Kaldi ark and scp: of a data directory, or of features (a.scp+b.scp) as in the recipe",
    )
    add_jobs(parser)
    add_json(parser, "print the folder and a summary of each file as JSON")


def run(args: argparse.Namespace) -> int:
    """Export the network of a run."""
    from roundelay.recipes.inference import export_run

    lines = export_run(Path(args.run), Path(args.out), onnx=args.onnx, posteriors=args.posteriors, jobs=args.jobs)
    print(json.dumps({"folder": args.out, "summary": lines}) if args.json else "\n".join(lines))
    return 0
