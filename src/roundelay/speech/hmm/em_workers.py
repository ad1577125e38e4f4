"""Utterances in blocks, blocks in processes: the passes over a corpus that training and alignment are made of.

Blocks are the same whatever the number of processes and their statistics are added up in the order of the blocks, so a
model does not depend on how many cores trained it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from roundelay.core.interrupts import block_sigint
from roundelay.core.process_map import one_thread_each
from roundelay.errors import DataError, RoundelayError
from roundelay.speech.hmm.gmm import GmmStatistics
from roundelay.speech.hmm.hmm import SILENCE_INDEX, AlignmentModel, Frontend, UtteranceGraph
from roundelay.speech.hmm.transforms import LdaStatistics, MlltStatistics
from roundelay.speech.hmm.tree import ContextStatistics
from roundelay.speech.hmm.viterbi import Array

if TYPE_CHECKING:
    from roundelay.speech.hmm.lexicon import Lexicon

BLOCKS = 8
# Features and graphs of corpora up to this size stay in memory between passes (22 hours; about 1.5 GB).
HELD_FRAMES = 8_000_000
# Frames that statistics with a matrix product take at a time.
BATCH_FRAMES = 50_000


Spoken = tuple[str, tuple[str, ...]]
"""An utterance's id and words."""


class FeatureSource(Protocol):
    """What is needed of a feature store."""

    @property
    def ids(self) -> list[str]: ...

    def frames(self, id: str) -> int: ...

    def static(self, id: str) -> Array: ...


@dataclass
class PassResult:
    """What one block saw in a pass."""

    gmm: GmmStatistics
    stay: Array  # float64 [pdfs]: frames followed by another of the same state
    leave: Array  # float64 [pdfs]
    utterances: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, other: PassResult) -> None:
        self.gmm.add(other.gmm)
        self.stay += other.stay
        self.leave += other.leave
        self.utterances += other.utterances
        self.skipped |= other.skipped


