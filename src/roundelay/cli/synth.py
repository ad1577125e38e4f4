"""roundelay synth."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from roundelay.cli.arguments import add_jobs, add_json, add_settings

EXAMPLES = """  roundelay synth corpora/spoken
  roundelay synth corpora/wide rate=16000 train_speakers=40 train_utterances=800"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder to create")
    add_settings(parser, "options of the synthesizer, such as seed=1 or snr=[5,25]")
    add_jobs(parser)
    add_json(parser, "print the folder and the options as JSON")


def run(args: argparse.Namespace) -> int:
    """Synthesize the train, dev and test sets."""
    from roundelay import config
    from roundelay.speech.synth.corpus import SynthOptions, synthesize

    options = config.load(None, args.overrides, SynthOptions).settings
    synthesize(Path(args.out), options, jobs=args.jobs, progress="none" if args.json else "auto")
    if args.json:
        print(json.dumps({"folder": args.out, "options": asdict(options)}))
    return 0
