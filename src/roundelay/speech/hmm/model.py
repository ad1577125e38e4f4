"""GMM-HMM alignment models: phones, tied states and mixtures, forced alignment, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from roundelay.errors import DataError
from roundelay.speech.hmm.frontend import Frontend
from roundelay.speech.hmm.gmm import Gmm
from roundelay.speech.hmm.lexicon import SILENCE_INDEX
from roundelay.speech.hmm.utterance_graph import IndexedPronunciation, UtteranceGraph, utterance_graph
from roundelay.speech.hmm.viterbi import Array, best_path

if TYPE_CHECKING:
    from roundelay.speech.hmm.lexicon import Lexicon

FORMAT = 1
SHIFT_S = 0.010
# A frame spans 25 ms: the boundary of frames t - 1 and t lies half-way between their centers, 7.5 ms after t's first sample.
BOUNDARY_S = 0.0075


def seconds(frame: int) -> float:
    """Return the time of the boundary before a frame."""
    return SHIFT_S * frame + BOUNDARY_S if frame > 0 else 0.0


@dataclass(frozen=True)
class Alignment:
    """The states, phones and words of an utterance; boundaries are frame indices, ends exclusive."""

    pdfs: Array  # int32 [T]
    keys: Array  # int32 [T]: phone in context and state, see AlignmentModel.pdf_by_key
    phones: list[tuple[str, int, int]]
    words: list[tuple[str, int, int]]
    score: float  # log likelihood per frame


class AlignmentModel:
    """A GMM-HMM: phones, their tied states with self-loop probabilities, and one mixture per pdf.

    Phone 0 is silence. Its pdfs do not depend on context. In the contexts of other phones it also represents the utterance
    edge.
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
        """table: pdf by [left, phone, right, state]; a monophone model has a first and third axis of length 1."""
        self.lexicon_phones = list(lexicon_phones)
        self.table = np.ascontiguousarray(table, np.int32)
        self.self_loop = np.ascontiguousarray(self_loop, np.float64)
        self.gmm = gmm
        self.frontend = frontend or Frontend()
        self.states_per_phone, self.silence_states = states_per_phone, silence_states
        self.silence_probability = silence_probability
        self._index = {phone: n for n, phone in enumerate(self.lexicon_phones)}
        self._pdf_by_key: Array | None = None

    def replace(
        self, *, gmm: Gmm, self_loop: Array, table: Array | None = None, frontend: Frontend | None = None
    ) -> AlignmentModel:
        """Return a model with the same phones and other parameters; tying and front end stay unless they are passed."""
        return AlignmentModel(
            self.lexicon_phones,
            self.table if table is None else table,
            self_loop,
            gmm,
            states_per_phone=self.states_per_phone,
            silence_states=self.silence_states,
            silence_probability=self.silence_probability,
            frontend=frontend or self.frontend,
        )

    # ------------------------------------------------------------------------------------------------------ states

    @property
    def num_pdfs(self) -> int:
        return len(self.self_loop)

    @property
    def context(self) -> int:
        """The width of the phone context: 1 (monophones) or 3 (triphones)."""
        return 1 if self.table.shape[0] == 1 else 3

    def states(self, phone: int) -> int:
        """Return the number of states of a phone, which follow each other from left to right."""
        return self.silence_states if phone == SILENCE_INDEX else self.states_per_phone

    def pdf(self, left: int, phone: int, right: int, state: int) -> int:
        """Return the pdf of a state of a phone in context; a neighbor of 0 is silence or the edge of the utterance."""
        if self.context == 1:
            left = right = 0
        return int(self.table[left, phone, right, state])

    @property
    def pdf_by_key(self) -> Array:
        """The pdf of each key = ((left * phones + phone) * phones + right) * max_states + state."""
        if self._pdf_by_key is None:
            phones = len(self.lexicon_phones)
            self._pdf_by_key = np.broadcast_to(self.table, (phones, phones, phones, self.table.shape[3])).reshape(-1)
        return self._pdf_by_key

    def first_keys(self, phones: Array) -> Array:
        """Return the keys of the first states of consecutive phones."""
        number = len(self.lexicon_phones)
        edge = np.array([SILENCE_INDEX], phones.dtype)
        left, right = np.concatenate([edge, phones[:-1]]), np.concatenate([phones[1:], edge])
        left, right = np.where(phones == SILENCE_INDEX, 0, left), np.where(phones == SILENCE_INDEX, 0, right)
        return (((left * number + phones) * number + right) * self.table.shape[3]).astype(np.int32)

    # --------------------------------------------------------------------------------------------------- alignment

    def pronunciations(self, word: str, lexicon: Lexicon, name: str = "") -> list[IndexedPronunciation]:
        """Return the pronunciations of a word; DataError if it has none, or a phone that the model does not have."""
        where = f"utterance {name}" if name else ""
        variants = lexicon.entries.get(word)
        if not variants:
            hint = "add it to the lexicon, or leave out utterances with unknown words"
            raise DataError(f"the word '{word}' has no pronunciation", where=where, hint=hint)
        for phones, _ in variants:
            for phone in phones:
                if phone not in self._index:
                    raise DataError(
                        f"phone '{phone}' of the word '{word}' is not in the model",
                        where=where,
                        hint="train the model again with this lexicon",
                    )
        return [(tuple(self._index[phone] for phone in phones), float(np.log(max(p, 1e-10)))) for phones, p in variants]

    def graph(self, words: Sequence[str], lexicon: Lexicon, name: str = "", *, edge_silence: bool = False) -> UtteranceGraph:
        """Build the graph of an utterance; with `edge_silence` silence before and after the words is mandatory."""
        states = [self.states(phone) for phone in range(len(self.lexicon_phones))]
        variants = [self.pronunciations(word, lexicon, name) for word in words]
        return utterance_graph(
            variants, states, context=self.context == 3, silence=self.silence_probability, edge_silence=edge_silence
        )

    def features(self, static: Array) -> Array:
        """Return the features of normalized log-mel frames, as the GMMs see them."""
        return self.frontend(static)

    def loglikes(self, static: Array) -> Array:
        """Return the log likelihoods of all pdfs, float32 [T, num_pdfs]."""
        return self.gmm.scores(self.features(static))

    def align(self, static: Array, words: Sequence[str], lexicon: Lexicon, name: str = "") -> Alignment:
        """Align normalized log-mel frames with words; DataError if the graph has no path of this length."""
        return self.align_features(self.features(static), words, self.graph(words, lexicon, name), name)

    def align_scores(self, loglikes: Array, words: Sequence[str], lexicon: Lexicon, name: str = "") -> Alignment:
        """Align with scores of these pdfs from another model, such as a network's log posteriors minus log priors."""
        graph = self.graph(words, lexicon, name)
        return self._align(self.validate_scores(loglikes, name), self.pdf_by_key[graph.state_key], graph, words, name)

    def validate_scores(self, loglikes: Array, name: str = "") -> Array:
        """Return the scores; DataError if their shape is not [T, num_pdfs]."""
        if loglikes.ndim != 2 or loglikes.shape[1] != self.num_pdfs:
            raise DataError(
                f"scores of shape {list(loglikes.shape)} do not fit a model of {self.num_pdfs} pdfs",
                where=f"utterance {name}",
                hint="score with a network trained on this model's alignments",
            )
        return loglikes

    def align_features(self, x: Array, words: Sequence[str], graph: UtteranceGraph, name: str = "") -> Alignment:
        """Align features of the front end with an utterance's graph; see `align`."""
        pdfs, column = np.unique(self.pdf_by_key[graph.state_key], return_inverse=True)
        return self._align(self.gmm.scores(x, pdfs), column, graph, words, name)

    def _align(self, scores: Array, column: Array, graph: UtteranceGraph, words: Sequence[str], name: str) -> Alignment:
        where = f"utterance {name}" if name else ""
        if len(scores) < graph.min_frames:
            raise DataError(f"too short for its words: {len(scores)} frames, {graph.min_frames} are needed", where=where)
        pdfs = self.pdf_by_key[graph.state_key]
        try:
            score, path = best_path(scores, column, self.self_loop[pdfs], graph.arcs)
        except DataError as error:
            raise DataError(error.message, where=where, hint=error.hint) from None
        if not np.isfinite(score):
            raise DataError("alignment failed: the scores of its frames are not finite", where=where)
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

    # ------------------------------------------------------------------------------------------------------- files

    def save(self, folder: Path) -> None:
        """Write model.json and model.safetensors; a loaded model is bit-identical."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Array] = {"table": self.table, "self_loop": self.self_loop, **self.gmm.arrays()}
        if self.frontend.matrix is not None:
            arrays["frontend.matrix"] = np.ascontiguousarray(self.frontend.matrix, np.float32)
        metadata = {
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
        part.write_text(json.dumps(metadata, indent=1), encoding="utf-8")
        part.replace(folder / "model.json")

    @classmethod
    def load(cls, folder: Path) -> AlignmentModel:
        """Read a model that `save` wrote; DataError if it is missing or damaged."""
        folder = Path(folder)
        hint = "train it again"
        try:
            metadata = json.loads((folder / "model.json").read_text(encoding="utf-8"))
            if metadata["format"] != FORMAT:
                raise DataError(
                    f"the format of the alignment model must be {FORMAT} (got {metadata['format']})",
                    where=str(folder),
                    hint=hint,
                )
            arrays = cast(dict[str, Array], load_file(folder / "model.safetensors"))
            return cls(
                metadata["phones"],
                arrays["table"],
                arrays["self_loop"],
                Gmm.from_arrays(arrays),
                states_per_phone=metadata["states_per_phone"],
                silence_states=metadata["silence_states"],
                silence_probability=metadata["silence_probability"],
                frontend=Frontend(**metadata["frontend"], matrix=arrays.get("frontend.matrix")),
            )
        except FileNotFoundError as error:
            raise DataError("there is no alignment model here", where=str(error.filename or folder), hint=hint) from None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"the alignment model cannot be read: {error}", where=str(folder), hint=hint) from None


def _word_spans(visited: list[int], spans: list[tuple[int, int]], words: Sequence[str]) -> list[tuple[str, int, int]]:
    word_spans: dict[int, tuple[int, int]] = {}
    for word, (begin, end) in zip(visited, spans, strict=True):
        if word >= 0:
            word_spans[word] = (word_spans[word][0] if word in word_spans else begin, end)
    return [(words[word], *word_spans[word]) for word in sorted(word_spans)]


def monophone_table(phones: int, states: int, silence_states: int) -> Array:
    """Return the table of a model without tying: each state of each phone has its own pdf, silence first."""
    table = np.full((1, phones, 1, max(states, silence_states)), -1, np.int32)
    table[0, 0, 0, :silence_states] = np.arange(silence_states)
    table[0, 1:, 0, :states] = silence_states + np.arange((phones - 1) * states).reshape(phones - 1, states)
    return table
