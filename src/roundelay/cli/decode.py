"""roundelay decode."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.cli.arguments import add_jobs, add_json, note
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.recipes.inference import Recognizer

EXAMPLES = """  roundelay decode runs/spoken --data data/new
  roundelay decode runs/spoken --data data/new --system tri --out hyp.txt
  roundelay decode runs/spoken --data data/new --nbest 10"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory of a recipe; nothing else is needed")
    parser.add_argument("--data", required=True, metavar="DIR", help="a Kaldi data directory; it is scored if it has a `text`")
    parser.add_argument(
        "--system", default="lstm", choices=["mono", "tri", "sat", "lstm"], help="system to decode with (default lstm)"
    )
    parser.add_argument("--graph", default="", metavar="DIR", help="another graph: a folder with HCLG.fst and words.txt")
    parser.add_argument("--lexicon", default="", metavar="FILE", help="fail unless the graph was built with this lexicon")
    parser.add_argument("--scale", type=float, default=0.0, help="acoustic scale; default: the one chosen on the dev set")
    parser.add_argument("--beam", type=float, default=0.0, help="beam of the search; default: the recipe's")
    parser.add_argument(
        "--nbest", type=int, default=0, metavar="N", help="print at most N sentences per utterance, with scores"
    )
    parser.add_argument("--out", default="", metavar="FILE", help="file for the hypotheses; default: stdout")
    parser.add_argument("--allow-pipes", action="store_true", help="run the commands in wav.scp; only for data you trust")
    add_jobs(parser)
    add_json(parser, "print the score, or the N best sentences, as JSON")


def run(args: argparse.Namespace) -> int:
    """Decode a data directory; score it if there are transcripts."""
    from roundelay.recipes.inference import Recognizer
    from roundelay.speech.score import write_text

    if args.nbest < 0:
        raise UsageError(f"--nbest must be >= 1 (got {args.nbest})", where="command line", hint="for example --nbest 10")
    recognizer = Recognizer.open(
        Path(args.run), args.system, graph=Path(args.graph) if args.graph else None, scale=args.scale, beam=args.beam
    )
    if args.lexicon:
        recognizer.check_lexicon(Path(args.lexicon))
    if args.nbest:
        return _print_nbest(recognizer, args)
    hypotheses, score = recognizer.recognize(Path(args.data), jobs=args.jobs, allow_pipes=args.allow_pipes)
    if args.out:
        write_text(Path(args.out), hypotheses)
    elif not args.json:
        for name, words in hypotheses.items():
            print(name, *words)
    if score is not None:
        if args.json:
            print(json.dumps({**score.as_json(), "line": score.line()}))
        else:
            note(f"{score.line()}  {score.interval()}")
    return 0


def _print_nbest(recognizer: Recognizer, args: argparse.Namespace) -> int:
    """Print `utterance-N score words` lines, N from 1 for the best sentence, as Kaldi numbers n-best lists."""
    sentences = recognizer.nbest(Path(args.data), args.nbest, jobs=args.jobs, allow_pipes=args.allow_pipes)
    rows: dict[str, list[dict[str, Any]]] = {
        name: [{"words": list(h.words), "score": h.score} for h in hypotheses] for name, hypotheses in sentences.items()
    }
    lines = [
        f"{name}-{number} {row['score']:.4f} {' '.join(row['words'])}".rstrip()
        for name, ranked in rows.items()
        for number, row in enumerate(ranked, 1)
    ]
    text = json.dumps(rows) if args.json else "\n".join(lines)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0
