"""Blocks of utterances in worker processes: the accumulation passes of GMM training.

The number of blocks does not depend on the number of processes (up to BLOCKS of them), and statistics are summed in the order
of the blocks, so a model does not depend on how many processes trained it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roundelay.core.process_map import WorkerPool
from roundelay.errors import DataError
from roundelay.speech.hmm.frontend import Frontend
from roundelay.speech.hmm.gmm import GmmStatistics
from roundelay.speech.hmm.lexicon import SILENCE_INDEX
from roundelay.speech.hmm.transforms import LdaStatistics, MlltStatistics
from roundelay.speech.hmm.tree import ContextStatistics
from roundelay.speech.hmm.utterances import FeatureSource
from roundelay.speech.hmm.viterbi import Array

if TYPE_CHECKING:
    from roundelay.speech.hmm.lexicon import Lexicon
    from roundelay.speech.hmm.model import AlignmentModel
    from roundelay.speech.hmm.utterance_graph import UtteranceGraph

BLOCKS = 8
# Features and graphs of corpora up to this size stay in memory between passes (22 hours; about 1.5 GB).
MAX_CACHED_FRAMES = 8_000_000
# Frames per matrix product of the statistics.
BATCH_FRAMES = 50_000

UtteranceWords = tuple[str, tuple[str, ...]]
"""An utterance's id and words."""


@dataclass
class EmStatistics:
    """The statistics of one pass over one block, or the sum of several."""

    gmm: GmmStatistics
    stay: Array  # float64 [pdfs]: frames followed by another one of the same state
    leave: Array  # float64 [pdfs]
    utterances: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, other: EmStatistics) -> None:
        self.gmm.add(other.gmm)
        self.stay += other.stay
        self.leave += other.leave
        self.utterances += other.utterances
        self.skipped |= other.skipped


