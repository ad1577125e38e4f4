"""Run the stages of a recipe in order. Skip every stage whose inputs have not changed since it was done."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.core import interrupts
from roundelay.errors import UsageError, did_you_mean
from roundelay.recipes import data_stage, decode_stage, kaldi_pipeline, network_stage, stages
from roundelay.recipes.config import Recipe, load
from roundelay.recipes.data_stage import manifest_hash
from roundelay.recipes.pipeline_context import PipelineContext

logger = logging.getLogger(__name__)


def no_files(recipe: Recipe) -> Iterable[Path]:
    return ()


@dataclass(frozen=True)
class PipelineStage:
    """One stage: a function, and everything that decides its output."""

    name: str
    run: Callable[[PipelineContext], Any]
    parts: tuple[str, ...]
    """Sections of the recipe, or section.key, that decide the output."""
    systems: tuple[str, ...] = ()
    """Run the stage only if the recipe has one of these systems. Empty: always."""
    description: str = ""
    """A sentence that is logged when the stage starts. Default: its name."""
    is_optional_input: Callable[[Recipe], bool] = lambda recipe: False
    """True if later stages do not depend on this stage's output, so re-running it does not invalidate them."""
    files: Callable[[Recipe], Iterable[Path]] = no_files
    """Files outside the run directory that the stage reads."""


def with_pretraining(train: Callable[[PipelineContext], Any]) -> Callable[[PipelineContext], Any]:
    """Return a stage that runs the pretraining recipe up to its network, if there is one, and then `train`."""

    def run(context: PipelineContext) -> Any:
        before = network_stage.pretraining_run(context)
        if before is not None:
            logger.info("  initialized from the network of %s, in %s", before.recipe.folder.name, before.run)
            run_stages(before, stages_of(before.recipe), "network")
        return train(context)

    return run


STAGES = (
    PipelineStage(
        "data",
        data_stage.prepare_data,
        ("sources", "dev_share", "seed", "language", "speed_perturb"),
        files=data_stage.source_files,
    ),
    PipelineStage("features", stages.extract_features, ("features",)),
    PipelineStage("mono", stages.train_monophones, ("mono",)),
    PipelineStage("tri", stages.train_triphones, ("tri",), ("tri", "sat", "lstm")),
    PipelineStage("align", stages.align_with_gmm, (), ("lstm",)),
    PipelineStage(
        "sat",
        stages.train_speaker_adapted,
        ("sat",),
        ("sat",),
        is_optional_input=lambda recipe: not recipe.network.adapted,
    ),
    PipelineStage(
        "network",
        with_pretraining(network_stage.train_networks),
        ("network", "train", "seed", "realign_passes"),
        ("lstm",),
    ),
    PipelineStage("graph", decode_stage.build_graphs, ("language",)),
    PipelineStage("decode", decode_stage.decode_systems, ("decode", "scales", "dev_utterances", "systems", "sat")),
    PipelineStage("score", decode_stage.score_systems, ()),
)
TRAINING_INPUTS = (
    "num_pdfs",
    "train_features",
    "train_alignments",
    "dev_features",
    "dev_alignments",
    "transitions",
    "alignment_labels",
)
"""Keys of [kaldi] that decide the network. Another graph or test set must not train it again."""
KALDI_STAGES = (
    PipelineStage(
        "states",
        kaldi_pipeline.read_states,
        tuple(f"kaldi.{key}" for key in TRAINING_INPUTS),
        files=kaldi_pipeline.training_files,
    ),
    PipelineStage("network", with_pretraining(kaldi_pipeline.train_on_kaldi_features), ("network", "train", "seed")),
    PipelineStage(
        "decode",
        kaldi_pipeline.decode_test_set,
        ("kaldi", "decode", "scales", "dev_utterances"),
        files=kaldi_pipeline.decoding_files,
    ),
    PipelineStage("score", kaldi_pipeline.score_test_set, ()),
)


