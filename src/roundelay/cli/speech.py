"""The verbs of the speech road on the command line. Heavy modules are imported by the verb that needs them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roundelay.core import interrupts
from roundelay.errors import UsageError
from roundelay.log.progress import say

Command = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]

EPILOG = {
    "demo": """examples:
  roundelay demo
  roundelay demo --out demo-even train.slow= --json""",
    "run": """examples:
  roundelay run recipes/spoken
  roundelay run recipes/spoken train.strategy=adpsgd train.learners=4 run=runs/spoken-adpsgd
  roundelay run recipes/digits --until align""",
    "synth": """examples:
  roundelay synth corpora/spoken
  roundelay synth corpora/wide rate=16000 train_speakers=40 train_utterances=800""",
    "lexicon": """example:
  roundelay lexicon data/train/text lexicon.txt""",
    "prepare": """example:
  roundelay prepare data/train features/train rate=16000""",
    "pack": """examples:
  roundelay pack runs/spoken archives/spoken
  roundelay pack runs/spoken archives/whole examples=utterances compress=false
  roundelay pack features=feats.scp+ivectors.scp alignments=runs/x/alignments/train archives/x context=10""",
    "align": """example:
  roundelay align runs/spoken --data data/new --out alignments/new""",
    "decode": """examples:
  roundelay decode runs/spoken --data data/new
  roundelay decode runs/spoken --data data/new --system tri --out hyp.txt""",
    "score": """examples:
  roundelay score data/test/text hyp.txt --utt2spk data/test/utt2spk
  roundelay score data/test/text hyp.txt --against other.txt --utt2spk data/test/utt2spk""",
    "export": """examples:
  roundelay export runs/spoken exported
  roundelay export runs/spoken exported --onnx --posteriors data/test""",
}


def add(command: Command) -> None:
    """Puts the verbs into the parser."""
    jobs = os.cpu_count() or 1

    p = command(
        "demo", "speak, align, train twice, decode, compare: the whole road in some minutes (needs the extra 'synth')", demo
    )
    p.add_argument(
        "overrides", nargs="*", metavar="key=value", help="progress=rich|plain|none, or section.key=value of its recipe"
    )
    p.add_argument("--out", default="demo", metavar="DIR", help="where everything goes (default demo)")
    p.add_argument("--jobs", type=int, default=jobs, help=f"processes (default {jobs})")
    p.add_argument("--json", action="store_true", help="print the table as JSON at the end")

    p = command("run", "do all stages of a recipe: from recordings to word error rates", run)
    p.add_argument("recipe", metavar="RECIPE", help="a folder with a recipe.toml")
    p.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="run=DIR, progress=rich|plain|none, or section.key=value of the recipe",
    )
    p.add_argument("--until", default="", metavar="STAGE", help="stop after this stage")
    p.add_argument("--jobs", type=int, default=jobs, help=f"processes (default {jobs})")
    p.add_argument("--json", action="store_true", help="print the result as JSON at the end")

    p = command("synth", "speak a corpus: many synthetic speakers, noise, reverb (needs the extra 'synth')", synth)
    p.add_argument("out", metavar="OUT", help="a new folder")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="options, such as seed=1 or snr=[5,25]")
    p.add_argument("--jobs", type=int, default=jobs)

    p = command("lexicon", "propose pronunciations for the words of a text (needs the extra 'synth')", lexicon)
    p.add_argument("text", metavar="TEXT", help="a Kaldi text file, or one word per line with --words")
    p.add_argument("out", metavar="OUT", help="the lexicon to write; an existing one is kept and extended")
    p.add_argument("--words", action="store_true", help="TEXT has words only, no utterance ids")

    p = command("prepare", "check a data directory and extract its features", prepare)
    p.add_argument("data", metavar="DATA", help="a Kaldi data directory")
    p.add_argument("out", metavar="OUT", help="a new folder")
    p.add_argument(
        "overrides", nargs="*", metavar="key=value", help="rate=8000 mels=40 deltas=2 cmvn=speaker resample=true longest_s=120"
    )
    p.add_argument("--allow-pipes", action="store_true", help="run the commands in wav.scp: only for data you trust")
    p.add_argument("--jobs", type=int, default=jobs)

    p = command("align", "align a data directory with a trained system: tied states and word times", align)
    p.add_argument("run", metavar="RUN", help="a run directory of a recipe")
    p.add_argument("--data", required=True, metavar="DIR")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--system", default="tri", choices=["mono", "tri", "sat", "lstm"])
    p.add_argument("--jobs", type=int, default=jobs)

    p = command("pack", "pack the training examples of a run into an archive that learners train from", pack)
    p.add_argument(
        "arguments",
        nargs="+",
        metavar="RUN OUT key=value",
        help="a recipe's run directory (or features=… and alignments=…), the new folder, and options: "
        "window=21 context=0 seed=0 examples=chunks|utterances compress=true block=256",
    )
    p.add_argument("--verify", action="store_true", help="read everything back and check it")
    p.add_argument("--jobs", type=int, default=jobs)
    p.add_argument("--json", action="store_true", help="print the archive's metrics as JSON")

    p = command("decode", "recognize a data directory with a run; needs nothing but the run directory", decode)
    p.add_argument("run", metavar="RUN", help="a run directory of a recipe")
    p.add_argument("--data", required=True, metavar="DIR", help="a Kaldi data directory; with a `text` it is scored, too")
    p.add_argument("--system", default="lstm", choices=["mono", "tri", "sat", "lstm"])
    p.add_argument("--graph", default="", metavar="DIR", help="another graph: a folder with HCLG.fst and words.txt")
    p.add_argument("--lexicon", default="", metavar="FILE", help="refuse to decode unless the graph was made with this lexicon")
    p.add_argument("--scale", type=float, default=0.0, help="acoustic scale; default: what was chosen on dev")
    p.add_argument("--beam", type=float, default=0.0)
    p.add_argument("--out", default="", metavar="FILE", help="hypotheses; default: standard output")
    p.add_argument("--allow-pipes", action="store_true", help="run the commands in wav.scp: only for data you trust")
    p.add_argument("--jobs", type=int, default=jobs)
    p.add_argument("--json", action="store_true", help="print the score as JSON")

    p = command("score", "word error rate of hypotheses, with intervals; or of two systems against each other", score)
    p.add_argument("reference", metavar="REF", help="a Kaldi text file")
    p.add_argument("hypotheses", metavar="HYP", help="a Kaldi text file")
    p.add_argument("--against", default="", metavar="HYP2", help="another system's hypotheses: paired comparison")
    p.add_argument(
        "--utt2spk", default="", metavar="FILE", help="for intervals over speakers; default: every utterance its own"
    )
    p.add_argument("--confusions", type=int, default=10, metavar="N", help="list the N worst confusions")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = command(
        "export", "write the averaged model for other programs: safetensors, model card, ONNX, Kaldi posteriors", export
    )
    p.add_argument("run", metavar="RUN", help="a run directory of a recipe")
    p.add_argument("out", metavar="OUT", help="a new folder")
    p.add_argument("--onnx", action="store_true", help="also model.onnx, checked for equal posteriors (extra 'onnx')")
    p.add_argument(
        "--posteriors",
        default="",
        metavar="DATA",
        help="also posteriors as Kaldi ark and scp: of a data directory, or of features (a.scp+b.scp) as the recipe gives them",
    )
    p.add_argument("--jobs", type=int, default=jobs)


def demo(args: argparse.Namespace) -> int:
    from roundelay.recipes import demo

    return demo.run(args)


def run(args: argparse.Namespace) -> int:
    from roundelay.recipes import config as recipe_config
    from roundelay.recipes import pipeline
    from roundelay.recipes.pipeline_context import PipelineContext

    own, of_recipe = recipe_config.set_apart(args.overrides, ("run", "progress"))
    recipe = recipe_config.load(args.recipe, of_recipe)
    where = Path(own["run"]) if "run" in own else pipeline.default_run(recipe)
    where.mkdir(parents=True, exist_ok=True)
    work = PipelineContext(recipe, where, args.jobs, own.get("progress", "auto"))
    work.layout.command.write_text(json.dumps({"command": ["roundelay", *sys.argv[1:]], "folder": os.getcwd()}))
    with interrupts.as_interrupted(str(where), "run the recipe again to go on"):
        result = pipeline.run_recipe(work, args.until)
    if result:
        print(json.dumps(result) if args.json else pipeline.table(result))
    return 0


def options_of(kind: Any, overrides: list[str]) -> Any:
    """A dataclass of options from key=value."""
    from roundelay.recipes.config import override, section

    tree: dict[str, Any] = {}
    for item in overrides:
        override(tree, item)
    return section(kind, tree, "command line")


def synth(args: argparse.Namespace) -> int:
    from roundelay.speech.synth.corpus import SynthOptions, synthesize

    synthesize(Path(args.out), options_of(SynthOptions, args.overrides), jobs=args.jobs, progress="auto")
    return 0


def lexicon(args: argparse.Namespace) -> int:
    from roundelay.speech.hmm.lexicon import Lexicon, pronounce
    from roundelay.speech.score import read_text

    if args.words:
        words = {line.split()[0] for line in Path(args.text).read_text(encoding="utf-8").splitlines() if line.strip()}
    else:
        words = {word for line in read_text(Path(args.text)).values() for word in line}
    out = Path(args.out)
    known = Lexicon.read(out) if out.exists() else Lexicon({})
    new = pronounce(known.missing(sorted(words)))
    Lexicon({**known.entries, **new.entries}).write(out)
    say(f"{out}: {len(known.entries)} words kept, {len(new.entries)} added; look them over, espeak-ng guesses names")
    return 0


def prepare(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from roundelay.recipes.config import FeatureConfig
    from roundelay.speech.corpora.data_dir import read_data_dir
    from roundelay.speech.features.extract import FeatureOptions, extract

    wanted = asdict(options_of(FeatureConfig, args.overrides))
    resample, longest_s = wanted.pop("resample"), wanted.pop("longest_s")
    corpus = read_data_dir(Path(args.data), allow_pipes=args.allow_pipes, need_text=False)
    store = extract(corpus, Path(args.out), FeatureOptions(**wanted), jobs=args.jobs, resample=resample, longest_s=longest_s)
    print(f"{args.out}: {len(store.ids)} utterances, {store.total_frames / 360_000:.2f} h, {store.dim} dimensions")
    for name, why in store.skipped.items():
        print(f"  skipped {name}: {why}")
    return 0


def pack(args: argparse.Namespace) -> int:
    from roundelay.recipes import pack as packing
    from roundelay.recipes.config import override

    told: dict[str, Any] = {}
    for item in (a for a in args.arguments if "=" in a):
        override(told, item)
    folders = [a for a in args.arguments if "=" not in a]
    if len(folders) == 2:
        wanted = packing.packing_of(Path(folders[0]), told)
    elif len(folders) == 1 and {"features", "alignments"} <= set(told):
        wanted = packing.packing_of(Path(), told)
    else:
        raise UsageError("pack needs RUN and OUT, or features=…, alignments=… and OUT", where="command line", hint="see --help")
    archive = packing.pack(wanted, Path(folders[-1]), jobs=args.jobs)
    if args.verify:
        archive.verify()
        say("every block has its checksum")
    if args.json:
        print(json.dumps(packing.describe(archive)))
    return 0


def align(args: argparse.Namespace) -> int:
    from roundelay.recipes.inference import align_data

    print(align_data(Path(args.run), Path(args.data), Path(args.out), args.system, args.jobs))
    return 0


def decode(args: argparse.Namespace) -> int:
    from roundelay.recipes.inference import Recognizer
    from roundelay.speech.score import write_text

    recognizer = Recognizer.open(
        Path(args.run), args.system, graph=Path(args.graph) if args.graph else None, scale=args.scale, beam=args.beam
    )
    if args.lexicon:
        recognizer.check_lexicon(Path(args.lexicon))
    found, scored = recognizer.recognize(Path(args.data), jobs=args.jobs, allow_pipes=args.allow_pipes)
    if args.out:
        write_text(Path(args.out), found)
    elif not args.json:
        for name, words in found.items():
            print(name, *words)
    if scored is not None:
        if args.json:
            print(json.dumps({**scored.as_json(), "line": scored.line()}))
        else:
            say(f"{scored.line()}  {scored.interval()}")
    return 0


def score(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from roundelay.speech import score as scoring

    refs, hyps = scoring.read_text(Path(args.reference)), scoring.read_text(Path(args.hypotheses))
    speakers = {name: name for name in refs}
    if args.utt2spk:
        speakers = {name: fields[0] for name, fields in scoring.read_text(Path(args.utt2spk)).items()}
        lost = sorted(set(refs) - set(speakers))
        if lost:
            raise UsageError(
                f"utterance {lost[0]} has no speaker", where=args.utt2spk, hint="give the utt2spk of the reference"
            )
    found = scoring.score(refs, hyps, speakers)
    worst = found.confusions(args.confusions)
    report: dict[str, Any] = {**found.as_json(), "line": found.line(), "confusions": [asdict(c) for c in worst]}
    lines = [found.line(), str(found.interval())]
    if args.against:
        pair = scoring.paired(refs, scoring.read_text(Path(args.against)), hyps, speakers)
        report["paired"] = asdict(pair)
        lines.append(f"{args.hypotheses} minus {args.against}: {pair}")
    lines += map(str, worst)
    print(json.dumps(report) if args.json else "\n".join(lines))
    return 0


def export(args: argparse.Namespace) -> int:
    from roundelay.recipes.inference import export_run

    for line in export_run(
        Path(args.run),
        Path(args.out),
        onnx=args.onnx,
        posteriors=args.posteriors,
        jobs=args.jobs,
    ):
        print(line)
    return 0
