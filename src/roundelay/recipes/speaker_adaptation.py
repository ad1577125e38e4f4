"""Speaker-adapted features of a run: decode, estimate a transform per speaker from the hypotheses, decode again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from roundelay.recipes.run_layout import FIRST_PASS, LSTM, RunLayout
from roundelay.recipes.systems import chosen_scale, open_system, read_info
from roundelay.speech.decode import DecodeOptions, decode_all
from roundelay.speech.features.feature_store import ConcatFeatures, Stream
from roundelay.speech.hmm.adaptation import AdaptedFeatures, adapt
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.hmm.model import AlignmentModel

Transcripts = Mapping[str, Sequence[str]]
"""Words by utterance."""


def uses_adapted_features(layout: RunLayout, system: str) -> bool:
    return system == "sat" or (system == LSTM and bool(read_info(layout.system(system)).get("adapted")))


def stream_for(layout: RunLayout, system: str, store: Stream, adapted: Callable[[], Stream]) -> Stream:
    """Return the features that a system was trained on: the store, its adapted version, or both concatenated.

    `adapted` computes the adapted version. It is only called if the system uses it.
    """
    if not uses_adapted_features(layout, system):
        return store
    return adapted() if system == "sat" else ConcatFeatures([store, adapted()])


def adapt_supervised(
    layout: RunLayout, store: Stream, transcripts: Transcripts, *, jobs: int = 1, progress: str = "auto"
) -> AdaptedFeatures:
    """Return the store with a transform per speaker, estimated from transcripts."""
    model, lexicon = AlignmentModel.load(layout.system(FIRST_PASS)), Lexicon.read(layout.lexicon)
    prior = float(json.loads(layout.adapted_settings.read_text())["prior_frames"])
    return adapt(model, store, transcripts, lexicon, prior_frames=prior, jobs=jobs, progress=progress)


def first_pass(layout: RunLayout, store: Stream, *, jobs: int = 1, progress: str = "auto") -> Transcripts:
    """Return the hypotheses of the tied-state GMM on features that are not adapted."""
    system, options = open_system(layout, FIRST_PASS), DecodeOptions(acoustic_scale=chosen_scale(layout, FIRST_PASS))
    scores = partial(system.scores, store)
    return decode_all(layout.graph(FIRST_PASS), scores, store.ids, options, jobs=jobs, progress=progress).words


def adapt_unsupervised(layout: RunLayout, store: Stream, *, jobs: int = 1, progress: str = "auto") -> AdaptedFeatures:
    """Return the store with a transform per speaker, estimated from the hypotheses of the first pass."""
    hypotheses = first_pass(layout, store, jobs=jobs, progress=progress)
    return adapt_supervised(layout, store, hypotheses, jobs=jobs, progress=progress)
