"""Hidden Markov models of words: phones with states, an utterance's graph of them, and the model that aligns.

An utterance's graph holds every pronunciation of its words and a pause that may be there or not before, between and after
them; every alignment chooses anew. With context-dependent states the graph is exact: phones at word edges stand once for each
neighbour that they may have, and only copies that agree about each other are joined.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from roundelay.errors import DataError
from roundelay.speech.features.fbank import cepstra
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.viterbi import Array, StateGraph, best_path

if TYPE_CHECKING:
    from roundelay.speech.hmm.lexicon import Lexicon

FORMAT = 1
SILENCE = "SIL"
SILENCE_INDEX = 0
SHIFT_S = 0.010
# A frame spans 25 ms: the boundary of frames t - 1 and t lies half-way between their centres, 7.5 ms after t's first sample.
BOUNDARY_S = 0.0075

Pronunciation = tuple[tuple[int, ...], float]
"""Phone indices and the natural logarithm of the probability."""


def seconds(frame: int) -> float:
    """The time of the boundary before a frame."""
    return SHIFT_S * frame + BOUNDARY_S if frame > 0 else 0.0


@dataclass(frozen=True)
class Alignment:
    """Where the states, phones and words of an utterance lie; boundaries are frames, ends exclusive."""

    pdfs: Array  # int32 [T]
    keys: Array  # int32 [T]: phone in context and state, see AlignmentModel.by_key
    phones: list[tuple[str, int, int]]
    words: list[tuple[str, int, int]]
    score: float  # per frame


@dataclass(frozen=True)
class UtteranceGraph:
    """Phones in context as nodes, their states in order, and the arcs between states."""

    phone: Array  # int32 [nodes]
    word: Array  # int32 [nodes]: which word of the utterance, -1 for a pause
    state_node: Array  # int32 [states]
    state_index: Array  # int32 [states]: which state of its phone
    state_key: Array  # int32 [states]
    arcs: StateGraph
    least_frames: int


class _Nodes:
    """Phones in context as they are strung together: what they are, and who leads to them at what cost."""

    def __init__(self, context: bool) -> None:
        self.context = context
        self.phone: list[int] = []
        self.left: list[int] = []
        self.right: list[int] = []
        self.word: list[int] = []
        self.into: list[list[tuple[int, float]]] = []
        self.start: dict[int, float] = {}
        self.final: dict[int, float] = {}

    def add(self, phone: int, left: int, right: int, word: int) -> int:
        self.phone.append(phone)
        self.left.append(left if self.context else 0)
        self.right.append(right if self.context else 0)
        self.word.append(word)
        self.into.append([])
        return len(self.phone) - 1

    def fit(self, end: int, begin: int) -> bool:
        """Whether two phones at word edges expect each other."""
        return not self.context or (self.right[end] == self.phone[begin] and self.left[begin] == self.phone[end])

    def add_word(self, number: int, variants: Sequence[Pronunciation], lefts: list[int], rights: list[int]) -> list[Any]:
        """Returns (entry nodes with the cost of their pronunciation, exit nodes)."""
        entries: list[tuple[int, float]] = []
        exits: list[int] = []
        for phones, cost in variants:
            last = len(phones) - 1
            before: list[int] = []
            for n, phone in enumerate(phones):
                left_choices = lefts if n == 0 else [phones[n - 1]]
                right_choices = rights if n == last else [phones[n + 1]]
                nodes = [self.add(phone, left, right, number) for left in left_choices for right in right_choices]
                for node in nodes:
                    self.into[node] += [(source, 0.0) for source in before]
                if n == 0:
                    entries += [(node, cost) for node in nodes]
                if n == last:
                    exits += nodes
                before = nodes
        return [entries, exits]


def _string_words(words: Sequence[Sequence[Pronunciation]], context: bool, silence: float, edges: bool) -> _Nodes:
    nodes = _Nodes(context)
    pause, none = float(np.log(silence)), float(np.log1p(-silence))
    exits: list[int] = []
    for number, variants in enumerate(words):
        quiet = nodes.add(SILENCE_INDEX, 0, 0, -1)
        following = words[number + 1] if number + 1 < len(words) else []
        lefts = sorted({SILENCE_INDEX, *(nodes.phone[e] for e in exits)}) if context else [0]
        rights = sorted({SILENCE_INDEX, *(phones[0] for phones, _ in following)}) if context else [0]
        entries, leaving = nodes.add_word(number, variants, lefts, rights)
        if number == 0:
            nodes.start[quiet] = pause
        nodes.into[quiet] += [(e, pause) for e in exits if nodes.right[e] == SILENCE_INDEX]
        for node, cost in entries:
            if nodes.left[node] == SILENCE_INDEX:
                nodes.into[node].append((quiet, cost))
                if number == 0 and not edges:
                    nodes.start[node] = none + cost
            nodes.into[node] += [(e, none + cost) for e in exits if nodes.fit(e, node)]
        exits = leaving
    quiet = nodes.add(SILENCE_INDEX, 0, 0, -1)
    nodes.into[quiet] += [(e, pause) for e in exits]
    nodes.final = {quiet: 0.0} if edges else {quiet: 0.0, **dict.fromkeys(exits, none)}
    if not words:
        nodes.start[quiet] = 0.0
    return nodes


def utterance_graph(
    words: Sequence[Sequence[Pronunciation]], states: Sequence[int], *, context: bool, silence: float, edges: bool = False
) -> UtteranceGraph:
    """The graph of words given by their pronunciations; `states` is the number of states by phone, `silence` the
    probability of a pause. With `edges` there must be one before the first word and after the last."""
    nodes = _string_words(words, context, silence, edges)
    phone = np.array(nodes.phone, np.int32)
    counts = np.asarray(states, np.int64)[phone]
    offset = np.concatenate([[0], np.cumsum(counts)])
    state_node = np.repeat(np.arange(len(phone), dtype=np.int32), counts)
    state_index = (np.arange(offset[-1]) - offset[state_node]).astype(np.int32)
    first, source, weight = [0], [], []
    for node, into in enumerate(nodes.into):
        source += [int(offset[i + 1]) - 1 for i, _ in into]
        weight += [cost for _, cost in into]
        first.append(len(source))
        for state in range(int(offset[node]), int(offset[node + 1]) - 1):
            source.append(state)
            weight.append(0.0)
            first.append(len(source))
    start, final = np.full(offset[-1], -np.inf), np.full(offset[-1], -np.inf)
    for node, cost in nodes.start.items():
        start[offset[node]] = cost
    for node, cost in nodes.final.items():
        final[offset[node + 1] - 1] = cost
    phones, width = len(states), max(states)
    left, right = np.array(nodes.left, np.int32), np.array(nodes.right, np.int32)
    key = (((left * phones + phone) * phones + right) * width).astype(np.int32)
    least = sum(min(sum(states[p] for p in pronunciation) for pronunciation, _ in variants) for variants in words)
    return UtteranceGraph(
        phone,
        np.array(nodes.word, np.int32),
        state_node,
        state_index,
        key[state_node] + state_index,
        StateGraph(np.array(first, np.int32), np.array(source, np.int32), np.array(weight), start, final),
        least + (2 * states[SILENCE_INDEX] if edges else 0) if words else states[SILENCE_INDEX],
    )


@dataclass(frozen=True)
class Frontend:
    """What the Gaussians see of normalised log-mel frames: cepstra with deltas, or neighbouring cepstra projected. With
    keep = 0 they see frames as they are: those of a stream that has gone through a front end before."""

    keep: int = 13
    deltas: int = 2
    splice: int = 0
    matrix: Array | None = None  # float32 [dim, keep * (2 * splice + 1)]

    def __call__(self, static: Array) -> Array:
        if self.keep == 0:
            return static
        keep = min(self.keep, static.shape[1])
        if self.matrix is None:
            return cepstra(static, keep, self.deltas)
        return self.spliced(static) @ self.matrix.T

    def same(self, other: Frontend) -> bool:
        if (self.keep, self.deltas, self.splice) != (other.keep, other.deltas, other.splice):
            return False
        if self.matrix is None or other.matrix is None:
            return self.matrix is other.matrix
        return np.array_equal(self.matrix, other.matrix)

    def dim(self, mels: int) -> int:
        """Of what comes out."""
        if self.keep == 0:
            return mels
        return min(self.keep, mels) * (self.deltas + 1) if self.matrix is None else len(self.matrix)

    def spliced_dim(self, mels: int) -> int:
        return min(self.keep, mels) * (2 * self.splice + 1)

    def spliced(self, static: Array) -> Array:
        """Cepstra of 2 * splice + 1 frames side by side, the edges repeated."""
        plain = cepstra(static, min(self.keep, static.shape[1]), 0)
        padded = np.pad(plain, ((self.splice, self.splice), (0, 0)), mode="edge")
        return np.hstack([padded[n : n + len(plain)] for n in range(2 * self.splice + 1)])


class AlignmentModel:
    """Phones, their tied states with self-loop probabilities, and the mixtures that score them.

    Phone 0 is silence. Its pdfs do not depend on context, and it also stands for the edge of an utterance in the contexts of
    other phones.
    """

    def __init__(
        self,
        lexicon_phones: Sequence[str],
        table: Array,
        self_loop: Array,
        gmm: Gmm,
        *,
        states_per_phone: int = 3,
        silence_states: int = 3,
        silence_probability: float = 0.5,
        frontend: Frontend | None = None,
    ) -> None:
        """table: pdf by [left, phone, right, state]; a first and third axis of length 1 make a monophone model."""
        self.lexicon_phones = list(lexicon_phones)
        self.table = np.ascontiguousarray(table, np.int32)
        self.self_loop = np.ascontiguousarray(self_loop, np.float64)
        self.gmm = gmm
        self.frontend = frontend or Frontend()
        self.states_per_phone, self.silence_states = states_per_phone, silence_states
        self.silence_probability = silence_probability
        self._index = {phone: n for n, phone in enumerate(self.lexicon_phones)}
        self._by_key: Array | None = None

    # ------------------------------------------------------------------------------------------------------ states

    @property
    def num_pdfs(self) -> int:
        return len(self.self_loop)

    @property
    def context(self) -> int:
        return 1 if self.table.shape[0] == 1 else 3

    def states(self, phone: int) -> int:
        """How many states a phone has, in a row from left to right."""
        return self.silence_states if phone == SILENCE_INDEX else self.states_per_phone

    def pdf(self, left: int, phone: int, right: int, state: int) -> int:
        """The pdf of a state of a phone between two others; silence (0) for a neighbour is also the utterance's edge."""
        if self.context == 1:
            left = right = 0
        return int(self.table[left, phone, right, state])

    @property
    def by_key(self) -> Array:
        """pdf by key = ((left * phones + phone) * phones + right) * states + state, with the states of the longest phone."""
        if self._by_key is None:
            phones = len(self.lexicon_phones)
            self._by_key = np.broadcast_to(self.table, (phones, phones, phones, self.table.shape[3])).reshape(-1)
        return self._by_key

    # --------------------------------------------------------------------------------------------------- alignment

    def pronunciations(self, word: str, lexicon: Lexicon, name: str = "") -> list[Pronunciation]:
        where = f"utterance {name}" if name else ""
        found = lexicon.entries.get(word)
        if not found:
            do = "add it to the lexicon, or leave out utterances with unknown words"
            raise DataError(f"the word '{word}' has no pronunciation", where=where, hint=do)
        for phones, _ in found:
            for phone in phones:
                if phone not in self._index:
                    do = "train the model anew with this lexicon"
                    raise DataError(f"the model does not know phone '{phone}' of the word '{word}'", where=where, hint=do)
        return [(tuple(self._index[phone] for phone in phones), float(np.log(max(p, 1e-10)))) for phones, p in found]

    def graph(self, words: Sequence[str], lexicon: Lexicon, name: str = "", *, edges: bool = False) -> UtteranceGraph:
        """With `edges` pauses before and after the words are certain."""
        states = [self.states(phone) for phone in range(len(self.lexicon_phones))]
        variants = [self.pronunciations(word, lexicon, name) for word in words]
        return utterance_graph(variants, states, context=self.context == 3, silence=self.silence_probability, edges=edges)

    def features(self, static: Array) -> Array:
        return self.frontend(static)

    def loglikes(self, static: Array) -> Array:
        """Log likelihoods of all pdfs, float32 [T, num_pdfs]."""
        return self.gmm.scores(self.features(static))

    def align(self, static: Array, words: Sequence[str], lexicon: Lexicon, name: str = "") -> Alignment:
        """The best path of normalised log-mel frames through the words; DataError where there is none."""
        return self.align_features(self.features(static), words, self.graph(words, lexicon, name), name)

    def align_scores(self, loglikes: Array, words: Sequence[str], lexicon: Lexicon, name: str = "") -> Alignment:
        """The same with the scores of anything that knows these pdfs, such as a network's log posteriors - log priors."""
        graph = self.graph(words, lexicon, name)
        return self._align(self.checked_scores(loglikes, name), self.by_key[graph.state_key], graph, words, name)

    def checked_scores(self, loglikes: Array, name: str = "") -> Array:
        if loglikes.ndim != 2 or loglikes.shape[1] != self.num_pdfs:
            what = f"scores of shape {list(loglikes.shape)} for a model of {self.num_pdfs} states"
            raise DataError(what, where=f"utterance {name}", hint="score with a network trained on this model's alignments")
        return loglikes

    def align_features(self, x: Array, words: Sequence[str], graph: UtteranceGraph, name: str = "") -> Alignment:
        """As `align`, with the front end's features and the utterance's graph at hand."""
        used, column = np.unique(self.by_key[graph.state_key], return_inverse=True)
        return self._align(self.gmm.scores(x, used), column, graph, words, name)

    def _align(self, scores: Array, column: Array, graph: UtteranceGraph, words: Sequence[str], name: str) -> Alignment:
        where = f"utterance {name}" if name else ""
        if len(scores) < graph.least_frames:
            what = f"too short for its words: {len(scores)} frames, {graph.least_frames} are needed"
            raise DataError(what, where=where)
        pdfs = self.by_key[graph.state_key]
        try:
            score, path = best_path(scores, column, self.self_loop[pdfs], graph.arcs)
        except DataError as error:
            raise DataError(error.message, where=where, hint=error.hint) from None
        if not np.isfinite(score):
            raise DataError("no path: the scores of its frames are not finite numbers", where=where)
        node = graph.state_node[path]
        begins = np.concatenate([[0], np.flatnonzero(np.diff(node)) + 1])
        ends = np.concatenate([begins[1:], [len(path)]])
        visited = node[begins]
        phones = graph.phone[visited]
        spans = list(zip(begins.tolist(), ends.tolist(), strict=True))
        return Alignment(
            pdfs[path],
            np.repeat(self.first_keys(phones), ends - begins) + graph.state_index[path],
            [(self.lexicon_phones[p], b, e) for p, (b, e) in zip(phones.tolist(), spans, strict=True)],
            _word_spans(graph.word[visited].tolist(), spans, words),
            score / len(path),
        )

    def first_keys(self, phones: Array) -> Array:
        """Keys of the first states of phones in a row."""
        number = len(self.lexicon_phones)
        edge = np.array([SILENCE_INDEX], phones.dtype)
        left, right = np.concatenate([edge, phones[:-1]]), np.concatenate([phones[1:], edge])
        left, right = np.where(phones == SILENCE_INDEX, 0, left), np.where(phones == SILENCE_INDEX, 0, right)
        return (((left * number + phones) * number + right) * self.table.shape[3]).astype(np.int32)

    # ---------------------------------------------------------------------------------------------------- on disk

    def save(self, folder: Path) -> None:
        """model.json and model.safetensors; what loads is equal bit by bit."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Array] = {"table": self.table, "self_loop": self.self_loop, **self.gmm.arrays()}
        if self.frontend.matrix is not None:
            arrays["frontend.matrix"] = np.ascontiguousarray(self.frontend.matrix, np.float32)
        about = {
            "format": FORMAT,
            "phones": self.lexicon_phones,
            "states_per_phone": self.states_per_phone,
            "silence_states": self.silence_states,
            "silence_probability": self.silence_probability,
            "context": self.context,
            "pdfs": self.num_pdfs,
            "components": self.gmm.components,
            "frontend": {"keep": self.frontend.keep, "deltas": self.frontend.deltas, "splice": self.frontend.splice},
        }
        (folder / "model.json").unlink(missing_ok=True)
        save_file(arrays, folder / "model.safetensors")
        part = folder / "model.json.part"
        part.write_text(json.dumps(about, indent=1), encoding="utf-8")
        part.replace(folder / "model.json")

    @classmethod
    def load(cls, folder: Path) -> AlignmentModel:
        folder = Path(folder)
        do = "train it again"
        try:
            about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
            if about["format"] != FORMAT:
                raise DataError(f"the alignment model has format {about['format']}, not {FORMAT}", where=str(folder), hint=do)
            arrays = cast(dict[str, Array], load_file(folder / "model.safetensors"))
            return cls(
                about["phones"],
                arrays["table"],
                arrays["self_loop"],
                Gmm.from_arrays(arrays),
                states_per_phone=about["states_per_phone"],
                silence_states=about["silence_states"],
                silence_probability=about["silence_probability"],
                frontend=Frontend(**about["frontend"], matrix=arrays.get("frontend.matrix")),
            )
        except FileNotFoundError as error:
            raise DataError("there is no alignment model here", where=str(error.filename or folder), hint=do) from None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"the alignment model cannot be read: {error}", where=str(folder), hint=do) from None


def _word_spans(visited: list[int], spans: list[tuple[int, int]], words: Sequence[str]) -> list[tuple[str, int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for word, (begin, end) in zip(visited, spans, strict=True):
        if word >= 0:
            found[word] = (found[word][0] if word in found else begin, end)
    return [(words[word], *found[word]) for word in sorted(found)]


def monophone_table(phones: int, states: int, silence_states: int) -> Array:
    """Every state of every phone is a pdf of its own; silence first."""
    table = np.full((1, phones, 1, max(states, silence_states)), -1, np.int32)
    table[0, 0, 0, :silence_states] = np.arange(silence_states)
    table[0, 1:, 0, :states] = silence_states + np.arange((phones - 1) * states).reshape(phones - 1, states)
    return table
