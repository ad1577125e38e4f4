"""Decoding: beam search through the graph, for one utterance or for many in several processes.

Scores are log likelihoods, or log posteriors minus log priors, float [frames, pdfs]. The search multiplies them by the acoustic
scale. A lower scale keeps more paths within the beam, so it is also slower.

The search is kaldi-decoder's FasterDecoder on a plain matrix (its class DecodableCtc: label n reads column n - 1). That class
checks nothing, so this module compares labels and columns before the search.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kaldi_decoder
import kaldifst
import numpy as np

from roundelay.core.process_map import WorkerPool
from roundelay.errors import DataError, UsageError
from roundelay.log.progress import Progress
from roundelay.speech.features.kaldi_ark import read_matrices
from roundelay.speech.graph.fst import fst_to_arrays, read_fst, write_const_fst
from roundelay.speech.graph.hclg import Graph, load_graph
from roundelay.speech.nbest import best_sentences
from roundelay.speech.score import Score, Words, score

SCALES = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)
FRAME_S = 0.01
MIN_ACTIVE = 20
RETRY_FACTOR = 3.0
"""The factor of beam and active states in the second search."""
LATTICE_BEAM = 8.0

ScoreSource = Callable[[str], np.ndarray] | str | Path
"""A function from utterance id to scores, or a Kaldi script file (.scp) of matrices."""


@dataclass(frozen=True)
class DecodeOptions:
    """Options of the beam search."""

    beam: float = 13.0  # beam of the search; a wider one finds more and takes longer
    max_active: int = 7000  # maximum number of active states per frame
    acoustic_scale: float = 0.1  # factor of the log likelihoods; chosen on the dev set if there is one

    def __post_init__(self) -> None:
        for name, bound in (("beam", 0.0), ("acoustic_scale", 0.0), ("max_active", 1)):
            value = getattr(self, name)
            if not value > bound or not math.isfinite(value):
                raise UsageError(f"{name} must be > {bound:g} (got {value})", where=name, hint=f"choose a number > {bound:g}")


@dataclass(frozen=True)
class Hypothesis:
    """A recognized sentence. score = graph_score + acoustic_score, all natural logarithms.

    The graph score contains language model, pronunciations and transitions, the acoustic score the scaled log likelihoods.
    If `final` is False, the search reached no final state, and this is the best partial path.
    """

    words: tuple[str, ...]
    score: float
    final: bool
    graph_score: float
    acoustic_score: float


class Decoded(dict[str, Hypothesis]):
    """Hypotheses by utterance, with the number of frames and the CPU seconds of the search."""

    frames: int = 0
    seconds: float = 0.0

    @property
    def unfinished(self) -> list[str]:
        """Utterances whose search reached no final state."""
        return [name for name, hypothesis in self.items() if not hypothesis.final]

    @property
    def words(self) -> dict[str, tuple[str, ...]]:
        return {name: hypothesis.words for name, hypothesis in self.items()}

    @property
    def times_real_time(self) -> float:
        """Seconds of speech that one process decodes in one second."""
        return self.frames * FRAME_S / self.seconds if self.seconds else math.nan


class Decoder:
    """A decoding graph in memory with its words; decodes one utterance at a time. Not thread-safe."""

    def __init__(self, graph: str | Path | Graph, options: DecodeOptions | None = None) -> None:
        self.options = options or DecodeOptions()
        self.graph = graph if isinstance(graph, Graph) else load_graph(graph)
        self._words = _read_words(self.graph.words)
        self._fst, self.num_pdfs, self._exact_pdfs = _load_fst(self.graph, self._words)
        self._search, self._retry = self._make_search(1.0), self._make_search(RETRY_FACTOR)

    def _make_search(self, factor: float) -> Any:
        beam, max_active = factor * self.options.beam, int(factor * self.options.max_active)
        min_active = min(MIN_ACTIVE, max_active - 1)
        options = kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active, min_active=min_active)
        return kaldi_decoder.FasterDecoder(self._fst, options)

    def decode(self, loglikes: np.ndarray, name: str = "", *, scale: float | None = None) -> Hypothesis:
        """Return the best sentence; `scale` overrides the acoustic scale of the options.

        A search that reaches no final state is repeated once with a wider beam. Raises DataError for scores that do not fit the
        graph, or are NaN or infinite.
        """
        scores = kaldi_decoder.DecodableCtc(self._scaled(loglikes, name, scale))
        for search in (self._search, self._retry):
            search.decode(scores)
            final = bool(search.reached_final())
            if final:
                break
        success, path = search.get_best_path()
        if not success:
            return Hypothesis((), -math.inf, False, -math.inf, -math.inf)
        _, _, labels, cost = kaldifst.get_linear_symbol_sequence(path)
        return Hypothesis(self._to_words(labels), -(cost.value1 + cost.value2), final, -cost.value1, -cost.value2)

    def nbest(
        self,
        loglikes: np.ndarray,
        count: int,
        name: str = "",
        *,
        lattice_beam: float = LATTICE_BEAM,
        scale: float | None = None,
    ) -> list[Hypothesis]:
        """Return at most `count` different sentences within the lattice beam, the best first; see `decode`."""
        best = self.decode(loglikes, name, scale=scale)
        if best.score == -math.inf:
            return [best]
        scaled = self._scaled(loglikes, name, scale)
        return [
            Hypothesis(self._to_words(s.labels), -s.cost, best.final, s.acoustic_cost - s.cost, -s.acoustic_cost)
            for s in best_sentences(self._fst, scaled, count, self.options.beam, lattice_beam)
        ]

    def _to_words(self, labels: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._words[label] for label in labels)

    def _scaled(self, loglikes: np.ndarray, name: str, scale: float | None) -> np.ndarray:
        self._validate(loglikes, name)
        factor = self.options.acoustic_scale if scale is None else scale
        return np.ascontiguousarray(np.multiply(loglikes, factor, dtype=np.float32))

    def _validate(self, loglikes: np.ndarray, name: str) -> None:
        where = f"utterance {name}" if name else "scores"
        if loglikes.ndim != 2 or not len(loglikes):
            raise DataError(
                f"scores must have the shape [frames, pdfs] with at least one frame (got shape {list(loglikes.shape)})",
                where=where,
                hint="leave out utterances without frames",
            )
        columns = loglikes.shape[1]
        if columns != self.num_pdfs if self._exact_pdfs else columns < self.num_pdfs:
            raise DataError(
                f"scores of {columns} pdfs do not fit a graph of {self.num_pdfs} pdfs",
                where=f"{where}; graph {self.graph.fst}",
                hint="score with the model that the graph was built for",
            )
        highest = loglikes.max()
        if math.isnan(highest) or highest == math.inf:
            raise DataError(
                f"scores must be finite or -inf (got {'NaN' if math.isnan(highest) else 'inf'})",
                where=where,
                hint="check the model, and that no prior is zero",
            )


def _read_words(path: Path) -> dict[int, str]:
    words: dict[int, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the word symbol table cannot be read: {error}", where=str(path)) from None
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or not fields[1].isdigit():
            raise DataError(
                "a line must contain a word and its number",
                where=f"{path}, line {number}",
                hint="pass the words.txt of the graph",
            )
        words[int(fields[1])] = fields[0]
    return words


def _load_fst(graph: Graph, words: Mapping[int, str]) -> tuple[Any, int, bool]:
    """Return the FST with input labels pdf + 1, the number of pdfs, and whether scores must have exactly this number."""
    fst = read_fst(graph.fst)
    if graph.metadata and graph.num_pdfs is not None:
        return fst, graph.num_pdfs, True
    arrays = fst_to_arrays(fst)
    ilabels, where = arrays.arcs["ilabel"], str(graph.fst)
    if graph.transitions is not None:
        highest = int(ilabels.max(initial=0))
        if highest >= len(graph.transitions):
            raise DataError(
                f"the graph has transition-id {highest}, the model has only {len(graph.transitions) - 1}",
                where=where,
                hint="pass the final.mdl that the graph was built with",
            )
        labels = np.concatenate([[0], np.asarray(graph.transitions, np.int64)[1:] + 1])
        arrays.arcs["ilabel"] = ilabels = labels[ilabels]
    needed = int(ilabels.max(initial=0))
    if graph.num_pdfs is not None and needed > graph.num_pdfs:
        raise DataError(
            f"the graph needs {needed} pdfs, the model has {graph.num_pdfs}",
            where=where,
            hint="if its labels are transition-ids, pass the text form of final.mdl",
        )
    unnamed = np.setdiff1d(arrays.arcs["olabel"], [0, *words])
    if len(unnamed) or ilabels.min(initial=0) < 0:
        raise DataError(
            f"{len(unnamed)} labels of the graph are not in the word symbol table",
            where=where,
            hint="pass the words.txt of the graph",
        )
    with tempfile.TemporaryDirectory() as folder:
        write_const_fst(Path(folder) / "graph.fst", arrays)
        fst = read_fst(Path(folder) / "graph.fst")
    return fst, graph.num_pdfs or needed, graph.num_pdfs is not None


# ---------------------------------------------------------------------------------------------------- many utterances


def decode_all(
    graph: str | Path | Graph,
    source: ScoreSource,
    ids: Iterable[str],
    options: DecodeOptions | None = None,
    *,
    jobs: int = 1,
    progress: str = "auto",
) -> Decoded:
    """Decode utterances in `jobs` processes, each of which loads the graph once.

    A function as source runs in the calling process, and only its matrices are sent to the decoding processes, so it may use a
    network. Scripts that use jobs > 1 need `if __name__ == "__main__"`. Raises DataError for the first utterance with invalid
    scores.
    """
    options = options or DecodeOptions()
    decoded = Decoded()
    search = _ScaleSearch([options.acoustic_scale])
    for result in _search_all(graph, source, list(ids), options, search, jobs, progress):
        decoded[result.name] = result.hypotheses[0]
        decoded.frames += result.frames
        decoded.seconds += result.seconds
    return decoded


def nbest_all(
    graph: str | Path | Graph,
    source: ScoreSource,
    ids: Iterable[str],
    count: int,
    options: DecodeOptions | None = None,
    *,
    lattice_beam: float = LATTICE_BEAM,
    jobs: int = 1,
    progress: str = "auto",
) -> dict[str, list[Hypothesis]]:
    """Return at most `count` hypotheses of each utterance, the best first; see `Decoder.nbest` and `decode_all`."""
    if count < 1:
        raise UsageError(f"the number of hypotheses must be >= 1 (got {count})", where="count", hint="choose a positive number")
    search = _NbestSearch(count, lattice_beam)
    results = _search_all(graph, source, list(ids), options or DecodeOptions(), search, jobs, progress)
    return {result.name: result.hypotheses for result in results}


@dataclass(frozen=True)
class ScaleChoice:
    """The acoustic scale with the fewest errors, and score and hypotheses of each scale."""

    scale: float
    scores: dict[float, Score]
    decoded: dict[float, Decoded]


def choose_scale(
    graph: str | Path | Graph,
    source: ScoreSource,
    refs: Mapping[str, Words],
    options: DecodeOptions | None = None,
    grid: Sequence[float] = SCALES,
    *,
    speakers: Mapping[str, str] | None = None,
    jobs: int = 1,
    progress: str = "auto",
) -> ScaleChoice:
    """Decode all utterances with each scale (scores are computed once) and choose the best; among equal ones, the middle one.

    See `decode_all` for `source` and `jobs`.
    """
    options, scales = options or DecodeOptions(), sorted(set(grid))
    if not scales:
        raise UsageError("the grid of acoustic scales must not be empty", where="grid", hint="pass at least one scale")
    for scale in scales:
        replace(options, acoustic_scale=scale)
    decoded = {scale: Decoded() for scale in scales}
    for result in _search_all(graph, source, sorted(refs), options, _ScaleSearch(scales), jobs, progress):
        for scale, hypothesis in zip(scales, result.hypotheses, strict=True):
            decoded[scale][result.name] = hypothesis
    scores = {scale: score(refs, decoded[scale].words, speakers) for scale in scales}
    return ScaleChoice(_middle_of_best([scores[scale].errors.total for scale in scales], scales), scores, decoded)


def _middle_of_best(errors: Sequence[int], scales: Sequence[float]) -> float:
    """Return the middle one of the best scales; of two, the one nearer to the middle of the grid, else the lower."""
    best = [n for n, count in enumerate(errors) if count == min(errors)]
    center, middle = sum((best[0], best[-1])) / 2, (len(scales) - 1) / 2
    return scales[min(best, key=lambda n: (abs(n - center), abs(n - middle), n))]


@dataclass(frozen=True)
class _ScaleSearch:
    """The best hypothesis for each of several acoustic scales."""

    scales: list[float]

    def __call__(self, decoder: Decoder, loglikes: np.ndarray, name: str) -> list[Hypothesis]:
        return [decoder.decode(loglikes, name, scale=scale) for scale in self.scales]

    def __str__(self) -> str:
        return "decoding" if len(self.scales) == 1 else f"decoding with {len(self.scales)} scales"


@dataclass(frozen=True)
class _NbestSearch:
    """The n best hypotheses."""

    count: int
    lattice_beam: float

    def __call__(self, decoder: Decoder, loglikes: np.ndarray, name: str) -> list[Hypothesis]:
        return decoder.nbest(loglikes, self.count, name, lattice_beam=self.lattice_beam)

    def __str__(self) -> str:
        return "n-best decoding"


_Search = _ScaleSearch | _NbestSearch


@dataclass(frozen=True)
class _Result:
    name: str
    hypotheses: list[Hypothesis]
    frames: int
    seconds: float  # CPU time


class _DecodeWorker:
    """A decoder in a process; reads scores from a script file if they are not passed."""

    def __init__(self, graph: Graph, scp: Path | None, options: DecodeOptions, search: _Search) -> None:
        self.decoder, self.search = Decoder(graph, options), search
        self.matrices = read_matrices(scp) if scp else {}

    def decode(self, name: str, loglikes: np.ndarray | None) -> _Result:
        if loglikes is None:
            loglikes = self.matrices[name]
        began = time.process_time()
        hypotheses = self.search(self.decoder, loglikes, name)
        return _Result(name, hypotheses, len(loglikes), time.process_time() - began)


def _search_all(
    graph: str | Path | Graph,
    source: ScoreSource,
    ids: list[str],
    options: DecodeOptions,
    search: _Search,
    jobs: int,
    progress: str,
) -> Iterator[_Result]:
    graph = graph if isinstance(graph, Graph) else load_graph(graph)
    scp, scores = (None, source) if callable(source) else (Path(source), _no_scores)
    if scp:
        _require_scores(scp, ids)
    processes = max(1, min(jobs, len(ids)))
    worker = (graph, scp, options, search)
    with (
        Progress(str(search), "utterances", progress) as bar,
        WorkerPool(_DecodeWorker, [worker] * processes, jobs=processes, what="a decoding process") as pool,
    ):
        items = ((name, scores(name)) for name in ids)
        yield from pool.map("decode", items, lambda done: bar.step(done, len(ids)))


def _no_scores(name: str) -> None:
    """Return None: the decoding process reads the scores itself."""


def _require_scores(scp: Path, ids: list[str]) -> None:
    available = read_matrices(scp)
    missing = [name for name in ids if name not in available]
    if missing:
        raise DataError(
            f"there are no scores of utterance '{missing[0]}' ({len(missing)} utterances without scores)",
            where=str(scp),
            hint="score them, or leave them out",
        )
