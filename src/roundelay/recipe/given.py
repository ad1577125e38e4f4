"""Recipes for people who hold features and alignments already, as Kaldi writes them: the network's part of the road.

states     Kaldi's alignments (pdfs, or transition-ids with the text model) of train and dev
network    the LSTM on pasted feature streams, trained through the engine
decode     with the user's own HCLG.fst and words.txt, acoustic scale from dev where it has a text
score      word error rates
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundelay.asr.align import write_states
from roundelay.asr.decode import decode_all
from roundelay.asr.features import from_spec
from roundelay.asr.graph import own_graph
from roundelay.asr.kaldi import read_pdf_alignments, read_transitions
from roundelay.asr.score import read_text, score, write_text
from roundelay.recipe.settings import Given
from roundelay.recipe.stages import Work, best_scale, finish_network, fresh, train_network
from roundelay.recipe.systems import open_system


def given_of(work: Work) -> Given:
    assert work.recipe.given is not None
    return work.recipe.given


def beside(work: Work, text: str) -> str:
    """A path or a pasted specification, relative to the recipe's folder."""
    return "+".join(str(work.recipe.folder / part) for part in text.split("+"))


def states(work: Work) -> None:
    given = given_of(work)
    transitions = read_transitions(Path(beside(work, given.transitions))) if given.transitions else None
    for name, path in (("train", given.train_alignments), ("dev", given.dev_alignments)):
        found = read_pdf_alignments(Path(beside(work, path)), transitions)
        write_states(fresh(work.run / "alignments" / name), found, given.num_pdfs)
        work.say(f"  {name}: {len(found)} utterances")


def network(work: Work) -> None:
    given = given_of(work)
    features = {"train": beside(work, given.train_features), "dev": beside(work, given.dev_features)}
    train_network(work, work.run / "network", work.recipe.train, work.run / "alignments", work.recipe.seed, features)
    finish_network(work, work.run / "network", work.run / "lstm")


def decode(work: Work) -> None:
    given = given_of(work)
    if not given.graph:
        work.say("  no graph is given: decode the exported posteriors elsewhere (roundelay export --help)")
        return
    transitions = read_transitions(Path(beside(work, given.transitions))) if given.graph_labels == "transitions" else None
    folder = Path(beside(work, given.graph))
    graph = own_graph(folder / "HCLG.fst", folder / "words.txt", num_pdfs=given.num_pdfs, transitions=transitions)
    system = open_system(work.run, "lstm")
    out = fresh(work.run / "decode" / "lstm")
    options = work.recipe.decode
    if given.dev_text:
        store = from_spec(beside(work, given.dev_features))
        texts = read_text(Path(beside(work, given.dev_text)))
        refs = {name: texts[name] for name in store.ids[: work.recipe.dev_utterances] if name in texts}
        options = replace(options, acoustic_scale=best_scale(work, graph, lambda name: system.scores(store, name), refs, out))
    test = from_spec(beside(work, given.test_features))
    found = decode_all(graph, lambda name: system.scores(test, name), test.ids, options, jobs=work.jobs, progress=work.progress)
    write_text(out / "test.txt", {name: h.words for name, h in found.items()})


def score_all(work: Work) -> dict[str, Any]:
    given = given_of(work)
    result: dict[str, Any] = {"systems": [], "paired": []}
    if given.graph and given.test_text:
        refs = read_text(Path(beside(work, given.test_text)))
        speakers = {name: row[0] for name, row in read_text(Path(beside(work, given.test_utt2spk))).items()}
        found = score(refs, read_text(work.run / "decode" / "lstm" / "test.txt"), speakers)
        result["systems"].append({"name": "lstm", "set": "test", **found.as_json(), "line": found.line()})
    (work.run / "result.json").write_text(json.dumps(result, indent=1))
    return result
