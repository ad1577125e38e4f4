"""roundelay lexicon."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roundelay.cli.arguments import add_json, note

EXAMPLES = """  roundelay lexicon data/train/text lexicon.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="a Kaldi text file, or one word per line with --words")
    parser.add_argument("out", metavar="OUT", help="lexicon to write; entries of an existing one are kept")
    parser.add_argument("--words", action="store_true", help="TEXT contains words only, no utterance ids")
    add_json(parser, "print the number of words as JSON")


def run(args: argparse.Namespace) -> int:
    """Add pronunciations of missing words to a lexicon."""
    from roundelay.speech.hmm.lexicon import Lexicon, pronounce
    from roundelay.speech.score import read_text

    if args.words:
        words = {line.split()[0] for line in Path(args.text).read_text(encoding="utf-8").splitlines() if line.strip()}
    else:
        words = {word for line in read_text(Path(args.text)).values() for word in line}
    out = Path(args.out)
    existing = Lexicon.read(out) if out.exists() else Lexicon({})
    new = pronounce(existing.missing(sorted(words)))
    Lexicon({**existing.entries, **new.entries}).write(out)
    if args.json:
        print(json.dumps({"lexicon": str(out), "kept": len(existing.entries), "added": len(new.entries)}))
    else:
        note(f"{out}: {len(existing.entries)} words kept, {len(new.entries)} added; review them, espeak-ng guesses names")
    return 0
