"""Viterbi EM: accumulate, re-estimate and split over several passes; LDA, MLLT and state tying between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.errors import DataError
from roundelay.log.progress import Progress
from roundelay.speech.hmm.em_workers import EmStatistics, EmWorkers
from roundelay.speech.hmm.frontend import Frontend
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.hmm.transforms import LdaStatistics, MlltStatistics, transform_gmm
from roundelay.speech.hmm.tree import ContextStatistics, build_trees
from roundelay.speech.hmm.utterances import summarize_skipped
from roundelay.speech.hmm.viterbi import Array

logger = logging.getLogger(__name__)

# Variances stay above this fraction of the variance of all frames.
VARIANCE_FLOOR = 0.01
FRAMES_PER_COMPONENT = 60
LOOP_PRIOR = 0.6
LOOP_PRIOR_FRAMES = 5.0


@dataclass(frozen=True)
class EmSchedule:
    """The passes of one training stage."""

    name: str
    passes: int
    realign: Sequence[int]  # passes that realign
    components: int  # Gaussians at the end of splitting
    seed: int
    mllt: tuple[int, ...] = ()  # passes after which MLLT is estimated
    edge_silence: int = 0  # first passes, with mandatory silence at both ends of an utterance

    def run(self, model: AlignmentModel, workers: EmWorkers, floor: Array, progress: str) -> AlignmentModel:
        """Run all passes and return the trained model. The last quarter of them splits no components."""
        with Progress(self.name, "passes", progress) as bar:
            return self._run(model, workers, floor, bar)

    def _run(self, model: AlignmentModel, workers: EmWorkers, floor: Array, bar: Progress) -> AlignmentModel:
        last_split = max(1, self.passes * 3 // 4)
        initial_components = model.gmm.components
        for number in range(1, self.passes + 1):
            began = time.perf_counter()
            realign = number in self.realign
            total = accumulate(workers, model, realign, edge_silence=number <= self.edge_silence)
            gmm = model.gmm.updated(total.gmm, floor)
            if number < last_split:
                target = initial_components + (self.components - initial_components) * number // (last_split - 1)
                occupancy = np.add.reduceat(total.gmm.occupancy, model.gmm.first[:-1])
                gmm = gmm.grown(occupancy, target, seed=self.seed + number)
            loglike = total.gmm.loglike / total.gmm.frames
            logger.info(
                f"{self.name} pass {number}/{self.passes}: log likelihood {loglike:.3f}, "
                f"{model.gmm.components} Gaussians, {total.utterances} utterances"
                + (f", skipped {len(total.skipped)}" if total.skipped else "")
                + f"{', realigned' if realign else ''}, {time.perf_counter() - began:.1f} s"
            )
            bar.step(number, self.passes, f"log likelihood {loglike:.2f}")
            occupancy = total.stay + total.leave
            loops = (total.stay + LOOP_PRIOR * LOOP_PRIOR_FRAMES) / (occupancy + LOOP_PRIOR_FRAMES)
            model = model.replace(gmm=gmm, self_loop=np.clip(loops, 0.02, 0.98))
            if number in self.mllt:
                model, floor = _apply_mllt(model, workers)
        return model


def accumulate(
    workers: EmWorkers, model: AlignmentModel, realign: bool, where: str = "", edge_silence: bool = False
) -> EmStatistics:
    """Return the summed statistics of one pass; DataError if no utterance can be aligned."""
    parts: list[EmStatistics] = workers.call("accumulate", model, realign, edge_silence)
    total = parts[0]
    for part in parts[1:]:
        total.add(part)
    if total.utterances == 0:
        raise DataError(f"no utterance can be aligned: {summarize_skipped(total.skipped)}", where=where)
    return total


def global_moments(workers: EmWorkers, frontend: Frontend) -> Array:
    """Return count, sum and sum of squares of all frames of the corpus."""
    return np.asarray(sum(workers.call("moments", frontend)))


def mean_and_variance(moments: Array) -> tuple[Array, Array]:
    """Return the mean and the variance of frames from their count, sum and sum of squares."""
    dim = (len(moments) - 1) // 2
    mean = moments[1 : 1 + dim] / moments[0]
    return mean, np.maximum(moments[1 + dim :] / moments[0] - mean * mean, 1e-6)


def variance_floor(workers: EmWorkers, frontend: Frontend) -> Array:
    """Return the lower bound of variances for features of a front end."""
    return VARIANCE_FLOOR * mean_and_variance(global_moments(workers, frontend))[1]


def component_budget(gaussians: int, pdfs: int, frames: int) -> int:
    """Return the number of Gaussians at the end of training: `gaussians` per pdf if there are enough frames."""
    return max(min(gaussians * pdfs, frames // FRAMES_PER_COMPONENT), pdfs)


def tie_states(
    workers: EmWorkers, model: AlignmentModel, frontend: Frontend, *, leaves: int, min_frames: float, min_gain: float
) -> tuple[AlignmentModel, Array, int]:
    """Build decision trees from the current alignments.

    Return a model with one Gaussian per tied state, the variance floor, and the number of frames.
    """
    began = time.perf_counter()
    statistics = ContextStatistics.merged([s for s in workers.call("context_statistics", frontend) if s is not None])
    total = statistics.moments.sum(0)
    floor = VARIANCE_FLOOR * mean_and_variance(total)[1]
    phones = len(model.lexicon_phones)
    tied = build_trees(
        statistics,
        phones,
        [model.states(phone) for phone in range(phones)],
        leaves=leaves,
        min_frames=min_frames,
        min_gain=min_gain,
        floor=floor,
    )
    logger.info(
        f"tree: {len(statistics.keys)} states in context tied to {len(tied.occupancy)}, "
        f"log likelihood +{sum(tied.gains) / total[0]:.3f} per frame, {time.perf_counter() - began:.1f} s"
    )
    tied_model = model.replace(
        gmm=Gmm.single(tied.mean, tied.variance),
        self_loop=_inherited_loops(model, tied.table),
        table=tied.table,
        frontend=frontend,
    )
    return tied_model, floor, int(total[0])


def _inherited_loops(model: AlignmentModel, table: Array) -> Array:
    """Return self-loops of new pdfs, averaged over the old pdfs of the same states."""
    old = np.broadcast_to(model.table, table.shape).reshape(-1)
    new = table.reshape(-1)
    defined = new >= 0
    count = np.bincount(new[defined])
    return np.asarray(np.bincount(new[defined], weights=model.self_loop[old[defined]]) / count)


def estimate_lda(workers: EmWorkers, model: AlignmentModel, keep: int, splice: int, dim: int) -> Frontend:
    """Return a front end that projects spliced cepstra to `dim` dimensions, which separate the model's pdfs best."""
    plain = Frontend(keep, 0, splice)
    parts: list[LdaStatistics] = workers.call("lda_statistics", plain, model.pdf_by_key, model.num_pdfs)
    for part in parts[1:]:
        parts[0].add(part)
    return Frontend(plain.keep, 0, plain.splice, parts[0].transform(dim))


def _apply_mllt(model: AlignmentModel, workers: EmWorkers) -> tuple[AlignmentModel, Array]:
    """Estimate MLLT and apply it to front end and mixtures. Return the model and its new variance floor."""
    parts: list[MlltStatistics] = workers.call("mllt_statistics", model)
    for part in parts[1:]:
        parts[0].add(part)
    matrix = parts[0].transform()
    old = model.frontend
    assert old.matrix is not None
    frontend = Frontend(old.keep, old.deltas, old.splice, (matrix @ old.matrix).astype(np.float32))
    floor = variance_floor(workers, frontend)
    return model.replace(gmm=transform_gmm(model.gmm, matrix), self_loop=model.self_loop, frontend=frontend), floor
