"""The pipeline for existing Kaldi features and alignments: only the network is trained.

states     read Kaldi's alignments (pdfs, or transition-ids with the text model) of train and dev; compare with the features
network    train the LSTM on pasted feature streams with the engine
decode     decode with the user's HCLG.fst and words.txt; dev chooses the acoustic scale if it has transcripts
score      word error rates
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import DataError
from roundelay.recipes.config import KaldiInputs, Recipe
from roundelay.recipes.decode_stage import best_scale
from roundelay.recipes.network_stage import finish_network, train_network
from roundelay.recipes.pipeline_context import PipelineContext, recreate_dir
from roundelay.recipes.run_layout import LSTM, hypothesis_file
from roundelay.recipes.systems import open_system
from roundelay.speech.decode import decode_all
from roundelay.speech.features.feature_store import from_spec
from roundelay.speech.features.kaldi_ark import read_pdf_alignments, read_transitions
from roundelay.speech.graph.hclg import external_graph
from roundelay.speech.hmm.align import matching_utterances, write_alignments
from roundelay.speech.score import read_text, score, write_text

logger = logging.getLogger(__name__)
TEST = "test"


def kaldi_inputs_of(recipe: Recipe) -> KaldiInputs:
    assert recipe.kaldi is not None
    return recipe.kaldi


def relative_to_recipe(recipe: Recipe, spec: str) -> str:
    """Return a path or a pasted feature specification with every part relative to the recipe's directory."""
    return "+".join(str(recipe.folder / part.strip()) for part in spec.split("+"))


def training_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the files that the states stage reads: feature lists, alignments, the transition model."""
    inputs = kaldi_inputs_of(recipe)
    for spec in (inputs.train_features, inputs.dev_features):
        yield from listed_files(recipe, spec)
    for path in (inputs.train_alignments, inputs.dev_alignments, inputs.transitions):
        if path:
            yield recipe.folder / path


def decoding_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the files that decoding and scoring read."""
    inputs = kaldi_inputs_of(recipe)
    yield from listed_files(recipe, inputs.test_features)
    for path in (inputs.dev_text, inputs.test_text, inputs.test_utt2spk, inputs.graph):
        if path:
            yield recipe.folder / path


def listed_files(recipe: Recipe, spec: str) -> Iterator[Path]:
    """Yield the scp files of a pasted feature specification."""
    for part in spec.split("+"):
        if part.strip():
            yield recipe.folder / part.strip().partition("[")[0]


def transition_pdfs(recipe: Recipe, labels: str) -> np.ndarray | None:
    """Return the pdf of every transition-id, or None if the labels are pdfs."""
    if labels != "transitions":
        return None
    return read_transitions(Path(relative_to_recipe(recipe, kaldi_inputs_of(recipe).transitions)))


def read_states(context: PipelineContext) -> None:
    """Write alignments/train and alignments/dev. Raise DataError if they do not match the features."""
    recipe, inputs = context.recipe, kaldi_inputs_of(context.recipe)
    transitions = transition_pdfs(recipe, inputs.alignment_labels)
    sets = {
        "train": (inputs.train_alignments, inputs.train_features),
        "dev": (inputs.dev_alignments, inputs.dev_features),
    }
    for name, (path, spec) in sets.items():
        source, features = relative_to_recipe(recipe, path), relative_to_recipe(recipe, spec)
        states = read_pdf_alignments(Path(source), transitions)
        directory = recreate_dir(context.layout.alignments() / name)
        alignments = write_alignments(directory, states, inputs.num_pdfs, where=source)
        # Checked here: the engine would only report a mismatch in every learner.
        common = matching_utterances(from_spec(features), alignments, f"{features}, {source}")
        logger.info("  %s: %d utterances aligned, %d of them with features", name, len(states), len(common))


def train_on_kaldi_features(context: PipelineContext) -> None:
    """Write lstm/."""
    recipe, layout, inputs = context.recipe, context.layout, kaldi_inputs_of(context.recipe)
    features = {
        "train": relative_to_recipe(recipe, inputs.train_features),
        "dev": relative_to_recipe(recipe, inputs.dev_features),
    }
    trained = train_network(context, layout.network(), recipe.train, layout.alignments(), recipe.seed, features)
    finish_network(context, trained, layout.system(LSTM))


def has_test_set(inputs: KaldiInputs) -> bool:
    return bool(inputs.graph and inputs.test_features)


def decode_test_set(context: PipelineContext) -> None:
    """Write decode/lstm/test.txt, if the recipe names a graph and a test set."""
    recipe, inputs = context.recipe, kaldi_inputs_of(context.recipe)
    if not has_test_set(inputs):
        logger.info("  no graph or no test set: export the posteriors to decode elsewhere (roundelay export --posteriors)")
        return
    directory = Path(relative_to_recipe(recipe, inputs.graph))
    transitions = transition_pdfs(recipe, inputs.graph_labels)
    graph = external_graph(directory / "HCLG.fst", directory / "words.txt", num_pdfs=inputs.num_pdfs, transitions=transitions)
    system = open_system(context.layout, LSTM)
    out = recreate_dir(context.layout.decode(LSTM))
    options = recipe.decode
    if inputs.dev_text:
        dev = from_spec(relative_to_recipe(recipe, inputs.dev_features))
        refs = dev_transcripts(recipe, dev.ids)
        options = replace(options, acoustic_scale=best_scale(context, graph, partial(system.scores, dev), refs, out))
    test = from_spec(relative_to_recipe(recipe, inputs.test_features))
    scores = partial(system.scores, test)
    decoded = decode_all(graph, scores, test.ids, options, jobs=context.jobs, progress=context.progress)
    write_text(hypothesis_file(out, TEST), {name: h.words for name, h in decoded.items()})


def dev_transcripts(recipe: Recipe, ids: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the transcripts of about dev_utterances dev utterances, at equal distances so that all speakers occur."""
    path = relative_to_recipe(recipe, kaldi_inputs_of(recipe).dev_text)
    texts = read_text(Path(path))
    transcribed = [name for name in ids if texts.get(name)]
    if not transcribed:
        raise DataError(
            "no utterance of dev has both features and a transcript",
            where=path,
            hint="name the text of the dev set in kaldi.dev_text, or leave it empty",
        )
    return {name: texts[name] for name in transcribed[:: max(1, len(transcribed) // recipe.dev_utterances)]}


def score_test_set(context: PipelineContext) -> dict[str, Any]:
    """Write result.json and return its contents."""
    recipe, inputs = context.recipe, kaldi_inputs_of(context.recipe)
    result: dict[str, Any] = {"systems": [], "paired": []}
    if has_test_set(inputs) and inputs.test_text:
        refs = read_text(Path(relative_to_recipe(recipe, inputs.test_text)))
        speakers = None
        if inputs.test_utt2spk:
            rows = read_text(Path(relative_to_recipe(recipe, inputs.test_utt2spk)))
            speakers = {name: row[0] for name, row in rows.items() if row}
        scored = score(refs, read_text(hypothesis_file(context.layout.decode(LSTM), TEST)), speakers)
        result["systems"].append({"name": LSTM, "set": TEST, **scored.as_json(), "line": scored.line()})
    context.layout.result.write_text(json.dumps(result, indent=1))
    return result
