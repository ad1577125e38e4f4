"""Stages from features to alignments. Each one writes a directory of the run and can be repeated.

data       data directories of the sets, lexicon, LM text           (data_stage)
features   normalized log-mel features
mono, tri  GMM-HMMs, Viterbi training
align      tied states of train and dev
sat        transforms per speaker, and a tied-state GMM on the transformed features
network    the LSTM, trained by the engine                          (network_stage)
graph      language model and decoding graphs                       (decode_stage)
decode     hypotheses of every system; dev chooses the acoustic scale
score      word error rates with confidence intervals
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import numpy as np

from roundelay.recipes.pipeline_context import PipelineContext, StageLog, recreate_dir
from roundelay.recipes.run_layout import FIRST_PASS
from roundelay.recipes.speaker_adaptation import adapt_supervised
from roundelay.recipes.systems import System
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import Stream, from_spec
from roundelay.speech.hmm import word_times
from roundelay.speech.hmm.align import align_all
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.hmm.train_gmm import train_mono, train_sat, train_tri

logger = logging.getLogger(__name__)
FRAMES_PER_HOUR = 360_000


def extract_features(context: PipelineContext) -> None:
    """Write features/SET for all sets."""
    settings = context.recipe.features
    options = FeatureOptions(rate=settings.rate, mels=settings.mels, deltas=settings.deltas, cmvn=settings.cmvn)  # type: ignore[arg-type]
    for name in ("train", "dev", *context.sets()):
        store = extract(
            context.corpus(name),
            recreate_dir(context.layout.features(name)),
            options,
            jobs=context.jobs,
            resample=settings.resample,
            progress=context.progress,
            longest_s=settings.longest_s,
        )
        skipped = f", {len(store.skipped)} utterances skipped (too short)" if store.skipped else ""
        logger.info("  %s: %.2f h%s", name, store.total_frames / FRAMES_PER_HOUR, skipped)


def train_monophones(context: PipelineContext) -> None:
    """Write mono/."""
    with StageLog(context, "mono"):
        model = train_mono(
            context.store("train"), context.corpus("train"), context.lexicon(), context.recipe.mono,
            jobs=context.jobs, progress=context.progress,
        )  # fmt: skip
    model.save(recreate_dir(context.layout.system("mono")))


def train_triphones(context: PipelineContext) -> None:
    """Write tri/."""
    mono = AlignmentModel.load(context.layout.system("mono"))
    with StageLog(context, "tri"):
        model = train_tri(
            mono, context.store("train"), context.corpus("train"), context.lexicon(), context.recipe.tri,
            jobs=context.jobs, progress=context.progress,
        )  # fmt: skip
    model.save(recreate_dir(context.layout.system("tri")))


def train_speaker_adapted(context: PipelineContext) -> None:
    """Write adapted/train and adapted/dev (transforms from the transcripts), then sat/, trained on the adapted features."""
    layout = context.layout
    recreate_dir(layout.adapted_root)
    layout.adapted_settings.write_text(json.dumps({"prior_frames": context.recipe.sat.prior_frames}))
    for name in ("train", "dev"):
        transcripts = {u.id: u.words for u in context.corpus(name).utterances}
        adapted = adapt_supervised(
            layout, context.store(name), transcripts, jobs=context.jobs, progress=context.progress
        )  # fmt: skip
        adapted.save(layout.adapted(name))
    first_pass, train = AlignmentModel.load(layout.system(FIRST_PASS)), from_spec(str(layout.adapted("train")))
    with StageLog(context, "sat"):
        model = train_sat(
            first_pass, train, context.corpus("train"), context.lexicon(), context.recipe.sat,
            jobs=context.jobs, progress=context.progress,
        )  # fmt: skip
    model.save(recreate_dir(layout.system("sat")))


def align_with_gmm(context: PipelineContext) -> None:
    """Write alignments/train and alignments/dev with the tied-state GMM."""
    align_sets(context, context.layout.alignments())


def align_sets(context: PipelineContext, alignments: Path, system: System | None = None) -> None:
    """Align train and dev with the scores of the tied-state GMM, or of `system`, which must share its tied states."""
    layout = context.layout
    model = AlignmentModel.load(layout.system("tri"))
    for name in ("train", "dev"):
        scores = None
        if system is not None:
            stream = from_spec(layout.feature_spec(name, context.recipe.network.adapted))
            scores = partial(scaled_scores, system, stream, context.recipe.decode.acoustic_scale)
        aligned = align_all(
            model,
            context.store(name),
            context.corpus(name),
            context.lexicon(),
            recreate_dir(alignments / name),
            jobs=context.jobs,
            progress=context.progress,
            loglikes=scores,
        )
        logger.info("  %s: %d aligned, %d skipped", name, len(aligned.ids), len(aligned.skipped))
        reference = layout.data_set(name) / word_times.FILE
        if reference.exists():
            offsets = word_times.compare(aligned, word_times.read_word_times(reference))
            logger.info("  %s: %s", name, offsets.line())
            layout.alignment_offsets(alignments, name).write_text(json.dumps(offsets.as_json()))


def scaled_scores(system: System, store: Stream, scale: float, utterance: str) -> np.ndarray:
    """Return the scores of one utterance times the acoustic scale."""
    return scale * system.scores(store, utterance)
