"""roundelay run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from roundelay.cli.arguments import add_jobs, add_json, add_settings
from roundelay.core.settings import setting

EXAMPLES = """  roundelay run spoken
  roundelay run spoken train.strategy=adpsgd train.learners=4 run=runs/spoken-adpsgd
  roundelay run digits --until align"""


@dataclass(frozen=True)
class RunOptions:
    """Settings of the command that are not the recipe's."""

    run: str = setting("", help="Run directory; default runs/<recipe>.")
    progress: str = setting("auto", choices=("auto", "rich", "plain", "none"), help="Progress display on the terminal.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a folder with a recipe.toml, or a recipe by name (roundelay list recipes)"
    )
    add_settings(parser, "run=DIR, progress=rich|plain|none, or section.key=value of the recipe")
    parser.add_argument("--until", default="", metavar="STAGE", help="stop after this stage (roundelay list stages)")
    add_jobs(parser)
    add_json(parser, "print the result as JSON at the end")


def run(args: argparse.Namespace) -> int:
    """Run the stages that are not done yet and print the word error rates."""
    from roundelay import config
    from roundelay.core import interrupts
    from roundelay.recipes import config as recipe_config
    from roundelay.recipes import pipeline
    from roundelay.recipes.pipeline_context import PipelineContext

    own, overrides = config.split_items(args.overrides, RunOptions)
    options = config.load(None, own, RunOptions).settings
    recipe = recipe_config.load(args.recipe, overrides)
    folder = Path(options.run) if options.run else pipeline.default_run(recipe)
    context = PipelineContext(recipe, folder, args.jobs, options.progress)
    pipeline.check_stage(recipe, args.until)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command.json").write_text(json.dumps({"command": ["roundelay", *sys.argv[1:]], "folder": os.getcwd()}))
    with interrupts.as_interrupted(str(folder), "run the same command again to continue"):
        result = pipeline.run_recipe(context, args.until)
    if result:
        print(json.dumps(result) if args.json else pipeline.table(result))
    return 0
