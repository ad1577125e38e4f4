"""roundelay demo: synthesize a corpus, train with two strategies on two learners of which one is slow, print one table.

The corpus is synthesized and aligned once. The same network is then trained twice on the same samples, by asynchronous
decentralized SGD and by synchronous SGD; both networks are decoded with the same graph. Every step is a stage, so after an
interrupt the same command continues with the first unfinished stage.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from roundelay.core import interrupts
from roundelay.errors import UsageError
from roundelay.metrics import run_files
from roundelay.metrics.events import read_events
from roundelay.recipes.config import Recipe
from roundelay.recipes.decode_stage import decode_system, rounded
from roundelay.recipes.hypotheses import report
from roundelay.recipes.network_stage import finish_network, train_network
from roundelay.recipes.pipeline import STAGES, PipelineStage, run_stages
from roundelay.recipes.pipeline_context import PipelineContext
from roundelay.recipes.run_layout import LSTM, RunLayout, hypothesis_file
from roundelay.speech.score import paired, read_text, score

logger = logging.getLogger(__name__)
RECIPE = Path(__file__).with_name("demo.toml")
STRATEGIES = ("adpsgd", "sync")
SAMPLE, SAMPLE_TEXT = "sample.wav", "sample.txt"
TEST = "test"


def run_demo(context: PipelineContext, command: Sequence[str]) -> dict[str, Any]:
    """Run all stages of the demo and return the contents of result.json.

    `command` is what the user typed. Raises Interrupted after an interrupt, with the command that continues.
    """
    check_learners(context.recipe)
    create_sub_runs(context.layout, command)
    log_introduction(context)
    with interrupts.as_interrupted(str(context.run), f"continue with: {shlex.join(command)}"):
        run_stages(context, DEMO_STAGES)
    result = json.loads(context.layout.result.read_text())
    log_conclusion(context, result)
    return result


def check_learners(recipe: Recipe) -> None:
    learners = int(recipe.train.get("learners", 1))
    if learners < 2:
        raise UsageError(f"the demo needs at least 2 learners (got {learners})", where="train.learners", hint="set it to 2")


def create_sub_runs(layout: RunLayout, command: Sequence[str]) -> None:
    """Create a directory per strategy that records the command. Raise UsageError if that is impossible."""
    try:
        for name in STRATEGIES:
            sub_run = layout.sub_run(name)
            sub_run.run.mkdir(parents=True, exist_ok=True)
            sub_run.command.write_text(json.dumps({"command": command, "folder": os.getcwd()}))
    except OSError as error:
        raise UsageError(
            f"creating the run directory failed: {error.strerror}", where=f"--out {layout.run}", hint="choose another directory"
        ) from error


# -- stages that a recipe does not have ------------------------------------------------------------------------------------


def write_sample(context: PipelineContext) -> None:
    """Copy one test recording to sample.wav and its transcript to sample.txt."""
    import soundfile

    utterance = context.corpus(TEST).utterances[0]
    samples, rate = soundfile.read(utterance.audio, dtype="int16")
    soundfile.write(context.run / SAMPLE, samples, rate, subtype="PCM_16")
    (context.run / SAMPLE_TEXT).write_text(" ".join(utterance.words) + "\n")
    log_sample(context)


def log_sample(context: PipelineContext) -> None:
    words = (context.run / SAMPLE_TEXT).read_text().strip().lower()
    logger.info('  One of the recordings: %s\n  Its transcript: "%s"', context.run / SAMPLE, words)


def train_with(context: PipelineContext, strategy: str) -> None:
    """Train the network with one strategy and save it as a system of the strategy's sub-run."""
    layout, recipe = context.layout, context.recipe
    sub_run = layout.sub_run(strategy)
    settings = {**recipe.train, "strategy": strategy}
    trained = train_network(context, sub_run.network(), settings, layout.alignments(), recipe.seed)
    finish_network(context, trained, sub_run.system(LSTM))
    # Links make the sub-run complete, so that roundelay decode and export accept it.
    for shared in (layout.data, layout.features_root, layout.system("tri"), layout.graph("tri")):
        link = sub_run.run / shared.name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / shared.name)


def decode_both(context: PipelineContext) -> None:
    """Decode the test set with the network of each strategy."""
    for strategy in STRATEGIES:
        sub_run = context.layout.sub_run(strategy)
        decode_system(context, sub_run, LSTM, sub_run.decode(LSTM))