def stages_of(recipe: Recipe) -> Sequence[PipelineStage]:
    return KALDI_STAGES if recipe.kaldi is not None else STAGES


def run_recipe(context: PipelineContext, until: str = "") -> dict[str, Any]:
    """Run all stages, or those up to `until`. Return the contents of result.json, or {} if the run did not get there."""
    network_stage.pretraining_run(context)  # validate the run directory now, not after hours of work
    run_stages(context, stages_of(context.recipe), until)
    result = context.layout.result
    return json.loads(result.read_text()) if result.exists() and not until else {}


def check_stage(recipe: Recipe, name: str) -> None:
    """Raise UsageError unless `name` is empty or a stage of the recipe."""
    names = [stage.name for stage in stages_of(recipe)]
    if name and name not in names:
        raise UsageError(f"unknown stage '{name}'", where="--until", hint=did_you_mean(name, names))


def run_stages(context: PipelineContext, stages: Sequence[PipelineStage], until: str = "") -> None:
    """Run the stages in order, up to `until`. Skip a stage whose stamp has the current fingerprint.

    Raises KeyboardInterrupt after an interrupt; finished stages keep their stamps.
    """
    names = [stage.name for stage in stages]
    if until and until not in names:
        raise UsageError(f"unknown stage '{until}'", where="--until", hint=did_you_mean(until, names))
    context.layout.stamps.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for stage, fingerprint in stage_fingerprints(context.recipe, stages):
        stamp = context.layout.stamp(stage.name)
        interrupts.raise_if_interrupted()
        if stamp.exists() and json.loads(stamp.read_text())["fingerprint"] == fingerprint:
            logger.info("%s: done before", stage.name)
        else:
            logger.info("%s", stage.description or f"{stage.name} …")
            stamp.unlink(missing_ok=True)
            started = time.monotonic()
            stage.run(context)
            seconds = round(time.monotonic() - started, 1)
            partial = stamp.with_suffix(".part")
            partial.write_text(json.dumps({"fingerprint": fingerprint, "seconds": seconds}))
            partial.replace(stamp)  # atomic: a stamp is complete or absent
            logger.info("%s: %.0f s", stage.name, seconds)
        if stage.name == until:
            break
    logger.info("all: %.0f s", time.monotonic() - began)


def stage_fingerprints(recipe: Recipe, stages: Sequence[PipelineStage]) -> list[tuple[PipelineStage, str]]:
    """Return the stages that a recipe needs, each with its fingerprint. Reads the metadata of all source files."""
    rows: list[tuple[PipelineStage, str]] = []
    before = ""
    for stage in stages:
        if stage.systems and not set(stage.systems) & set(recipe.systems):
            continue
        fingerprint = stage_fingerprint(recipe, stage, before)
        rows.append((stage, fingerprint))
        before = before if stage.is_optional_input(recipe) else fingerprint
    return rows


def stage_fingerprint(recipe: Recipe, stage: PipelineStage, before: str) -> str:
    """Return a hash of everything that decides a stage's output: settings, source files, and the stages `before` it."""
    parts = {name: recipe.part(name) for name in stage.parts}
    if "network" in parts and recipe.network.init_from:
        parts["network"]["init_from"] = pretrained_fingerprint(recipe)
    contents = [before, stage.name, parts, manifest_hash(stage.files(recipe))]
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()[:16]


def pretrained_fingerprint(recipe: Recipe) -> str:
    """Return a hash of the initial weights: the fingerprint of another recipe's network, or of the weights themselves."""
    if recipe.pretraining_recipe is None:
        model = network_stage.initial_model(recipe)
        return network_stage.weights_hash(model) if model is not None else ""
    before = load(recipe.pretraining_recipe)
    rows = stage_fingerprints(before, stages_of(before))
    return next(fingerprint for stage, fingerprint in rows if stage.name == "network")


def table(result: dict[str, Any]) -> str:
    """Return the word error rates as a text table."""
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
