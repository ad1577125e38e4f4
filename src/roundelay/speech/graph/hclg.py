"""The decoding graph HCLG: one FST from tied states (pdfs) to words.

    G   words with their n-gram probabilities; back-off arcs have the input label #0
    L   phones to words, with optional silence before the first word and after each word
    C   phones to phones in context (of width 3, or 1 for monophones); the edge of an utterance counts as silence
    H   HMM states to phones in context

L and G contain disambiguation symbols (#0, #1, ...), which make every path unique, so that determinization terminates. The
input labels of H are first *HMM states*, not pdfs: states of different phones may share a pdf, and after determinization by pdf
two words could become one string. Only the finished graph is relabeled to pdf + 1. Self-loops are added last: each arc enters
an HMM state, and the FST state where it ends gets the loop of that HMM state. Where arcs of several pdfs end in one FST state,
each pdf gets its own FST state in front of it. Entering costs -log(1 - p), which pays for leaving, and each further frame costs
-log p, where p is the trained self-loop probability of the pdf.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import kaldifst
import numpy as np

from roundelay.errors import DataError, UsageError
from roundelay.log.progress import Progress
from roundelay.speech.graph.fst import ARC, FstArrays, arrays_to_fst, fst_to_arrays, write_const_fst
from roundelay.speech.graph.ngram import Ngram, read_arpa
from roundelay.speech.graph.transducers import (
    EPSILON,
    Entries,
    FstBuilder,
    SymbolTables,
    grammar_fst,
    lexicon_fst,
)
from roundelay.speech.hmm.lexicon import SILENCE_INDEX

FORMAT = 1
WEIGHT_STEP = 1.0 / 1024
"""Quantization of weights when states are merged: far below differences that decide between words."""


class HmmTopology(Protocol):
    """The part of a model that the graph depends on; phone 0 is silence and also the edge of an utterance."""

    @property
    def lexicon_phones(self) -> list[str]: ...
    @property
    def num_pdfs(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def self_loop(self) -> np.ndarray: ...
    def states(self, phone: int) -> int: ...
    def pdf(self, left: int, phone: int, right: int, state: int) -> int: ...


class HasPronunciations(Protocol):
    """A lexicon."""

    @property
    def entries(self) -> Entries: ...


@dataclass(frozen=True)
class Graph:
    """The files of a decoding graph.

    Input labels are pdf + 1, or transition-ids if `transitions` maps them to pdfs (entry 0 unused).
    """

    fst: Path
    words: Path
    num_pdfs: int | None = None
    transitions: np.ndarray | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------------------- building


OPERATIONS = 5
"""Steps of `build_graph`, for its progress line."""


def build_graph(
    model: HmmTopology,
    lexicon: HasPronunciations,
    language: str | Path | Ngram,
    folder: str | Path,
    *,
    silence_probability: float | None = None,
    progress: str = "none",
) -> Graph:
    """Build the graph and write HCLG.fst, words.txt and, last, graph.json.

    silence_probability: the model's by default. Words of the language model without a pronunciation are left out of the graph
    and listed in graph.json.
    """
    ngram = language if isinstance(language, Ngram) else read_arpa(language)
    silence = getattr(model, "silence_probability", 0.5) if silence_probability is None else silence_probability
    if not 0 < silence < 1:
        raise UsageError(
            f"silence_probability must be between 0 and 1 (got {silence})",
            where="silence_probability",
            hint="choose a number between 0 and 1",
        )
    loops = _checked_loops(model)
    symbols = SymbolTables(model.lexicon_phones, lexicon.entries, ngram)

    with Progress("graph", "operations", progress) as bar:
        lg = _composed(lexicon_fst(symbols, silence), grammar_fst(ngram, symbols))
        bar.step(1, OPERATIONS, "L and G composed")
        _determinize(lg)
        kaldifst.minimize_encoded(lg, WEIGHT_STEP)
        bar.step(2, OPERATIONS, "LG determinized")
        width = model.context
        clg, windows = kaldifst.compose_context(symbols.disambiguation, width, width // 2, lg)
        states = _HmmStates(model, symbols, windows)
        hclg = _composed(states.fst, _relabeled(clg, states.by_window))
        bar.step(3, OPERATIONS, "H and CLG composed")
        _determinize(hclg)
        bar.step(4, OPERATIONS, "HCLG determinized")
        # Keep the back-off arcs: removing them would copy the beginning of each word to each history.
        hclg = _relabeled(hclg, states.without_disambiguation())
        kaldifst.rmepsilon(hclg)
        kaldifst.minimize_encoded(hclg, WEIGHT_STEP)
        bar.step(5, OPERATIONS, "HCLG minimized")
        finished = _with_self_loops(fst_to_arrays(hclg), states.pdf_labels(), loops)
    return _write(finished, Path(folder), symbols, model, lexicon, ngram, silence)


class _HmmStates:
    """H: each phone in context as a sequence of HMM states. Labels above those of states are disambiguation symbols."""

    def __init__(self, model: HmmTopology, symbols: SymbolTables, windows: list[list[int]]) -> None:
        self._rows: dict[tuple[tuple[int, int, int], ...], int] = {}
        self._states: dict[tuple[int, int, int], int] = {}
        self.by_window = np.arange(len(windows))
        """The representative of each window: contexts with the same tied states share one."""
        for number, window in enumerate(windows):
            if not _is_special(window):
                row = _row(model, window)
                self.by_window[number] = self._rows.setdefault(row, number)
                for state in row:
                    self._states.setdefault(state, len(self._states) + 1)
        self._backoff = len(self._states) + symbols.backoff
        self._highest = len(self._states) + max(symbols.disambiguation) + 1
        builder = FstBuilder()
        builder.final(0)
        for number, window in enumerate(windows):
            if window and _is_special(window):
                # The negative disambiguation symbol, or 0 for the symbol that compose_context puts before the first phone.
                builder.arc(0, len(self._states) - window[0] if window[0] else self._highest, number, 0.0, 0)
        for row, number in self._rows.items():
            current = 0
            for position, state in enumerate(row):
                following = 0 if position == len(row) - 1 else builder.state()
                builder.arc(current, self._states[state], EPSILON if position else number, 0.0, following)
                current = following
        self.fst = builder.fst

    def without_disambiguation(self) -> np.ndarray:
        """Return the new label of each label: all disambiguation symbols except #0 become epsilon."""
        labels = np.zeros(self._highest + 1, np.int64)
        labels[: len(self._states) + 1] = np.arange(len(self._states) + 1)
        labels[self._backoff] = self._backoff
        return labels

    def pdf_labels(self) -> np.ndarray:
        """Return pdf + 1 for each label; #0 becomes epsilon."""
        labels = np.zeros(self._highest + 1, np.int64)
        for (_, _, pdf), label in self._states.items():
            labels[label] = pdf + 1
        return labels


