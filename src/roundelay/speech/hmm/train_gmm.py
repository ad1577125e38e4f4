"""Training of GMM-HMM alignment models: monophones from a flat start, tied triphones with LDA+MLLT, and SAT.

Progress of the passes is logged at level INFO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from roundelay.errors import DataError, UsageError
from roundelay.speech.hmm.adaptation import PRIOR_FRAMES
from roundelay.speech.hmm.em import (
    LOOP_PRIOR,
    VARIANCE_FLOOR,
    EmSchedule,
    accumulate,
    component_budget,
    estimate_lda,
    global_moments,
    mean_and_variance,
    tie_states,
    variance_floor,
)
from roundelay.speech.hmm.em_workers import EmWorkers
from roundelay.speech.hmm.frontend import Frontend
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.lexicon import SILENCE
from roundelay.speech.hmm.model import AlignmentModel, monophone_table
from roundelay.speech.hmm.utterances import FeatureSource, OnMissing, select_utterances, summarize_skipped

if TYPE_CHECKING:
    from roundelay.speech.corpora.utterance import Corpus
    from roundelay.speech.hmm.lexicon import Lexicon

logger = logging.getLogger(__name__)

# LDA separates the tied states of a model with deltas that was trained in this way.
DELTA_PASSES, DELTA_REALIGN, DELTA_GAUSSIANS = 10, (4, 7, 10), 3
# Passes after which MLLT is estimated.
MLLT_PASSES = (2, 4, 6, 12)


@dataclass(frozen=True)
class MonoOptions:
    """Options of monophone training."""

    states: int = 3  # HMM states per phone
    silence_states: int = 3  # HMM states of silence
    silence_probability: float = 0.5  # probability of silence before, between and after words
    passes: int = 30  # passes over the corpus; the first ten realign, later ones at wider intervals
    gaussians: int = 16  # average number of Gaussians per state at the end
    deltas: int = 2  # order of the deltas appended to the cepstra
    force_edge_silence_passes: float = 0.0
    """Fraction of the passes, from the first, in which silence is mandatory at both ends of an utterance. The silence model
    then learns all kinds of background noise, which word models would absorb otherwise. Leave it at 0 for recordings that
    were trimmed to the words."""
    seed: int = 0  # seed of component splitting
    on_missing: OnMissing = "error"  # what to do with a word without pronunciation: error, or skip its utterance


@dataclass(frozen=True)
class TriOptions:
    """Options of triphone training."""

    leaves: int = 1000  # maximum number of tied states; a small corpus gets fewer
    min_frames: float = 150.0  # minimum number of frames of a tied state
    min_gain: float = 200.0  # minimum log-likelihood gain of a split
    passes: int = 30  # passes over the corpus; every third one realigns
    gaussians: int = 10  # average number of Gaussians per tied state at the end
    splice: int = 4  # frames on each side that LDA sees; 0 keeps cepstra with deltas
    dim: int = 40  # dimension of the features after LDA
    seed: int = 0  # seed of component splitting
    on_missing: OnMissing = "error"  # what to do with a word without pronunciation: error, or skip its utterance


@dataclass(frozen=True)
class SatOptions:
    """Options of speaker-adaptive training."""

    passes: int = 9  # passes over the adapted corpus; every third one realigns
    prior_frames: float = PRIOR_FRAMES  # weight, in frames, of the prior that keeps a speaker's transform near the identity
    seed: int = 0  # seed of component splitting
    on_missing: OnMissing = "error"  # what to do with a word without pronunciation: error, or skip its utterance

    def __post_init__(self) -> None:
        if not self.prior_frames > 0:
            raise UsageError(
                f"prior_frames must be > 0 (got {self.prior_frames:g})",
                where="sat",
                hint="choose a positive number: without a prior, a speaker with few frames has no transform",
            )


def train_mono(
    store: FeatureSource,
    corpus: Corpus,
    lexicon: Lexicon,
    options: MonoOptions | None = None,
    *,
    jobs: int = 1,
    progress: str = "none",
) -> AlignmentModel:
    """Train monophones from transcripts: start with equal alignments, then realign repeatedly.

    The model does not depend on `jobs`, the number of processes. Raises DataError if no utterance can be aligned.
    """
    options = options or MonoOptions()
    phones = [SILENCE, *(phone for phone in lexicon.phones if phone != SILENCE)]
    table = monophone_table(len(phones), options.states, options.silence_states)
    pdfs = int(table.max()) + 1
    frontend = Frontend(deltas=options.deltas)
    with _em_workers(store, corpus, lexicon, options.on_missing, jobs) as workers:
        moments = global_moments(workers, frontend)
        mean, variance = mean_and_variance(moments)
        model = AlignmentModel(
            phones,
            table,
            np.full(pdfs, LOOP_PRIOR),
            Gmm.single(np.tile(mean, (pdfs, 1)), np.tile(variance, (pdfs, 1))),
            states_per_phone=options.states,
            silence_states=options.silence_states,
            silence_probability=options.silence_probability,
            frontend=frontend,
        )
        _flat_start(workers, model, str(corpus.folder))
        budget = component_budget(options.gaussians, pdfs, int(moments[0]))
        realign = [n for n in range(2, options.passes + 1) if n <= 11 or (n <= 21 and n % 2) or n % 3 == 0]
        edge_silence = int(options.force_edge_silence_passes * options.passes)
        schedule = EmSchedule("mono", options.passes, realign, budget, options.seed, edge_silence=edge_silence)
        return schedule.run(model, workers, VARIANCE_FLOOR * variance, progress)


def train_tri(
    mono: AlignmentModel,
    store: FeatureSource,
    corpus: Corpus,
    lexicon: Lexicon,
    options: TriOptions | None = None,
    *,
    jobs: int = 1,
    progress: str = "none",
) -> AlignmentModel:
    """Train triphones with tied states from the alignments of a monophone model; with `splice` > 0 on LDA+MLLT features.

    The model does not depend on `jobs`, the number of processes. Raises DataError if no utterance can be aligned.
    """
    options = options or TriOptions()
    with _em_workers(store, corpus, lexicon, options.on_missing, jobs) as workers:
        accumulate(workers, mono, True, str(corpus.folder))
        tie = partial(
            tie_states, workers, mono, leaves=options.leaves, min_frames=options.min_frames, min_gain=options.min_gain
        )
        frontend = mono.frontend
        mllt: tuple[int, ...] = ()
        if options.splice > 0:
            model, floor, frames = tie(mono.frontend)
            budget = component_budget(DELTA_GAUSSIANS, model.num_pdfs, frames)
            schedule = EmSchedule("tri, deltas", DELTA_PASSES, DELTA_REALIGN, budget, options.seed)
            model = schedule.run(model, workers, floor, progress)
            frontend, mllt = estimate_lda(workers, model, mono.frontend.keep, options.splice, options.dim), MLLT_PASSES
        model, floor, frames = tie(frontend)
        budget = component_budget(options.gaussians, model.num_pdfs, frames)
        realign = [n for n in range(4, options.passes + 1) if n % 3 == 1]
        schedule = EmSchedule("tri", options.passes, realign, budget, options.seed, mllt)
        return schedule.run(model, workers, floor, progress)


def train_sat(
    tri: AlignmentModel,
    store: FeatureSource,
    corpus: Corpus,
    lexicon: Lexicon,
    options: SatOptions | None = None,
    *,
    jobs: int = 1,
    progress: str = "none",
) -> AlignmentModel:
    """Train the tied states of a triphone model again on speaker-adapted features (`adaptation.adapt`).

    The model does not depend on `jobs`, the number of processes. Raises DataError if no utterance can be aligned.
    """
    options = options or SatOptions()
    model = tri.replace(gmm=tri.gmm, self_loop=tri.self_loop, frontend=Frontend(keep=0, deltas=0))
    with _em_workers(store, corpus, lexicon, options.on_missing, jobs) as workers:
        floor = variance_floor(workers, model.frontend)
        realign = [n for n in range(1, options.passes + 1) if n % 3 == 1]
        schedule = EmSchedule("sat", options.passes, realign, model.gmm.components, options.seed)
        return schedule.run(model, workers, floor, progress)


@contextmanager
def _em_workers(
    store: FeatureSource, corpus: Corpus, lexicon: Lexicon, on_missing: OnMissing, jobs: int
) -> Iterator[EmWorkers]:
    """Select the usable utterances and spread them over worker processes; DataError if there are none."""
    selection = select_utterances(store, corpus, lexicon, on_missing)
    without_features = len(selection.skipped) - selection.unknown_words.total()
    if without_features:
        logger.info(f"{without_features} utterances have no features and are left out")
    if selection.unknown_words:
        words = ", ".join(word for word, _ in selection.unknown_words.most_common(5))
        logger.info(f"{selection.unknown_words.total()} utterances have words without pronunciation ({words}) and are left out")
    if not selection.usable:
        raise DataError("no utterance has features and pronunciations", where=str(corpus.folder))
    workers = EmWorkers([(u.id, u.words) for u in selection.usable], store, lexicon, jobs)
    with workers:
        yield workers


def _flat_start(workers: EmWorkers, model: AlignmentModel, where: str) -> None:
    """Align all utterances equally; DataError if all of them are too short."""
    skipped: dict[str, str] = {}
    for part in workers.call("align_equal", model):
        skipped |= part
    if len(skipped) == workers.utterances:
        raise DataError(f"no utterance can be aligned: {summarize_skipped(skipped)}", where=where)
