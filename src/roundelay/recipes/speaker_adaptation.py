"""Which features a system takes of a set, where they are adapted to the voices in it: recognised, adapted, recognised again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from roundelay.recipes.systems import FIRST_PASS, chosen_scale, graph_of, open_system, read_about
from roundelay.speech.decode import DecodeOptions, decode_all
from roundelay.speech.features.feature_store import ConcatFeatures, Stream
from roundelay.speech.hmm.adaptation import AdaptedFeatures, adapt
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.hmm.model import AlignmentModel

Said = Mapping[str, Sequence[str]]
ADAPTED = "adapted"
"""The folder of a run with the transforms of its training and development speakers."""
SETTINGS = "sat.json"


def takes_adapted(run: Path, system: str) -> bool:
    return system == "sat" or (system == "lstm" and bool(read_about(run / system).get("adapted")))


def stream_for(run: Path, system: str, store: Stream, voices: Callable[[], Stream]) -> Stream:
    """The features that a system of a run was trained on: those of the store, or with `voices`, the same adapted."""
    if not takes_adapted(run, system):
        return store
    return voices() if system == "sat" else ConcatFeatures([store, voices()])


def adapt_supervised(run: Path, store: Stream, said: Said, *, jobs: int = 1, progress: str = "auto") -> AdaptedFeatures:
    """The store through transforms estimated from words, transcripts or recognised ones."""
    model, lexicon = AlignmentModel.load(run / FIRST_PASS), Lexicon.read(run / "data" / "lexicon.txt")
    prior = float(json.loads((run / ADAPTED / SETTINGS).read_text())["prior_frames"])
    return adapt(model, store, said, lexicon, prior_frames=prior, jobs=jobs, progress=progress)


def first_pass(run: Path, store: Stream, *, jobs: int = 1, progress: str = "auto") -> Said:
    """What the tied-state GMM recognises, in features that know nothing of voices."""
    system, options = open_system(run, FIRST_PASS), DecodeOptions(acoustic_scale=chosen_scale(run, FIRST_PASS))
    graph, scores = run / graph_of(FIRST_PASS), partial(system.scores, store)
    return decode_all(graph, scores, store.ids, options, jobs=jobs, progress=progress).words


def adapt_unsupervised(run: Path, store: Stream, *, jobs: int = 1, progress: str = "auto") -> AdaptedFeatures:
    """Adapted to what a first pass has recognised: nobody has to know what was said."""
    return adapt_supervised(run, store, first_pass(run, store, jobs=jobs, progress=progress), jobs=jobs, progress=progress)
