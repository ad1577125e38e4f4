"""Decoding: the best words for a matrix of scores, by beam search through the graph, over many utterances at once.

Scores are log likelihoods, or log posteriors minus log priors, float [frames, pdfs]; the search sees them times the acoustic
scale. A lower scale makes pdfs less different, so that more paths lie within the beam: it is slower as well.

The search is kaldi-decoder's FasterDecoder on a plain matrix (its class DecodableCtc: label n reads column n - 1). That class
checks nothing, so labels and columns are compared here before the search sees them.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kaldi_decoder
import kaldifst
import numpy as np

from roundelay.core.interrupts import block_sigint
from roundelay.errors import DataError, RoundelayError, UsageError
from roundelay.log.progress import Progress
from roundelay.speech.features.kaldi_ark import read_matrices
from roundelay.speech.graph.fst import arrays_of, read_fst, write_arrays
from roundelay.speech.graph.hclg import Graph, load_graph
from roundelay.speech.nbest import best_sentences
from roundelay.speech.score import Score, Words, score

SCALES = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)
FRAME_S = 0.01
FEWEST_ACTIVE = 20
WIDER = 3.0
"""The second beam over the first."""
WAITING_PER_JOB = 4
"""Score matrices on their way to each process: enough that none idles, few enough to hold in memory."""

Source = Callable[[str], np.ndarray] | str | Path
"""Where scores come from: a function of the utterance id, or a Kaldi list (.scp) of matrices."""


@dataclass(frozen=True)
class DecodeOptions:
    beam: float = 13.0  # wider finds more and takes longer
    max_active: int = 7000  # states kept per frame
    acoustic_scale: float = 0.1  # of log-likelihoods against the graph; chosen on dev where there is one

    def __post_init__(self) -> None:
        for name, least in (("beam", 0.0), ("acoustic_scale", 0.0), ("max_active", 1)):
            if not getattr(self, name) > least or not math.isfinite(getattr(self, name)):
                raise UsageError(f"{name} = {getattr(self, name)}", where=name, hint=f"give a number above {least:g}")


@dataclass(frozen=True)
class Hypothesis:
    """What was recognised. Not `final`: the search ended within a sentence, and this is the best path so far."""

    words: tuple[str, ...]
    score: float
    final: bool


class Decoded(dict[str, Hypothesis]):
    """Hypotheses by utterance, and what the search took."""

    frames: int = 0
    seconds: float = 0.0

    @property
    def unfinished(self) -> list[str]:
        return [name for name, found in self.items() if not found.final]

    @property
    def words(self) -> dict[str, tuple[str, ...]]:
        return {name: found.words for name, found in self.items()}

    @property
    def times_real_time(self) -> float:
        """Seconds of speech decoded in a second by one process."""
        return self.frames * FRAME_S / self.seconds if self.seconds else math.nan


class Decoder:
    """A graph in memory with its words; decodes one utterance after another."""

    def __init__(self, graph: str | Path | Graph, options: DecodeOptions | None = None) -> None:
        self.options = options or DecodeOptions()
        self.graph = graph if isinstance(graph, Graph) else load_graph(graph)
        self._names = _read_words(self.graph.words)
        self._fst, self.num_pdfs, self._exact_pdfs = _load(self.graph, self._names)
        self._search, self._wider = self._searching(1.0), self._searching(WIDER)

    def _searching(self, wider: float) -> Any:
        beam, most = wider * self.options.beam, int(wider * self.options.max_active)
        options = kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=most, min_active=min(FEWEST_ACTIVE, most - 1))
        return kaldi_decoder.FasterDecoder(self._fst, options)

    def decode(self, loglikes: np.ndarray, name: str = "", *, scale: float | None = None) -> Hypothesis:
        """The best words; scale overrides the acoustic scale of the options. A search that ends within a sentence has lost the
        way to its end, and is done again with a wider beam."""
        scores = kaldi_decoder.DecodableCtc(self._scaled(loglikes, name, scale))
        for search in (self._search, self._wider):
            search.decode(scores)
            final = bool(search.reached_final())
            if final:
                break
        some, path = search.get_best_path()
        if not some:
            return Hypothesis((), -math.inf, False)
        _, _, labels, cost = kaldifst.get_linear_symbol_sequence(path)
        return Hypothesis(self._spelled(labels), -(cost.value1 + cost.value2), final)

    def nbest(
        self, loglikes: np.ndarray, count: int, name: str = "", *, lattice_beam: float = 8.0, scale: float | None = None
    ) -> list[Hypothesis]:
        """At most `count` different sentences, the best first, none further from the best than the lattice beam."""
        best = self.decode(loglikes, name, scale=scale)
        if best.score == -math.inf:
            return [best]
        scaled = self._scaled(loglikes, name, scale)
        found = best_sentences(self._fst, scaled, count, self.options.beam, lattice_beam)
        return [Hypothesis(self._spelled(labels), -cost, best.final) for labels, cost in found]

    def _spelled(self, labels: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._names[label] for label in labels)

    def _scaled(self, loglikes: np.ndarray, name: str, scale: float | None) -> np.ndarray:
        self._check(loglikes, name)
        factor = self.options.acoustic_scale if scale is None else scale
        return np.ascontiguousarray(np.multiply(loglikes, factor, dtype=np.float32))

    def _check(self, loglikes: np.ndarray, name: str) -> None:
        where = f"utterance {name}" if name else "scores"
        if loglikes.ndim != 2 or not len(loglikes):
            raise DataError(
                f"a score matrix of shape {list(loglikes.shape)}", where=where, hint="leave out utterances without frames"
            )
        columns = loglikes.shape[1]
        if columns != self.num_pdfs if self._exact_pdfs else columns < self.num_pdfs:
            raise DataError(
                f"scores of {columns} pdfs for a graph of {self.num_pdfs}",
                where=f"{where}; graph {self.graph.fst}",
                hint="score with the model the graph was built for",
            )
        highest = loglikes.max()
        if math.isnan(highest) or highest == math.inf:
            what = "not a number" if math.isnan(highest) else "infinite"
            raise DataError(f"a score is {what}", where=where, hint="check the model, and that no prior is zero")


def _read_words(path: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the table of words cannot be read: {error}", where=str(path)) from None
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or not fields[1].isdigit():
            raise DataError(
                "a line must hold a word and its number", where=f"{path}, line {number}", hint="give the graph's words.txt"
            )
        found[int(fields[1])] = fields[0]
    return found


def _load(graph: Graph, names: Mapping[int, str]) -> tuple[Any, int, bool]:
    """The transducer with labels pdf + 1, how many pdfs it needs, and whether scores must have just as many."""
    fst = read_fst(graph.fst)
    if graph.record and graph.num_pdfs is not None:
        return fst, graph.num_pdfs, True
    found = arrays_of(fst)
    reads, where = found.arcs["reads"], str(graph.fst)
    if graph.transitions is not None:
        highest = int(reads.max(initial=0))
        if highest >= len(graph.transitions):
            raise DataError(
                f"the graph has transition-id {highest}, the model only {len(graph.transitions) - 1}",
                where=where,
                hint="give the final.mdl the graph was made with",
            )
        labels = np.concatenate([[0], np.asarray(graph.transitions, np.int64)[1:] + 1])
        found.arcs["reads"] = reads = labels[reads]
    needed = int(reads.max(initial=0))
    if graph.num_pdfs is not None and needed > graph.num_pdfs:
        raise DataError(
            f"the graph reads {needed} pdfs, the model has {graph.num_pdfs}",
            where=where,
            hint="if its labels are transition-ids, give the text form of final.mdl",
        )
    unnamed = np.setdiff1d(found.arcs["writes"], [0, *names])
    if len(unnamed) or reads.min(initial=0) < 0:
        raise DataError(
            f"{len(unnamed)} labels of the graph are not in the table of words", where=where, hint="give the graph's words.txt"
        )
    with tempfile.TemporaryDirectory() as folder:
        write_arrays(Path(folder) / "graph.fst", found)
        fst = read_fst(Path(folder) / "graph.fst")
    return fst, graph.num_pdfs or needed, graph.num_pdfs is not None


# ---------------------------------------------------------------------------------------------------- many utterances


def decode_all(
    graph: str | Path | Graph,
    source: Source,
    ids: Iterable[str],
    options: DecodeOptions | None = None,
    *,
    jobs: int = 1,
    progress: str = "auto",
) -> Decoded:
    """Decodes utterances in `jobs` processes, each with the graph in memory once.

    A function as source is called here, in the caller's process, and only its matrices travel: a network may be used without
    care for processes. Scripts that ask for jobs > 1 need the usual `if __name__ == "__main__"`."""
    options = options or DecodeOptions()
    decoded = Decoded()
    for answer in _each(graph, source, list(ids), options, [options.acoustic_scale], jobs, progress):
        decoded[answer.name] = answer.found[0]
        decoded.frames += answer.frames
        decoded.seconds += answer.seconds
    return decoded


@dataclass(frozen=True)
class ScaleChoice:
    """The acoustic scale with the fewest errors, and the score of every one tried."""

    scale: float
    scores: dict[float, Score]
    decoded: dict[float, Decoded]


def choose_scale(
    graph: str | Path | Graph,
    source: Source,
    refs: Mapping[str, Words],
    options: DecodeOptions | None = None,
    grid: Sequence[float] = SCALES,
    *,
    speakers: Mapping[str, str] | None = None,
    jobs: int = 1,
    progress: str = "auto",
) -> ScaleChoice:
    """Decodes every utterance with every scale (scores are computed once) and takes the best; of equals, the middle one."""
    options, scales = options or DecodeOptions(), sorted(set(grid))
    if not scales:
        raise UsageError("no acoustic scale to choose from", where="grid", hint="give at least one")
    for scale in scales:
        replace(options, acoustic_scale=scale)
    decoded = {scale: Decoded() for scale in scales}
    for answer in _each(graph, source, sorted(refs), options, scales, jobs, progress):
        for scale, found in zip(scales, answer.found, strict=True):
            decoded[scale][answer.name] = found
    scores = {scale: score(refs, decoded[scale].words, speakers) for scale in scales}
    return ScaleChoice(_middle_of_best([scores[scale].errors.total for scale in scales], scales), scores, decoded)


def _middle_of_best(errors: Sequence[int], scales: Sequence[float]) -> float:
    """Of an even number of equals the one nearer to the middle of the grid, else the lower, which prunes less."""
    best = [n for n, count in enumerate(errors) if count == min(errors)]
    centre, middle = sum((best[0], best[-1])) / 2, (len(scales) - 1) / 2
    return scales[min(best, key=lambda n: (abs(n - centre), abs(n - middle), n))]


@dataclass(frozen=True)
class _Answer:
    name: str
    found: list[Hypothesis]
    frames: int
    seconds: float
    error: tuple[str, str, str] | None = None
    """What, where and what to do: exceptions lose their parts on the way between processes."""


class _DecodeWork:
    """What a process does with an utterance; the decoder is made once, in the process that uses it."""

    def __init__(self, graph: Graph, listed: Path | None, options: DecodeOptions, scales: list[float]) -> None:
        self.decoder = Decoder(graph, options)
        self.scales = scales
        self.listed = read_matrices(listed) if listed else {}

    def __call__(self, name: str, scores: np.ndarray | None) -> _Answer:
        if scores is None:
            scores = self.listed[name]
        began = time.process_time()
        found = [self.decoder.decode(scores, name, scale=scale) for scale in self.scales]
        return _Answer(name, found, len(scores), time.process_time() - began)


def _each(
    graph: str | Path | Graph,
    source: Source,
    ids: list[str],
    options: DecodeOptions,
    scales: list[float],
    jobs: int,
    progress: str,
) -> Iterator[_Answer]:
    found = graph if isinstance(graph, Graph) else load_graph(graph)
    listed, here = (None, source) if callable(source) else (Path(source), _nothing)
    if listed:
        _all_listed(listed, ids)
    arguments = (found, listed, options, scales)
    shown = Progress("decoding" if len(scales) == 1 else f"decoding with {len(scales)} scales", "utterances", progress)
    try:
        if jobs <= 1 or len(ids) <= 1:
            work = _DecodeWork(*arguments)
            answers: Iterator[_Answer] = (work(name, here(name)) for name in ids)
        else:
            answers = _spread(arguments, here, ids, min(jobs, len(ids)))
        for done, answer in enumerate(answers, 1):
            yield answer
            shown.step(done, len(ids))
    finally:
        shown.close()


def _nothing(name: str) -> None:
    """What comes along with an utterance whose scores the process reads itself."""


def _all_listed(listed: Path, ids: list[str]) -> None:
    known = read_matrices(listed)
    missing = [name for name in ids if name not in known]
    if missing:
        raise DataError(
            f"there are no scores of utterance '{missing[0]}' ({len(missing)} in all)",
            where=str(listed),
            hint="score them, or leave them out",
        )


_Arguments = tuple[Graph, Path | None, DecodeOptions, list[float]]


def _spread(arguments: _Arguments, here: Callable[[str], np.ndarray | None], ids: list[str], jobs: int) -> Iterator[_Answer]:
    # Spawned, not forked: the caller may have threads (torch, numba), and a fork of those may hang.
    context = multiprocessing.get_context("spawn")
    waiting: deque[Future[_Answer]] = deque()
    with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(arguments,)) as pool:
        try:
            for name in ids:
                scores = here(name)
                with block_sigint():
                    waiting.append(pool.submit(_decode_one, name, scores))
                if len(waiting) >= WAITING_PER_JOB * jobs:
                    yield _checked(waiting.popleft().result())
            while waiting:
                yield _checked(waiting.popleft().result())
        except BrokenProcessPool:
            raise RoundelayError(
                "a decoding process died", hint="decode with jobs=1 to see why; memory is the usual reason"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _checked(answer: _Answer) -> _Answer:
    if answer.error:
        what, where, do = answer.error
        raise DataError(what, where=where, hint=do)
    return answer


_arguments: _Arguments | None = None
_work: _DecodeWork | None = None


def _start(arguments: _Arguments) -> None:
    global _arguments
    _arguments = arguments


def _decode_one(name: str, scores: np.ndarray | None) -> _Answer:
    """The first call of a process loads the graph; what goes wrong there is an answer too."""
    global _work
    assert _arguments is not None
    try:
        _work = _work or _DecodeWork(*_arguments)
        return _work(name, scores)
    except DataError as error:
        return _Answer(name, [], 0, 0.0, (error.message, error.where, error.hint))
