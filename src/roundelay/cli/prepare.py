"""roundelay prepare."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from roundelay.cli.arguments import add_jobs, add_json, add_settings

EXAMPLES = """  roundelay prepare data/train features/train rate=16000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="a Kaldi data directory")
    parser.add_argument("out", metavar="OUT", help="folder to create")
    add_settings(parser, "rate=8000 mels=40 deltas=2 cmvn=speaker resample=true longest_s=120")
    parser.add_argument("--allow-pipes", action="store_true", help="run the commands in wav.scp; only for data you trust")
    add_jobs(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Extract the features of a data directory."""
    from roundelay import config
    from roundelay.recipes.config import FeatureConfig
    from roundelay.speech.corpora.kaldi_dir import read_data_dir
    from roundelay.speech.features.extract import FeatureOptions, extract

    options = asdict(config.load(None, args.overrides, FeatureConfig).settings)
    resample, longest_s = options.pop("resample"), options.pop("longest_s")
    corpus = read_data_dir(Path(args.data), allow_pipes=args.allow_pipes, need_text=False)
    store = extract(corpus, Path(args.out), FeatureOptions(**options), jobs=args.jobs, resample=resample, longest_s=longest_s)
    hours = store.total_frames / 360_000
    if args.json:
        row = {
            "folder": args.out,
            "utterances": len(store.ids),
            "hours": hours,
            "dim": store.dim,
            "skipped": dict(store.skipped),
        }
        print(json.dumps(row))
        return 0
    print(f"{args.out}: {len(store.ids)} utterances, {hours:.2f} h, {store.dim} dimensions")
    for name, cause in store.skipped.items():
        print(f"  skipped {name}: {cause}")
    return 0
