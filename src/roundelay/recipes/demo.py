"""roundelay demo: a spoken corpus, two learners of which one is slowed, two strategies, one table.

A corpus is spoken and aligned; the same network then learns the same samples twice, by asynchronous decentralized SGD and by
synchronous SGD, from the same features and alignments; both are decoded with the same graph. Everything is a stage: what is
done is not done again, so after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.core import interrupts
from roundelay.core.settings import setting
from roundelay.errors import UsageError
from roundelay.log.progress import say
from roundelay.metrics.events import read_events
from roundelay.recipes import config as recipe_config
from roundelay.recipes import stages
from roundelay.recipes.config import Recipe
from roundelay.recipes.hypotheses import report
from roundelay.recipes.pipeline import STAGES, PipelineStage, run_stages
from roundelay.recipes.stages import PipelineContext
from roundelay.speech.score import paired, read_text, score

RECIPE = Path(__file__).with_name("demo.toml")
STRATEGIES = ("adpsgd", "sync")
SAMPLE = "sample.wav"
TEST = "test"


@dataclass(frozen=True)
class DemoOptions:
    """Settings of the command that are not the recipe's."""

    progress: str = setting("auto", choices=("auto", "rich", "plain", "none"), help="Progress display on the terminal.")


def run(args: argparse.Namespace) -> int:
    own, overrides = config.split_items(args.overrides, DemoOptions)
    options = config.load(None, own, DemoOptions).settings
    recipe = recipe_config.load(RECIPE, overrides)
    work = PipelineContext(recipe, Path(args.out), args.jobs, say, options.progress)
    check(recipe)
    command = ["roundelay", "demo", *(["--out", args.out] if args.out != "demo" else []), *args.overrides]
    make_folders(work.run, command)
    introduce(work)
    with interrupts.as_interrupted(str(work.run), f"to go on: {shlex.join(command)}"):
        run_stages(work, ROAD)
    result = json.loads((work.run / "result.json").read_text())
    conclude(work, result)
    print(json.dumps({**result, "report": str(work.run / "report.html")}) if args.json else table(result), flush=True)
    return 0


def check(recipe: Recipe) -> None:
    if int(recipe.train.get("learners", 1)) < 2:
        raise UsageError("the demo compares learners that work together", where="train.learners", hint="give at least 2")


def make_folders(folder: Path, command: Sequence[str]) -> None:
    """Each training run is to say how it was made."""
    try:
        for name in STRATEGIES:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "command.json").write_text(json.dumps({"command": command, "folder": os.getcwd()}))
    except OSError as error:
        raise UsageError(
            f"cannot write there: {error.strerror}", where=f"--out {folder}", hint="choose another folder"
        ) from error


# -- the stages that a recipe does not have ----------------------------------------------------------------------------


def sample(work: PipelineContext) -> None:
    """One recording to listen to."""
    import soundfile

    utterance = work.corpus(TEST).utterances[0]
    samples, rate = soundfile.read(utterance.audio, dtype="int16")
    soundfile.write(work.run / SAMPLE, samples, rate, subtype="PCM_16")
    (work.run / "sample.txt").write_text(" ".join(utterance.words) + "\n")
    listen(work)


def listen(work: PipelineContext) -> None:
    words = (work.run / "sample.txt").read_text().strip().lower()
    say(f'  Listen to one: {work.run / SAMPLE}\n  It says: "{words}"')


def learn(work: PipelineContext, strategy: str) -> None:
    """One training run, and its averaged model as a system."""
    folder = work.run / strategy
    wanted = {**work.recipe.train, "strategy": strategy}
    stages.train_network(work, folder / "network", wanted, work.run / "alignments", work.recipe.seed)
    stages.finish_network(work, folder / "network", folder / "lstm")
    for shared in ("data", "features", "tri", "graph-tri"):  # so that decode and export find a whole run there
        link = folder / shared
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / shared)


def decode(work: PipelineContext) -> None:
    for strategy in STRATEGIES:
        stages.decode_system(work, work.run / strategy, "lstm", work.run / strategy / "decode" / "lstm")


def compare(work: PipelineContext) -> None:
    """result.json: a row per strategy, and the difference of their word errors, utterance by utterance."""
    corpus = work.corpus(TEST)
    refs = {u.id: u.words for u in corpus.utterances}
    speakers = {u.id: u.speaker for u in corpus.utterances}
    hyps = {name: read_text(work.run / name / "decode" / "lstm" / f"{TEST}.txt") for name in STRATEGIES}
    rows = []
    for name in STRATEGIES:
        found = score(refs, hyps[name], speakers)
        words = {k: v for k, v in found.as_json().items() if k in ("wer", "low", "high", "language", "speakers")}
        rows.append({"strategy": name, **trained(work.run / name / "network"), **words})
        one = {"systems": [{"name": "lstm", "set": TEST, **found.as_json(), "line": found.line()}], "paired": []}
        (work.run / name / "result.json").write_text(json.dumps(one, indent=1))
    first, second = STRATEGIES
    pair = stages.rounded(asdict(paired(refs, hyps[second], hyps[first], speakers)))
    result = {"rows": rows, "paired": {"set": TEST, "from": second, "to": first, **pair}}
    (work.run / "result.json").write_text(json.dumps(result, indent=1))