def compare_strategies(context: PipelineContext) -> None:
    """Write result.json: one row per strategy, and the paired difference of their word error rates."""
    layout, corpus = context.layout, context.corpus(TEST)
    refs = {u.id: u.words for u in corpus.utterances}
    speakers = {u.id: u.speaker for u in corpus.utterances}
    hyps = {name: read_text(hypothesis_file(layout.sub_run(name).decode(LSTM), TEST)) for name in STRATEGIES}
    rows = []
    for name in STRATEGIES:
        sub_run, scored = layout.sub_run(name), score(refs, hyps[name], speakers)
        rates = {k: v for k, v in scored.as_json().items() if k in ("wer", "low", "high", "words", "speakers")}
        rows.append({"strategy": name, **training_metrics(sub_run.network()), **rates})
        row = {"name": LSTM, "set": TEST, **scored.as_json(), "line": scored.line()}
        sub_run.result.write_text(json.dumps({"systems": [row], "paired": []}, indent=1))
    first, second = STRATEGIES
    pair = rounded(asdict(paired(refs, hyps[second], hyps[first], speakers)))
    result = {"rows": rows, "paired": {"set": TEST, "from": second, "to": first, **pair}}
    layout.result.write_text(json.dumps(result, indent=1))


def training_metrics(directory: Path) -> dict[str, Any]:
    """Return seconds, samples, speed and log-probability of a training run. Interrupted parts of the run count."""
    seconds: dict[int, float] = {}
    samples, logprob = 0, float("nan")
    for event in read_events(directory / run_files.EVENTS):
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


def write_page(context: PipelineContext) -> None:
    """Write report.html about both training runs."""
    report([context.layout.sub_run(name).run for name in reversed(STRATEGIES)], context.layout.report)


RECIPE_STAGES = {stage.name: stage for stage in STAGES}


def recipe_stage(name: str, description: str) -> PipelineStage:
    """Return a stage of a recipe with the demo's description."""
    stage = RECIPE_STAGES[name]
    return PipelineStage(name, stage.run, stage.parts, description=description, files=stage.files)


TRAINING_PARTS = ("network", "train", "seed")
DEMO_STAGES: Sequence[PipelineStage] = (
    recipe_stage("data", "1. Synthesize a corpus: many voices, varied sentences, telephone noise."),
    PipelineStage("sample", write_sample, ()),
    recipe_stage("features", "2. Extract features: 40 log-mel energies every 10 ms."),
    recipe_stage("mono", "3. Train hidden Markov models that assign every 10 ms to a phone, first one model per phone …"),
    recipe_stage("tri", "   … then one per phone in context, as the data allows."),
    recipe_stage("align", "   Align every 10 ms with a state: these are the targets of the network."),
    recipe_stage("graph", "4. Build the decoding graph from pronunciations and a language model."),
    PipelineStage(
        "adpsgd",
        partial(train_with, strategy="adpsgd"),
        TRAINING_PARTS,
        description="5. Train the network by asynchronous decentralized SGD on two learners. Learner 1 is slowed down: "
        "each learner takes the next batch when it is free, and models are averaged in the background.",
    ),
    PipelineStage(
        "sync",
        partial(train_with, strategy="sync"),
        TRAINING_PARTS,
        description="6. Train the same network on the same samples by synchronous SGD: every step waits for both learners.",
    ),
    PipelineStage(
        "decode",
        decode_both,
        ("decode", "scales", "dev_utterances"),
        description="7. Decode the test set, whose speakers were not in the training set, with both networks.",
    ),
    PipelineStage("score", compare_strategies, ()),
    PipelineStage("report", write_page, ()),
)


# -- messages --------------------------------------------------------------------------------------------------------------


def log_introduction(context: PipelineContext) -> None:
    minutes = "" if context.layout.stamps.is_dir() else " It takes about four minutes on two idle cores."
    logger.info(
        "Train a speech recognizer from scratch, twice: with learners that do not wait for each other, and with learners that "
        "do.%s All files are written to %s/. Interrupt with Ctrl-C at any time; the same command continues.\n",
        minutes,
        context.run,
    )


def log_conclusion(context: PipelineContext, result: dict[str, Any]) -> None:
    asynchronous, synchronous = (row["seconds"] for row in result["rows"])
    run, straggler = context.run, context.recipe.train.get("straggler", "")
    logger.info("")
    log_sample(context)
    logger.info(
        f"Seconds: with a slow learner (straggler={straggler}) asynchronous training took {asynchronous / synchronous:.2f} of "
        "the time of synchronous training for the same samples. Word error rates: the paired difference shows what that cost, "
        "if anything.\n"
        f"Learning curves, waiting times and the most frequent confusions: {context.layout.report}\n"
        "Try next:\n"
        f"  roundelay decode {run / 'adpsgd'} --data {context.layout.data_set(TEST)} --json\n"
        f"  roundelay demo --out demo-even {shlex.quote('train.straggler=')}\n"
        "  roundelay run spoken\n"
    )


def table(result: dict[str, Any]) -> str:
    """Return the result as text, at most 60 columns wide."""
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
        "logprob: validation set, per frame",
    ]
    return "\n".join(lines)
