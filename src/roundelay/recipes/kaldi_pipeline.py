"""Recipes for people who hold features and alignments already, as Kaldi writes them: the network's part of the road.

states     Kaldi's alignments (pdfs, or transition-ids with the text model) of train and dev, held against the features
network    the LSTM on pasted feature streams, trained through the engine
decode     with the user's own HCLG.fst and words.txt, acoustic scale from dev where it has a text
score      word error rates
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import DataError
from roundelay.recipes.config import KaldiInputs
from roundelay.recipes.stages import PipelineContext, best_scale, finish_network, recreate_dir, train_network
from roundelay.recipes.systems import open_system
from roundelay.speech.decode import decode_all
from roundelay.speech.features.feature_store import from_spec
from roundelay.speech.features.kaldi_ark import read_pdf_alignments, read_transitions
from roundelay.speech.graph.hclg import external_graph
from roundelay.speech.hmm.align import matching_utterances, write_alignments
from roundelay.speech.score import read_text, score, write_text


def kaldi_inputs_of(work: PipelineContext) -> KaldiInputs:
    assert work.recipe.kaldi is not None
    return work.recipe.kaldi


def beside(work: PipelineContext, text: str) -> str:
    """A path or a pasted specification, relative to the recipe's folder."""
    return "+".join(str(work.recipe.folder / part.strip()) for part in text.split("+"))


def pdfs_of(work: PipelineContext, labels: str) -> np.ndarray | None:
    """The pdf of every transition-id, where the labels are such."""
    return read_transitions(Path(beside(work, kaldi_inputs_of(work).transitions))) if labels == "transitions" else None


def states(work: PipelineContext) -> None:
    given = kaldi_inputs_of(work)
    transitions = pdfs_of(work, given.alignment_labels)
    sets = {
        "train": (given.train_alignments, given.train_features),
        "dev": (given.dev_alignments, given.dev_features),
    }
    for name, (path, spec) in sets.items():
        source, features = beside(work, path), beside(work, spec)
        found = read_pdf_alignments(Path(source), transitions)
        written = write_alignments(recreate_dir(work.run / "alignments" / name), found, given.num_pdfs, where=source)
        # Here rather than in the engine, which would find it out in every learner.
        both = matching_utterances(from_spec(features), written, f"{features}, {source}")
        work.say(f"  {name}: {len(found)} utterances aligned, {len(both)} of them with features")


def network(work: PipelineContext) -> None:
    given = kaldi_inputs_of(work)
    features = {"train": beside(work, given.train_features), "dev": beside(work, given.dev_features)}
    train_network(work, work.run / "network", work.recipe.train, work.run / "alignments", work.recipe.seed, features)
    finish_network(work, work.run / "network", work.run / "lstm")


def decodes(given: KaldiInputs) -> bool:
    return bool(given.graph and given.test_features)


def decode(work: PipelineContext) -> None:
    given = kaldi_inputs_of(work)
    if not decodes(given):
        work.say("  no graph or no test set is given: decode the posteriors elsewhere (roundelay export --posteriors)")
        return
    folder = Path(beside(work, given.graph))
    transitions = pdfs_of(work, given.graph_labels)
    graph = external_graph(folder / "HCLG.fst", folder / "words.txt", num_pdfs=given.num_pdfs, transitions=transitions)
    system = open_system(work.run, "lstm")
    out = recreate_dir(work.run / "decode" / "lstm")
    options = work.recipe.decode
    if given.dev_text:
        dev = from_spec(beside(work, given.dev_features))
        refs = some_of_dev(work, dev.ids)
        options = replace(options, acoustic_scale=best_scale(work, graph, partial(system.scores, dev), refs, out))
    test = from_spec(beside(work, given.test_features))
    found = decode_all(graph, partial(system.scores, test), test.ids, options, jobs=work.jobs, progress=work.progress)
    write_text(out / "test.txt", {name: h.words for name, h in found.items()})


def some_of_dev(work: PipelineContext, ids: list[str]) -> dict[str, tuple[str, ...]]:
    """Transcripts of dev utterances, taken evenly so that all speakers are heard."""
    path = beside(work, kaldi_inputs_of(work).dev_text)
    texts = read_text(Path(path))
    spoken = [name for name in ids if texts.get(name)]
    if not spoken:
        raise DataError("no utterance of dev has features and words", where=path, hint="give the text of the dev set, or none")
    return {name: texts[name] for name in spoken[:: max(1, len(spoken) // work.recipe.dev_utterances)]}


def score_all(work: PipelineContext) -> dict[str, Any]:
    given = kaldi_inputs_of(work)
    result: dict[str, Any] = {"systems": [], "paired": []}
    if decodes(given) and given.test_text:
        refs = read_text(Path(beside(work, given.test_text)))
        speakers = None
        if given.test_utt2spk:
            rows = read_text(Path(beside(work, given.test_utt2spk)))
            speakers = {name: row[0] for name, row in rows.items() if row}
        found = score(refs, read_text(work.run / "decode" / "lstm" / "test.txt"), speakers)
        result["systems"].append({"name": "lstm", "set": "test", **found.as_json(), "line": found.line()})
    (work.run / "result.json").write_text(json.dumps(result, indent=1))
    return result
