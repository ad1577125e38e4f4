"""roundelay demo."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_jobs, add_json, add_settings

EXAMPLES = """  roundelay demo
  roundelay demo --out demo-even train.straggler= --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "progress=rich|plain|none, or section.key=value of the demo's recipe")
    parser.add_argument("--out", default="demo", metavar="DIR", help="folder for all files (default demo)")
    add_jobs(parser)
    add_json(parser, "print the table as JSON at the end")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    from roundelay import config
    from roundelay.cli.run import RunOptions
    from roundelay.recipes import config as recipe_config
    from roundelay.recipes.demo import RECIPE, run_demo, table
    from roundelay.recipes.pipeline_context import PipelineContext

    own, overrides = config.split_items(args.overrides, RunOptions)
    options = config.load(None, own, RunOptions).settings
    command = ["roundelay", "demo", *(["--out", args.out] if args.out != "demo" else []), *args.overrides]
    context = PipelineContext(recipe_config.load(RECIPE, overrides), Path(args.out), args.jobs, options.progress)
    result = run_demo(context, command)
    print(json.dumps({**result, "report": str(context.layout.report)}) if args.json else table(result), flush=True)
    return 0