class UtteranceBlock:
    """Some utterances with the current alignment of each, and what training asks of them."""

    def __init__(self, utterances: Sequence[Spoken], store: FeatureSource, lexicon: Lexicon, hold: bool) -> None:
        self.utterances, self.store, self.lexicon, self.hold = utterances, store, lexicon, hold
        self.keys: dict[str, Array] = {}
        self._features: dict[str, Array] = {}
        self._frontend: Frontend | None = None
        self._graphs: dict[str, UtteranceGraph] = {}
        self._graph_kind: tuple[int, ...] = ()

    # ---------------------------------------------------------------------------------------------------- passes

    def flat_start(self, model: AlignmentModel) -> dict[str, str]:
        """Gives every state of pause, first pronunciations and pause the same share of frames; returns the skipped."""
        skipped = {}
        for id, words in self.utterances:
            spoken = [p for word in words for p in model.pronunciations(word, self.lexicon, id)[0][0]]
            phones = np.array([SILENCE_INDEX, *spoken, SILENCE_INDEX])
            counts = np.array([model.states(p) for p in phones])
            total, frames = int(counts.sum()), self.store.frames(id)
            if frames < total:
                skipped[id] = f"too short for its words: {frames} frames, {total} states"
                continue
            state = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            keys = np.repeat(model.first_keys(phones), counts) + state
            self.keys[id] = keys[np.arange(frames) * total // frames].astype(np.int32)
        return skipped

    def train(self, model: AlignmentModel, realign_passes: bool, edges: bool = False) -> PassResult:
        """Statistics of a pass, after aligning anew if wanted (with pauses at both ends for certain: `edges`)."""
        found = PassResult(
            GmmStatistics.empty(model.gmm.components, model.gmm.dim), np.zeros(model.num_pdfs), np.zeros(model.num_pdfs)
        )
        for id, words in self.utterances:
            x = self.features(id, model.frontend)
            if realign_passes:
                try:
                    self.keys[id] = model.align_features(x, words, self.graph(id, words, model, edges), id).keys
                except DataError as error:
                    self.keys.pop(id, None)
                    found.skipped[id] = error.message
            keys = self.keys.get(id)
            if keys is None:
                continue
            pdfs = model.by_key[keys]
            model.gmm.accumulate(x, pdfs, found.gmm)
            stays = np.append(keys[1:] == keys[:-1], False)
            found.stay += np.bincount(pdfs[stays], minlength=model.num_pdfs)
            found.leave += np.bincount(pdfs[~stays], minlength=model.num_pdfs)
            found.utterances += 1
        return found

    # ------------------------------------------------------------------------------------------------ statistics

    def moments(self, frontend: Frontend) -> Array:
        """Count, sum and sum of squares of all frames."""
        total: Array | None = None
        for id, _ in self.utterances:
            x = self.features(id, frontend).astype(np.float64)
            one = np.concatenate([[len(x)], x.sum(0), (x * x).sum(0)])
            total = one if total is None else total + one
        assert total is not None
        return total

    def contexts(self, frontend: Frontend) -> ContextStatistics | None:
        parts = [ContextStatistics.of_frames(x, keys) for x, keys in self._batches(frontend)]
        return ContextStatistics.merged(parts) if parts else None

    def lda(self, frontend: Frontend, by_key: Array, classes: int) -> LdaStatistics:
        """Scatter of spliced cepstra about the means of their states."""
        raw = Frontend(frontend.keep, 0, frontend.splice)
        found = LdaStatistics.empty(classes, raw.spliced_dim(self.store.static(self.utterances[0][0]).shape[1]))
        for id, keys in self.keys.items():
            found.accumulate(raw.spliced(self.store.static(id)), by_key[keys])
        return found

    def mllt(self, model: AlignmentModel) -> MlltStatistics:
        found = MlltStatistics.empty(model.gmm.dim)
        for x, keys in self._batches(model.frontend):
            found.accumulate(x, model.gmm.best_components(x, model.by_key[keys]), model.gmm)
        return found

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

    # ------------------------------------------------------------------------------------------------ what is held

    def features(self, id: str, frontend: Frontend) -> Array:
        if frontend is not self._frontend:
            if self._frontend is None or not frontend.same(self._frontend):
                self._features = {}
            self._frontend = frontend
        x = self._features.get(id)
        if x is None:
            x = frontend(self.store.static(id))
            if self.hold:
                self._features[id] = x
        return x

    def graph(self, id: str, words: Sequence[str], model: AlignmentModel, edges: bool = False) -> UtteranceGraph:
        kind = (model.context, model.states_per_phone, model.silence_states, int(edges))
        if kind != self._graph_kind:
            self._graphs, self._graph_kind = {}, kind
        graph = self._graphs.get(id)
        if graph is None:
            graph = model.graph(words, self.lexicon, id, edges=edges)
            if self.hold:
                self._graphs[id] = graph
        return graph


class EmWorkers:
    """The blocks of a corpus, in this process (jobs=1) or in processes of their own."""

    def __init__(self, utterances: Sequence[Spoken], store: FeatureSource, lexicon: Lexicon, jobs: int) -> None:
        number = min(max(BLOCKS, jobs), len(utterances))
        hold = sum(store.frames(id) for id, _ in utterances) <= HELD_FRAMES
        shares = [utterances[n::number] for n in range(number)]
        self.jobs = min(jobs, number)
        self._blocks: list[UtteranceBlock] = []
        self._workers: list[tuple[Any, Connection]] = []
        if self.jobs <= 1:
            self._blocks = [UtteranceBlock(share, store, lexicon, hold) for share in shares]
            return
        context = multiprocessing.get_context("spawn")
        with one_thread_each(), block_sigint():
            for n in range(self.jobs):
                mine, theirs = context.Pipe()
                arguments = (theirs, shares[n :: self.jobs], store, lexicon, hold)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, mine))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """block.method(*arguments) of every block, results in the order of the blocks."""
        if not self._workers:
            return [getattr(block, method)(*arguments) for block in self._blocks]
        answers: list[list[Any]] = []
        try:
            for _, pipe in self._workers:
                pipe.send((method, arguments))
            for _, pipe in self._workers:
                kind, value = pipe.recv()
                if kind == "error":
                    raise DataError(value[0], where=value[1], hint=value[2])
                answers.append(value)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            do = "see its message above; with too little memory use fewer jobs"
            raise RoundelayError("a process that aligns utterances has died", hint=do) from None
        blocks = sum(map(len, answers))
        return [answers[n % self.jobs][n // self.jobs] for n in range(blocks)]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
        self._workers = []

    def __enter__(self) -> EmWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, shares: Sequence[Any], store: FeatureSource, lexicon: Lexicon, hold: bool) -> None:
    """A process of a crew: keeps its blocks and answers until nobody asks any more."""
    blocks = [UtteranceBlock(share, store, lexicon, hold) for share in shares]
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", [getattr(block, method)(*arguments) for block in blocks])
        except RoundelayError as error:
            answer = ("error", (error.message, error.where, error.hint))  # type: ignore[assignment]
        try:
            pipe.send(answer)
        except OSError:  # whoever asked has been interrupted
            return
