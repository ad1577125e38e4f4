"""roundelay demo."""

from __future__ import annotations

import argparse

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
    from roundelay.recipes import demo

    return demo.run(args)
