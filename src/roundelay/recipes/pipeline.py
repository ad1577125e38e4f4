"""Runs the stages of a recipe in order. What is done, and would be done the same way again, is skipped."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.core import interrupts
from roundelay.errors import UsageError, did_you_mean
from roundelay.recipes import kaldi_pipeline, stages
from roundelay.recipes.config import Recipe, load
from roundelay.recipes.stages import PipelineContext
from roundelay.speech.nnet.lstm import model_folder


@dataclass(frozen=True)
class PipelineStage:
    """A step of the road and the parts of the recipe that decide what it gives."""

    name: str
    do: Callable[[PipelineContext], Any]
    parts: tuple[str, ...]
    systems: tuple[str, ...] = ()
    """Only needed where the recipe asks for one of these systems."""
    about: str = ""
    """What it does, in a sentence for people who have not done this before."""
    aside: Callable[[Recipe], bool] = lambda recipe: False
    """Whether the stages behind it do without what it makes: then they need not be done again when it is."""


def with_pretraining(train: Callable[[PipelineContext], Any]) -> Callable[[PipelineContext], Any]:
    """Training, after the recipe whose network it begins from has come as far as its own."""

    def do(work: PipelineContext) -> Any:
        before = stages.pretraining_run(work)
        if before is not None:
            work.say(f"  it begins from the network of {before.recipe.folder.name}, in {before.run}")
            run_stages(before, stages_of(before.recipe), "network")
        return train(work)

    return do


STAGES = (
    PipelineStage("data", stages.data, ("sources", "dev_share", "seed", "language", "speed_perturb")),
    PipelineStage("features", stages.features, ("features",)),
    PipelineStage("mono", stages.mono, ("mono",)),
    PipelineStage("tri", stages.tri, ("tri",), ("tri", "sat", "lstm")),
    PipelineStage("align", stages.align, (), ("lstm",)),
    PipelineStage("sat", stages.sat, ("sat",), ("sat",), aside=lambda recipe: not recipe.network.adapted),
    PipelineStage("network", with_pretraining(stages.network), ("network", "train", "seed", "realign_passes"), ("lstm",)),
    PipelineStage("graph", stages.graph, ("language",)),
    PipelineStage("decode", stages.decode, ("decode", "scales", "dev_utterances", "systems", "sat")),
    PipelineStage("score", stages.score_all, ()),
)
# Not the whole of `given`: another graph or test set must not train the network again.
TRAINED_ON = (
    "num_pdfs",
    "train_features",
    "train_alignments",
    "dev_features",
    "dev_alignments",
    "transitions",
    "alignment_labels",
)
GIVEN_STAGES = (
    PipelineStage("states", kaldi_pipeline.states, tuple(f"kaldi.{key}" for key in TRAINED_ON)),
    PipelineStage("network", with_pretraining(kaldi_pipeline.network), ("network", "train", "seed")),
    PipelineStage("decode", kaldi_pipeline.decode, ("kaldi", "decode", "scales", "dev_utterances")),
    PipelineStage("score", kaldi_pipeline.score_all, ()),
)


def stages_of(recipe: Recipe) -> Sequence[PipelineStage]:
    return GIVEN_STAGES if recipe.kaldi is not None else STAGES


def run_recipe(work: PipelineContext, until: str = "") -> dict[str, Any]:
    """All stages (or those up to `until`); returns what result.json holds, so far as it is there."""
    check_stage(work.recipe, until)
    stages.pretraining_run(work)  # validate the run directory now, not after hours of work
    run_stages(work, stages_of(work.recipe), until)
    result = work.run / "result.json"
    return json.loads(result.read_text()) if result.exists() and not until else {}


def check_stage(recipe: Recipe, name: str) -> None:
    """Raise a UsageError unless `name` is empty or a stage of the recipe."""
    names = [stage.name for stage in stages_of(recipe)]
    if name and name not in names:
        raise UsageError(f"unknown stage '{name}'", where="--until", hint=did_you_mean(name, names))


def run_stages(work: PipelineContext, road: Sequence[PipelineStage], until: str = "") -> None:
    """Stages in order, up to `until`; what is done, and would be done the same way again, is skipped."""
    names = [stage.name for stage in road]
    if until and until not in names:
        raise UsageError(f"there is no stage '{until}'", where="--until", hint=did_you_mean(until, names))
    marks = work.run / "stages"
    marks.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for stage, its_print in planned(work.recipe, road):
        mark = marks / f"{stage.name}.json"
        interrupts.raise_if_interrupted()
        if mark.exists() and json.loads(mark.read_text())["fingerprint"] == its_print:
            work.say(f"{stage.name}: done before")
        else:
            work.say(stage.about or f"{stage.name} …")
            mark.unlink(missing_ok=True)
            started = time.monotonic()
            stage.do(work)
            seconds = round(time.monotonic() - started, 1)
            part = mark.with_suffix(".part")
            part.write_text(json.dumps({"fingerprint": its_print, "seconds": seconds}))
            part.replace(mark)  # whole or not at all
            work.say(f"{stage.name}: {seconds:.0f} s")
        if stage.name == until:
            break
    work.say(f"all: {time.monotonic() - began:.0f} s")


def planned(recipe: Recipe, road: Sequence[PipelineStage]) -> list[tuple[PipelineStage, str]]:
    """The stages that a recipe needs, each with the fingerprint of all that decides what it gives."""
    found, before = [], ""
    for stage in road:
        if stage.systems and not set(stage.systems) & set(recipe.systems):
            continue
        its_print = fingerprint(recipe, stage, before)
        found.append((stage, its_print))
        before = before if stage.aside(recipe) else its_print
    return found


def fingerprint(recipe: Recipe, stage: PipelineStage, before: str) -> str:
    """Of everything that decides what a stage gives: its settings and the stages before it."""
    parts = {name: recipe.part(name) for name in stage.parts}
    if "network" in parts and recipe.network.init_from:
        parts["network"]["init_from"] = pretrained_fingerprint(recipe)
    return hashlib.sha256(json.dumps([before, stage.name, parts], sort_keys=True, default=str).encode()).hexdigest()[:16]


def pretrained_fingerprint(recipe: Recipe) -> str:
    """What the network begins from, as a fingerprint: all that decides another recipe's network, or the weights themselves."""
    if recipe.pretraining_recipe is None:
        return stages.weights_hash(model_folder(Path(recipe.network.init_from)))
    before = load(recipe.pretraining_recipe)
    return next(its_print for stage, its_print in planned(before, stages_of(before)) if stage.name == "network")


def table(result: dict[str, Any]) -> str:
    """The word error rates for people."""
    lines = [f"{'set':<12} {'system':<8} {'WER':>6}  {'95 % interval':<16} words  speakers"]
    for r in result["systems"]:
        interval = f"{r['low']:.2f} - {r['high']:.2f}"
        lines.append(f"{r['set']:<12} {r['name']:<8} {r['wer']:6.2f}  {interval:<16} {r['words']:<6} {r['speakers']}")
    for p in result["paired"]:
        lines.append(
            f"{p['set']}: {p['to']} minus {p['from']}: {p['difference']:+.2f} points "
            f"({p['low']:+.2f} to {p['high']:+.2f}, 95 %, over {p['count']} {p['units']})"
        )
    return "\n".join(lines)


def default_run(recipe: Recipe) -> Path:
    return Path("runs") / recipe.folder.name