def trained(network: Path) -> dict[str, Any]:
    """What a training run's own events say. A run that was interrupted and resumed has spent all of its parts."""
    seconds: dict[int, float] = {}
    samples, logprob = 0, float("nan")
    for event in read_events(network / "events.jsonl"):
        if event["event"] == "steps":
            seconds[event["rank"]] = seconds.get(event["rank"], 0.0) + event["elapsed_s"]
            samples += event["samples"]
        elif event["event"] == "evaluation" and event["final"]:
            logprob = event["metrics"]["logprob"]
    longest = max(seconds.values())
    return {
        "seconds": round(longest, 2),
        "samples": samples,
        "samples_per_s": round(samples / longest, 1),
        "logprob": round(logprob, 4),
    }


def write_page(work: PipelineContext) -> None:
    report([work.run / name for name in reversed(STRATEGIES)], work.run / "report.html")


OF_A_RECIPE = {stage.name: stage for stage in STAGES}


def from_recipe(name: str, about: str) -> PipelineStage:
    known = OF_A_RECIPE[name]
    return PipelineStage(name, known.do, known.parts, about=about)


TRAINED_BY = ("network", "train", "seed")
ROAD: Sequence[PipelineStage] = (
    from_recipe("data", "1. A synthesizer speaks a corpus: many voices, sentences that differ, noise of a telephone line."),
    PipelineStage("sample", sample, ()),
    from_recipe("features", "2. Every 10 ms of sound become 40 numbers: how strong each band of frequencies is."),
    from_recipe("mono", "3. Hidden Markov models find out which 10 ms belong to which sound, first one model per sound …"),
    from_recipe("tri", "   … then one per sound and its neighbours, so far as the data allows."),
    from_recipe("align", "   The best of these label every 10 ms: that is what the network will learn."),
    from_recipe("graph", "4. A graph of all sentences that may be said, from pronunciations and a language model."),
    PipelineStage(
        "adpsgd",
        partial(learn, strategy="adpsgd"),
        TRAINED_BY,
        about="5. Two learners train a network by asynchronous decentralized SGD. Learner 1 is slowed on purpose: "
        "each takes the next batch when it is free, and they average in the background.",
    ),
    PipelineStage(
        "sync",
        partial(learn, strategy="sync"),
        TRAINED_BY,
        about="6. The same network, samples and slow learner by synchronous SGD: every step waits for both.",
    ),
    PipelineStage(
        "decode",
        decode,
        ("decode", "scales", "dev_utterances"),
        about="7. Both networks recognize people they have never heard.",
    ),
    PipelineStage("score", compare, ()),
    PipelineStage("report", write_page, ()),
)


# -- words -------------------------------------------------------------------------------------------------------------


def introduce(work: PipelineContext) -> None:
    minutes = "" if (work.run / "stages").is_dir() else " It takes about four minutes on two idle cores."
    say(
        "From nothing to a speech recognizer, trained twice: by learners that do not wait for each other, and by learners that "
        f"do.{minutes} Everything goes into {work.run}/; Ctrl-C at any time, the same command goes on.\n"
    )


def conclude(work: PipelineContext, result: dict[str, Any]) -> None:
    fast, slow = (row["seconds"] for row in result["rows"])
    run = work.run
    slowed = work.recipe.train.get("straggler", "")
    say("")
    listen(work)
    say(
        f"Look at seconds: with a slow learner (straggler={slowed}) asynchronous training took {fast / slow:.2f} of the time of "
        "synchronous training for the same samples. And at the word error rates: the paired difference says what that cost, "
        "if anything.\n"
        f"The curves, who waited for whom, and the worst confusions: {run / 'report.html'}\n"
        "Try next:\n"
        f"  roundelay decode {run / 'adpsgd'} --data {run / 'data' / TEST} --json\n"
        f"  roundelay demo --out demo-even {shlex.quote('train.straggler=')}\n"
        "  roundelay run spoken\n"
    )


def table(result: dict[str, Any]) -> str:
    """For people, 60 columns wide at most."""
    lines = [f"{'strategy':<8} {'seconds':>8} {'samples/s':>10} {'logprob':>9} {'WER %':>6}  {'95 % interval':<13}"]
    for r in result["rows"]:
        lines.append(
            f"{r['strategy']:<8} {r['seconds']:>8.1f} {r['samples_per_s']:>10,.0f} {r['logprob']:>9.4f} {r['wer']:>6.2f}  "
            f"{r['low']:.2f} - {r['high']:.2f}"
        )
    p = result["paired"]
    lines += [
        "",
        f"{p['to']} minus {p['from']}: {p['difference']:+.2f} points of WER",
        f"({p['low']:+.2f} to {p['high']:+.2f}, 95 %, paired, over {p['count']} {p['units']})",
        "logprob: held out, per frame",
    ]
    return "\n".join(lines)