def _is_special(window: list[int]) -> bool:
    return not window or (len(window) == 1 and window[0] <= 0)


def _row(model: HmmTopology, window: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Return (phone, state, pdf) from left to right; a neighbor of 0 is the edge of the utterance, which counts as silence."""
    phone = window[len(window) // 2] - 1
    left, right = (max(window[0] - 1, 0), max(window[-1] - 1, 0)) if len(window) > 1 else (SILENCE_INDEX, SILENCE_INDEX)
    row = tuple((phone, state, int(model.pdf(left, phone, right, state))) for state in range(model.states(phone)))
    for _, state, pdf in row:
        if not 0 <= pdf < model.num_pdfs:
            name = "-".join(model.lexicon_phones[p] for p in (left, phone, right))
            raise DataError(
                f"the pdf of state {state} of {name} must be >= 0 and < {model.num_pdfs} (got {pdf})",
                hint="train the model again",
            )
    return row


def _composed(first: Any, second: Any) -> Any:
    kaldifst.arcsort(first, "olabel")
    kaldifst.arcsort(second, "ilabel")
    return kaldifst.StdVectorFst(kaldifst.compose(first, second))


def _determinize(fst: Any) -> None:
    # In the log semiring, so that weights are pushed as probabilities; the weight of each path stays the same.
    kaldifst.determinize_star(fst, use_log=True)


def _relabeled(fst: Any, labels: np.ndarray) -> Any:
    arrays = fst_to_arrays(fst)
    arrays.arcs["ilabel"] = labels[arrays.arcs["ilabel"]]
    return arrays_to_fst(arrays)


def _with_self_loops(plain: FstArrays, labels: np.ndarray, loops: np.ndarray) -> FstArrays:
    """Relabel to pdf + 1 and add the self-loop of each HMM state.

    An entry (q, x) is a state q of the graph and the pdf x of an arc that ends there. If q has only one entry, q gets the loop.
    Otherwise each entry with a pdf becomes a new state, with its loop and an epsilon arc to q.
    """
    ilabels = labels[plain.arcs["ilabel"]]
    span = len(loops) + 1
    begin = np.array([plain.start * span])
    keys, entry = np.unique(np.concatenate([plain.arcs["nextstate"] * np.int64(span) + ilabels, begin]), return_inverse=True)
    state, pdf_label = keys // span, keys % span
    several = np.bincount(state, minlength=plain.states)[state] > 1
    own = several & (pdf_label > 0)
    number = np.where(own, plain.states + np.cumsum(own) - 1, state)

    enter = np.concatenate([[0.0], -np.log1p(-loops)])
    with np.errstate(divide="ignore"):
        stay = np.concatenate([[np.inf], -np.log(loops)])[pdf_label]
    has_loop = np.isfinite(stay)
    parts = [
        _arcs(plain.source, ilabels, plain.arcs["olabel"], plain.arcs["weight"] + enter[ilabels], number[entry[:-1]]),
        _arcs(number[has_loop], pdf_label[has_loop], EPSILON, stay[has_loop], number[has_loop]),
        _arcs(number[own], EPSILON, EPSILON, 0.0, state[own]),
    ]
    final = np.concatenate([plain.final, np.full(own.sum(), np.inf, np.float32)])
    return FstArrays(plain.start, final, np.concatenate([s for s, _ in parts]), np.concatenate([a for _, a in parts]))


def _arcs(source: np.ndarray, ilabel: Any, olabel: Any, weight: Any, nextstate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    arcs = np.empty(len(source), ARC)
    arcs["ilabel"], arcs["olabel"], arcs["weight"], arcs["nextstate"] = ilabel, olabel, weight, nextstate
    return source, arcs


def _checked_loops(model: HmmTopology) -> np.ndarray:
    loops = np.asarray(model.self_loop, np.float64)
    if loops.shape != (model.num_pdfs,):
        raise DataError(
            f"self-loop probabilities must have shape ({model.num_pdfs},) (got {loops.shape})", hint="train the model again"
        )
    bad = np.flatnonzero(~((loops >= 0) & (loops < 1)))
    if len(bad):
        raise DataError(
            f"the self-loop probability of pdf {bad[0]} must be >= 0 and < 1 (got {loops[bad[0]]})",
            hint="train the model again",
        )
    return loops


# ------------------------------------------------------------------------------------------------- files and checks


def lexicon_fingerprint(lexicon: HasPronunciations) -> str:
    """Return a hash of all words, pronunciations and probabilities; it does not depend on their order."""
    lines = sorted(
        f"{word}\t{' '.join(phones)}\t{probability:.6g}\n"
        for word, variants in lexicon.entries.items()
        for phones, probability in variants
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_fingerprint(model: HmmTopology) -> str:
    """Return a hash of phones, states, tying and self-loops: everything in a model that its graph depends on."""
    phones = range(len(model.lexicon_phones))
    neighbors = phones if model.context > 1 else range(1)
    tying = [
        model.pdf(left, phone, right, state)
        for phone in phones
        for state in range(model.states(phone))
        for left in neighbors
        for right in neighbors
    ]
    topology = json.dumps([list(model.lexicon_phones), model.context, model.num_pdfs, [model.states(p) for p in phones]])
    digest = hashlib.sha256(topology.encode())
    digest.update(np.array(tying, "<i4").tobytes())
    digest.update(np.asarray(model.self_loop).astype("<f4").tobytes())
    return digest.hexdigest()


def _write(
    finished: FstArrays,
    folder: Path,
    symbols: SymbolTables,
    model: HmmTopology,
    lexicon: HasPronunciations,
    ngram: Ngram,
    silence: float,
) -> Graph:
    folder.mkdir(parents=True, exist_ok=True)
    # graph.json is written last: a folder that has it is complete.
    (folder / "graph.json").unlink(missing_ok=True)
    write_const_fst(folder / "HCLG.fst", finished)
    (folder / "words.txt").write_text(symbols.table(), encoding="utf-8")
    metadata = {
        "format": FORMAT,
        "num_pdfs": model.num_pdfs,
        "context": model.context,
        "words": len(symbols.words),
        "states": finished.states,
        "arcs": len(finished.arcs),
        "order": ngram.order,
        "silence_probability": silence,
        "without_pronunciation": symbols.without_pronunciation,
        "fst": _file_hash(folder / "HCLG.fst"),
        "lexicon": lexicon_fingerprint(lexicon),
        "model": model_fingerprint(model),
    }
    (folder / "graph.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    return Graph(folder / "HCLG.fst", folder / "words.txt", model.num_pdfs, None, metadata)


def load_graph(folder: str | Path, *, lexicon: HasPronunciations | None = None, model: HmmTopology | None = None) -> Graph:
    """Open the graph in a folder; DataError if it is incomplete or damaged, or was not built from this lexicon or model."""
    folder = Path(folder)
    where = str(folder / "graph.json")
    try:
        metadata = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        pdfs, format_ = int(metadata["num_pdfs"]), int(metadata["format"])
        hashes = {name: str(metadata[name]) for name in ("fst", "lexicon", "model")}
    except OSError:
        raise DataError("there is no finished decoding graph", where=where, hint="build it with build_graph") from None
    except (ValueError, KeyError, TypeError):
        raise DataError("graph.json is damaged", where=where, hint="build the graph again") from None
    if format_ > FORMAT:
        raise DataError(
            f"the format of the decoding graph must be at most {FORMAT} (got {format_}, from a later version)",
            where=where,
            hint="build it again",
        )
    if not (folder / "HCLG.fst").exists() or _file_hash(folder / "HCLG.fst") != hashes["fst"]:
        raise DataError("HCLG.fst does not match graph.json", where=where, hint="build the graph again")
    if lexicon is not None and lexicon_fingerprint(lexicon) != hashes["lexicon"]:
        raise DataError(
            "the decoding graph was built from another lexicon",
            where=where,
            hint="decode with the lexicon of the run, or build the graph again",
        )
    if model is not None and model_fingerprint(model) != hashes["model"]:
        raise DataError(
            "the decoding graph was built for another acoustic model",
            where=where,
            hint="decode with the model of the run, or build the graph again",
        )
    return Graph(folder / "HCLG.fst", folder / "words.txt", pdfs, None, metadata)


def external_graph(
    fst: str | Path, words: str | Path, *, transitions: np.ndarray | None = None, num_pdfs: int | None = None
) -> Graph:
    """Return a graph built by another toolkit. Input labels are transition-ids if `transitions` is passed, else pdf + 1.

    transitions: pdf of each transition-id (entry 0 unused). Raises DataError if they do not fit `num_pdfs`.
    """
    if transitions is not None:
        transitions = np.asarray(transitions)
        if transitions.ndim != 1 or len(transitions) < 2 or transitions[1:].min() < 0:
            raise DataError(
                "the table of transition-ids is empty or contains negative pdfs", hint="read it from the final.mdl of the graph"
            )
        needed = int(transitions[1:].max()) + 1
        if num_pdfs is not None and num_pdfs < needed:
            raise DataError(
                f"the transition-ids need {needed} pdfs, the scores have {num_pdfs}",
                hint="use the model that the graph was built for",
            )
    return Graph(Path(fst), Path(words), num_pdfs, transitions)


def _file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