class UtteranceBlock:
    """Some utterances with their current alignments; with `cache` also their features and graphs."""

    def __init__(self, utterances: Sequence[UtteranceWords], store: FeatureSource, lexicon: Lexicon, cache: bool) -> None:
        self.utterances, self.store, self.lexicon, self.cache = utterances, store, lexicon, cache
        self.keys: dict[str, Array] = {}
        self._features: dict[str, Array] = {}
        self._frontend: Frontend | None = None
        self._graphs: dict[str, UtteranceGraph] = {}
        self._graph_kind: tuple[int, ...] = ()

    # ---------------------------------------------------------------------------------------------------- passes

    def align_equal(self, model: AlignmentModel) -> dict[str, str]:
        """Align each utterance with an equal number of frames per state (flat start).

        The states are those of silence, the first pronunciation of each word, and silence. Return the skipped utterances with
        reasons.
        """
        skipped = {}
        for id, words in self.utterances:
            word_phones = [p for word in words for p in model.pronunciations(word, self.lexicon, id)[0][0]]
            phones = np.array([SILENCE_INDEX, *word_phones, SILENCE_INDEX])
            counts = np.array([model.states(p) for p in phones])
            total, frames = int(counts.sum()), self.store.frames(id)
            if frames < total:
                skipped[id] = f"too short for its words: {frames} frames, {total} states"
                continue
            state = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            keys = np.repeat(model.first_keys(phones), counts) + state
            self.keys[id] = keys[np.arange(frames) * total // frames].astype(np.int32)
        return skipped

    def accumulate(self, model: AlignmentModel, realign: bool, edge_silence: bool = False) -> EmStatistics:
        """Accumulate the statistics of a pass; first realign if requested (`edge_silence`: with silence at both ends)."""
        statistics = EmStatistics(
            GmmStatistics.empty(model.gmm.components, model.gmm.dim), np.zeros(model.num_pdfs), np.zeros(model.num_pdfs)
        )
        for id, words in self.utterances:
            x = self.features(id, model.frontend)
            if realign:
                try:
                    self.keys[id] = model.align_features(x, words, self.graph(id, words, model, edge_silence), id).keys
                except DataError as error:
                    self.keys.pop(id, None)
                    statistics.skipped[id] = error.message
            keys = self.keys.get(id)
            if keys is None:
                continue
            pdfs = model.pdf_by_key[keys]
            model.gmm.accumulate(x, pdfs, statistics.gmm)
            stays = np.append(keys[1:] == keys[:-1], False)
            statistics.stay += np.bincount(pdfs[stays], minlength=model.num_pdfs)
            statistics.leave += np.bincount(pdfs[~stays], minlength=model.num_pdfs)
            statistics.utterances += 1
        return statistics

    # ------------------------------------------------------------------------------------------------ statistics

    def moments(self, frontend: Frontend) -> Array:
        """Return count, sum and sum of squares of all frames."""
        total: Array | None = None
        for id, _ in self.utterances:
            x = self.features(id, frontend).astype(np.float64)
            moments = np.concatenate([[len(x)], x.sum(0), (x * x).sum(0)])
            total = moments if total is None else total + moments
        assert total is not None
        return total

    def context_statistics(self, frontend: Frontend) -> ContextStatistics | None:
        """Return the statistics of all states in context, for decision trees; None without any alignment."""
        parts = [ContextStatistics.of_frames(x, keys) for x, keys in self._batches(frontend)]
        return ContextStatistics.merged(parts) if parts else None

    def lda_statistics(self, frontend: Frontend, pdf_by_key: Array, classes: int) -> LdaStatistics:
        """Return the scatter of spliced cepstra around the means of their pdfs."""
        splicing = Frontend(frontend.keep, 0, frontend.splice)
        mels = self.store.static(self.utterances[0][0]).shape[1]
        statistics = LdaStatistics.empty(classes, splicing.spliced_dim(mels))
        for id, keys in self.keys.items():
            statistics.accumulate(splicing.spliced(self.store.static(id)), pdf_by_key[keys])
        return statistics

    def mllt_statistics(self, model: AlignmentModel) -> MlltStatistics:
        """Return the scatter of frames around the means of their best components."""
        statistics = MlltStatistics.empty(model.gmm.dim)
        for x, keys in self._batches(model.frontend):
            statistics.accumulate(x, model.gmm.best_components(x, model.pdf_by_key[keys]), model.gmm)
        return statistics

    def _batches(self, frontend: Frontend) -> Iterator[tuple[Array, Array]]:
        xs: list[Array] = []
        keys: list[Array] = []
        for id, _ in self.utterances:
            if id in self.keys:
                xs.append(self.features(id, frontend))
                keys.append(self.keys[id])
            if sum(map(len, keys)) >= BATCH_FRAMES:
                yield np.concatenate(xs), np.concatenate(keys)
                xs, keys = [], []
        if keys:
            yield np.concatenate(xs), np.concatenate(keys)

    # ----------------------------------------------------------------------------------------------------- caches

    def features(self, id: str, frontend: Frontend) -> Array:
        """Return the features of an utterance; the cache is dropped when the front end changes."""
        if frontend is not self._frontend:
            if self._frontend is None or not frontend.equals(self._frontend):
                self._features = {}
            self._frontend = frontend
        x = self._features.get(id)
        if x is None:
            x = frontend(self.store.static(id))
            if self.cache:
                self._features[id] = x
        return x

    def graph(self, id: str, words: Sequence[str], model: AlignmentModel, edge_silence: bool = False) -> UtteranceGraph:
        """Return the graph of an utterance; the cache is dropped when the topology of the model changes."""
        kind = (model.context, model.states_per_phone, model.silence_states, int(edge_silence))
        if kind != self._graph_kind:
            self._graphs, self._graph_kind = {}, kind
        graph = self._graphs.get(id)
        if graph is None:
            graph = model.graph(words, self.lexicon, id, edge_silence=edge_silence)
            if self.cache:
                self._graphs[id] = graph
        return graph


class EmWorkers(WorkerPool):
    """The blocks of a corpus, which stay in their processes between passes; with jobs=1 in the calling process.

    `call(method, *arguments)` calls a method of `UtteranceBlock` on each block.
    """

    def __init__(self, utterances: Sequence[UtteranceWords], store: FeatureSource, lexicon: Lexicon, jobs: int) -> None:
        self.utterances = len(utterances)
        blocks = min(max(BLOCKS, jobs), len(utterances))
        cache = sum(store.frames(id) for id, _ in utterances) <= MAX_CACHED_FRAMES
        arguments = [(utterances[n::blocks], store, lexicon, cache) for n in range(blocks)]
        super().__init__(UtteranceBlock, arguments, jobs=jobs, what="a process that aligns utterances")
