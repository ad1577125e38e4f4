"""The last stages: language model and decoding graphs, hypotheses of every system, word error rates."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.metrics import run_files
from roundelay.metrics.events import read_events
from roundelay.metrics.tensorboard import ScalarWriter
from roundelay.recipes.pipeline_context import PipelineContext, recreate_dir
from roundelay.recipes.run_layout import LSTM, RunLayout, hypothesis_file, scale_file
from roundelay.recipes.speaker_adaptation import adapt_unsupervised, stream_for
from roundelay.recipes.systems import SYSTEMS, open_system
from roundelay.speech.decode import choose_scale, decode_all
from roundelay.speech.features.feature_store import Stream, from_spec
from roundelay.speech.graph.hclg import Graph, build_graph
from roundelay.speech.graph.ngram import estimate, single_word_ngram
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.score import paired, read_text, score, write_text

logger = logging.getLogger(__name__)


def build_graphs(context: PipelineContext) -> None:
    """Estimate the language model and write lm.arpa, lm.json, and a decoding graph for mono and for tri."""
    lexicon, layout, language = context.lexicon(), context.layout, context.recipe.language
    sentences = [line.split() for line in layout.lm_text.read_text().splitlines() if line.strip()]
    if language.isolated_words:
        lm = single_word_ngram(lexicon.entries)
    else:
        lm = estimate(sentences, language.order, sorted(lexicon.entries))
    lm.write_arpa(layout.lm_arpa)
    perplexity, unknown = {}, {}
    for name in context.sets():
        text = [u.words for u in context.corpus(name).utterances]
        fit = lm.measure(text)
        perplexity[name], unknown[name] = fit.perplexity, fit.oov.total() / max(1, sum(map(len, text)))
        logger.info(
            "  %s: perplexity %.1f, %.1f %% of the words out of vocabulary", name, perplexity[name], 100 * unknown[name]
        )
    info = {"order": lm.order, "words": len(lexicon.entries), "sentences": len(sentences)}
    layout.lm_info.write_text(json.dumps({**info, "perplexity": perplexity, "unknown": unknown}))
    for system in ("mono", "tri"):
        if layout.system(system).is_dir():
            model = AlignmentModel.load(layout.system(system))
            build_graph(model, lexicon, lm, recreate_dir(layout.graph(system)), progress=context.progress)


def decode_systems(context: PipelineContext) -> None:
    """Write decode/SYSTEM/SET.txt for all systems of the recipe."""
    layout = context.layout
    shutil.rmtree(layout.adapted_decoded_root, ignore_errors=True)
    for system in context.recipe.systems:
        decode_system(context, layout, system, layout.decode(system))


def decode_system(context: PipelineContext, run: RunLayout, system: str, directory: Path) -> None:
    """Choose the acoustic scale on dev, then decode every test set into `directory`.

    `run` holds the system. Features, graphs and transcripts are those of the context.
    """
    recreate_dir(directory)
    logger.info("  %s", SYSTEMS[system])
    model, graph = open_system(run, system), context.layout.graph(system)
    dev = context.corpus("dev")
    store = stream_for(run, system, context.store("dev"), partial(adapted_features_of, context, "dev"))
    ids = [u.id for u in dev.utterances if u.id in set(store.ids)]
    ids = ids[:: max(1, len(ids) // context.recipe.dev_utterances)]
    refs = {name: dev.by_id[name].words for name in ids}
    scale = best_scale(context, graph, partial(model.scores, store), refs, directory)
    options = replace(context.recipe.decode, acoustic_scale=scale)
    for name in context.sets():
        test = stream_for(run, system, context.store(name), partial(adapted_features_of, context, name))
        decoded = decode_all(
            graph, partial(model.scores, test), test.ids, options, jobs=context.jobs, progress=context.progress
        )
        write_text(hypothesis_file(directory, name), {u: h.words for u, h in decoded.items()})


def adapted_features_of(context: PipelineContext, name: str) -> Stream:
    """Return the features of a set, adapted to the hypotheses of the first pass. Estimate them once for all systems."""
    directory = context.layout.adapted_decoded(name)
    if not directory.is_dir():
        adapted = adapt_unsupervised(context.layout, context.store(name), jobs=context.jobs, progress=context.progress)
        adapted.save(directory)
    return from_spec(str(directory))


def best_scale(
    context: PipelineContext, graph: Path | Graph, scores: Callable[[str], np.ndarray], refs: dict[str, Any], directory: Path
) -> float:
    """Return the acoustic scale with the lowest word error rate on dev, and write it to scale.json."""
    recipe = context.recipe
    choice = choose_scale(
        graph, scores, refs, recipe.decode, recipe.scales, jobs=context.jobs, progress=context.progress
    )  # fmt: skip
    rates = {f"{scale:g}": round(scored.wer, 2) for scale, scored in choice.scores.items()}
    listing = ", ".join(f"{scale}: {wer:.1f} %" for scale, wer in rates.items())
    logger.info("  acoustic scale %g; WER on dev: %s", choice.scale, listing)
    scale_file(directory).write_text(json.dumps({"acoustic_scale": choice.scale, "dev_wer": rates}))
    return choice.scale


def score_systems(context: PipelineContext) -> dict[str, Any]:
    """Write result.json and return its contents: word error rates, paired comparisons, the language model."""
    layout, systems = context.layout, context.recipe.systems
    rows: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    for name in context.sets():
        corpus = context.corpus(name)
        refs = {u.id: u.words for u in corpus.utterances}
        speakers = {u.id: u.speaker for u in corpus.utterances}
        hyps = {system: read_text(hypothesis_file(layout.decode(system), name)) for system in systems}
        for system in systems:
            scored = score(refs, hyps[system], speakers)
            rows.append({"name": system, "set": name, **scored.as_json(), "line": scored.line()})
        for worse, better in pairwise(systems):
            pair = paired(refs, hyps[worse], hyps[better], speakers)
            comparisons.append({"set": name, "from": worse, "to": better, **rounded(asdict(pair))})
    result = {"systems": rows, "paired": comparisons, "language_model": json.loads(layout.lm_info.read_text())}
    layout.result.write_text(json.dumps(result, indent=1))
    log_word_error_rate(context.run, rows)
    return result


def log_word_error_rate(run: Path, rows: list[dict[str, Any]]) -> None:
    """Add the network's word error rate to its TensorBoard files, if it has any."""
    training = run_files.training_dir(run)
    rates = [row["wer"] for row in rows if row["name"] == LSTM]
    if training is None or not rates or not (training / run_files.TENSORBOARD).is_dir():
        return
    events = read_events(training / run_files.EVENTS)
    position = max((int(e["position"]) for e in events if e["event"] == "evaluation"), default=0)
    writer = ScalarWriter(training / run_files.TENSORBOARD, position + 1)
    writer.scalars(position, {"valid/wer": rates[0]})
    writer.close()


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with floats rounded to 4 decimals."""
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
