"""roundelay config."""

from __future__ import annotations

import argparse
import json

from roundelay.cli.arguments import add_json, add_settings

EXAMPLES = """  roundelay config frames strategy=kstep
  roundelay config spoken train.learners=4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a file of settings, a recipe, or the name of an example or a recipe")
    add_settings(parser, "settings that override those of the file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print every setting with its value and origin."""
    from roundelay import config
    from roundelay.cli.inputs import is_recipe
    from roundelay.cli.train import validate
    from roundelay.testing import examples

    if is_recipe(args.file):
        from roundelay.recipes import config as recipe_config

        recipe = recipe_config.resolve(args.file, args.overrides)
        rows, text = config.resolved_rows(recipe), config.explain(recipe)
    else:
        resolved = config.load(examples.find(args.file), args.overrides)
        validate(resolved)
        rows, text = config.resolved_rows(resolved), config.explain(resolved)
    print(json.dumps(rows, indent=1) if args.json else text)
    return 0
