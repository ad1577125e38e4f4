"""roundelay score."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roundelay.cli.arguments import add_json
from roundelay.errors import UsageError

EXAMPLES = """  roundelay score data/test/text hyp.txt --utt2spk data/test/utt2spk
  roundelay score data/test/text hyp.txt --against other.txt --utt2spk data/test/utt2spk"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reference", metavar="REF", help="a Kaldi text file")
    parser.add_argument("hypotheses", metavar="HYP", help="a Kaldi text file")
    parser.add_argument("--against", default="", metavar="HYP2", help="hypotheses of another system, for a paired comparison")
    parser.add_argument(
        "--utt2spk",
        default="",
        metavar="FILE",
        help="speakers, for intervals over speakers; default: one speaker per utterance",
    )
    parser.add_argument("--confusions", type=int, default=10, metavar="N", help="list the N most frequent confusions")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the word error rate and its confidence interval."""
    from roundelay.speech import score as scoring

    refs, hyps = scoring.read_text(Path(args.reference)), scoring.read_text(Path(args.hypotheses))
    speakers = {name: name for name in refs}
    if args.utt2spk:
        speakers = {name: fields[0] for name, fields in scoring.read_text(Path(args.utt2spk)).items()}
        missing = sorted(set(refs) - set(speakers))
        if missing:
            raise UsageError(
                f"utterance {missing[0]} has no speaker", where=args.utt2spk, hint="give the utt2spk file of the reference"
            )
    result = scoring.score(refs, hyps, speakers)
    confusions = result.confusions(args.confusions)
    report: dict[str, Any] = {**result.as_json(), "line": result.line(), "confusions": [asdict(c) for c in confusions]}
    lines = [result.line(), str(result.interval())]
    if args.against:
        pair = scoring.paired(refs, scoring.read_text(Path(args.against)), hyps, speakers)
        report["paired"] = asdict(pair)
        lines.append(f"{args.hypotheses} minus {args.against}: {pair}")
    lines += map(str, confusions)
    print(json.dumps(report) if args.json else "\n".join(lines))
    return 0
