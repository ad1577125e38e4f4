"""roundelay pack."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_jobs, add_json, note
from roundelay.errors import UsageError

EXAMPLES = """  roundelay pack runs/spoken archives/spoken
  roundelay pack runs/spoken archives/whole examples=utterances compress=false
  roundelay pack features=feats.scp+ivectors.scp alignments=runs/x/alignments/train archives/x context=10"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="RUN OUT key=value",
        help="run directory of a recipe (or features=… and alignments=…), folder to create, and options: "
        "window=21 context=0 seed=0 examples=chunks|utterances compress=true block=256",
    )
    parser.add_argument("--verify", action="store_true", help="read the archive back and verify all checksums")
    add_jobs(parser)
    add_json(parser, "print the archive's metrics as JSON")


def run(args: argparse.Namespace) -> int:
    """Pack training examples into an archive."""
    from roundelay import config
    from roundelay.recipes import pack as packing

    settings = dict(config.parse_item(item) for item in args.arguments if "=" in item)
    folders = [item for item in args.arguments if "=" not in item]
    if len(folders) == 2:
        options = packing.packing_of(Path(folders[0]), settings)
    elif len(folders) == 1 and {"features", "alignments"} <= set(settings):
        options = packing.packing_of(Path(), settings)
    else:
        raise UsageError("pack needs RUN and OUT, or features=…, alignments=… and OUT", where="command line", hint="see --help")
    archive = packing.pack(options, Path(folders[-1]), jobs=args.jobs)
    if args.verify:
        archive.verify()
        note("all block checksums verified")
    if args.json:
        print(json.dumps(packing.describe(archive)))
    return 0
