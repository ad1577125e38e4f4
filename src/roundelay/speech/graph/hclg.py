"""The decoding graph HCLG: everything that can be said, as one transducer from tied states to words.

    G   words with their n-gram probabilities; backing off reads the symbol #0
    L   phones to words, a pause with some probability before the first word and after every word
    C   phones to phones in context (of width 3, or 1 for monophones); the edge of an utterance counts as silence
    H   HMM states to phones in context

L and G carry disambiguation symbols (#0, #1, ...), which make every path a string of its own, so that determinisation
ends. H first reads *HMM states*, not their pdfs: states of different phones may share a pdf, and determinised by pdf two
words could become one string. Only the finished graph is relabelled to pdf + 1. Self-loops come last: an arc enters a
state, and wherever it ends, the state just entered can be held; where arcs of several pdfs end in one place, each
gets a place of its own before it. Entering costs -log(1 - p), for leaving later, and every further frame -log p,
p being the trained self-loop probability of the pdf.
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
from roundelay.speech.graph.fst import ARC, Arrays, arrays_of, fst_of, write_arrays
from roundelay.speech.graph.ngram import Ngram, read_arpa
from roundelay.speech.graph.transducers import (
    EPSILON,
    SILENCE_INDEX,
    Builder,
    Entries,
    Symbols,
    grammar_fst,
    lexicon_fst,
)

FORMAT = 1
WEIGHT_STEP = 1.0 / 1024
"""Costs nearer than this are one when states are merged: far below what decides between words."""


class HmmTopology(Protocol):
    """What the graph needs to know of a model with tied states; phone 0 is silence and also the edge of an utterance."""

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


class Pronunciations(Protocol):
    @property
    def entries(self) -> Entries: ...


@dataclass(frozen=True)
class Graph:
    """A graph in files. Labels are pdf + 1, or transition-ids where `transitions` gives the pdf of each (entry 0 unused)."""

    fst: Path
    words: Path
    num_pdfs: int | None = None
    transitions: np.ndarray | None = None
    record: dict[str, Any] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------------------- building


OPERATIONS = 5
"""Of a graph, for its progress."""


def build_graph(
    model: HmmTopology,
    lexicon: Pronunciations,
    language: str | Path | Ngram,
    folder: str | Path,
    *,
    silence_probability: float | None = None,
    progress: str = "none",
) -> Graph:
    """Writes HCLG.fst, words.txt and, last, graph.json. The silence probability is the model's unless given.

    Words of the language model without a pronunciation cannot be recognised: they are left out and listed."""
    ngram = language if isinstance(language, Ngram) else read_arpa(language)
    pause = getattr(model, "silence_probability", 0.5) if silence_probability is None else silence_probability
    if not 0 < pause < 1:
        raise UsageError(f"a silence probability of {pause}", where="silence_probability", hint="choose one between 0 and 1")
    loops = _checked_loops(model)
    symbols = Symbols(model.lexicon_phones, lexicon.entries, ngram)

    with Progress("graph", "operations", progress) as shown:
        lg = _composed(lexicon_fst(symbols, pause), grammar_fst(ngram, symbols))
        shown.step(1, OPERATIONS, "words composed")
        _determinise(lg)
        kaldifst.minimize_encoded(lg, WEIGHT_STEP)
        shown.step(2, OPERATIONS, "words determinised")
        width = model.context
        clg, windows = kaldifst.compose_context(symbols.disambiguators, width, width // 2, lg)
        states = _HmmStates(model, symbols, windows)
        hclg = _composed(states.fst, _relabelled(clg, states.by_window))
        shown.step(3, OPERATIONS, "states composed")
        _determinise(hclg)
        shown.step(4, OPERATIONS, "states determinised")
        # Back-off arcs stay: without them every history would get a copy of every word's beginning.
        hclg = _relabelled(hclg, states.without_marks())
        kaldifst.rmepsilon(hclg)
        kaldifst.minimize_encoded(hclg, WEIGHT_STEP)
        shown.step(5, OPERATIONS, "minimised")
        finished = _with_self_loops(arrays_of(hclg), states.pdf_labels(), loops)
    return _write(finished, Path(folder), symbols, model, lexicon, ngram, pause)


class _HmmStates:
    """H: every phone in context as a row of HMM states. Labels 1 to n are HMM states, those above disambiguators."""

    def __init__(self, model: HmmTopology, symbols: Symbols, windows: list[list[int]]) -> None:
        self._rows: dict[tuple[tuple[int, int, int], ...], int] = {}
        self._states: dict[tuple[int, int, int], int] = {}
        self.by_window = np.arange(len(windows))
        """The window that stands for each: contexts with the same tied states are one."""
        for number, window in enumerate(windows):
            if not _is_special(window):
                row = _row(model, window)
                self.by_window[number] = self._rows.setdefault(row, number)
                for state in row:
                    self._states.setdefault(state, len(self._states) + 1)
        self._backoff = len(self._states) + symbols.backoff
        self._highest = len(self._states) + max(symbols.disambiguators) + 1
        made = Builder()
        made.final(0)
        for number, window in enumerate(windows):
            if window and _is_special(window):
                # Minus the disambiguator, or 0 for the mark that compose_context itself puts before the first phone.
                made.arc(0, len(self._states) - window[0] if window[0] else self._highest, number, 0.0, 0)
        for row, number in self._rows.items():
            place = 0
            for position, state in enumerate(row):
                after = 0 if position == len(row) - 1 else made.state()
                made.arc(place, self._states[state], EPSILON if position else number, 0.0, after)
                place = after
        self.fst = made.fst

    def without_marks(self) -> np.ndarray:
        """New label by old: all disambiguators but #0 become epsilon."""
        labels = np.zeros(self._highest + 1, np.int64)
        labels[: len(self._states) + 1] = np.arange(len(self._states) + 1)
        labels[self._backoff] = self._backoff
        return labels

    def pdf_labels(self) -> np.ndarray:
        """pdf + 1 by label; #0 becomes epsilon too."""
        labels = np.zeros(self._highest + 1, np.int64)
        for (_, _, pdf), label in self._states.items():
            labels[label] = pdf + 1
        return labels


def _is_special(window: list[int]) -> bool:
    return not window or (len(window) == 1 and window[0] <= 0)


def _row(model: HmmTopology, window: list[int]) -> tuple[tuple[int, int, int], ...]:
    """(phone, state, pdf) from left to right; a neighbour of 0 is the edge of the utterance, which counts as silence."""
    phone = window[len(window) // 2] - 1
    left, right = (max(window[0] - 1, 0), max(window[-1] - 1, 0)) if len(window) > 1 else (SILENCE_INDEX, SILENCE_INDEX)
    row = tuple((phone, state, int(model.pdf(left, phone, right, state))) for state in range(model.states(phone)))
    for _, state, pdf in row:
        if not 0 <= pdf < model.num_pdfs:
            name = "-".join(model.lexicon_phones[p] for p in (left, phone, right))
            raise DataError(f"the model gives pdf {pdf} of {model.num_pdfs} for state {state} of {name}", hint="train it again")
    return row


def _composed(first: Any, second: Any) -> Any:
    kaldifst.arcsort(first, "olabel")
    kaldifst.arcsort(second, "ilabel")
    found = kaldifst.compose(first, second)
    return kaldifst.StdVectorFst(found)


def _determinise(fst: Any) -> None:
    # In the log semiring, so that costs move towards the start as probabilities do; every path keeps its own.
    kaldifst.determinize_star(fst, use_log=True)


def _relabelled(fst: Any, labels: np.ndarray) -> Any:
    found = arrays_of(fst)
    found.arcs["reads"] = labels[found.arcs["reads"]]
    return fst_of(found)


def _with_self_loops(plain: Arrays, labels: np.ndarray, loops: np.ndarray) -> Arrays:
    """Relabels to pdf + 1 and lets every state just entered be held.

    A place (q, x) is a state of the graph and the pdf that was entered on the way to it. Where q has only one, q is that place.
    Otherwise each place with a pdf is a state of its own, with its loop and an epsilon that leads on to q."""
    reads = labels[plain.arcs["reads"]]
    span = len(loops) + 1
    begin = np.array([plain.start * span])
    keys, place = np.unique(np.concatenate([plain.arcs["target"] * np.int64(span) + reads, begin]), return_inverse=True)
    state, entered = keys // span, keys % span
    several = np.bincount(state, minlength=plain.states)[state] > 1
    own = several & (entered > 0)
    number = np.where(own, plain.states + np.cumsum(own) - 1, state)

    enter = np.concatenate([[0.0], -np.log1p(-loops)])
    with np.errstate(divide="ignore"):
        hold = np.concatenate([[np.inf], -np.log(loops)])[entered]
    held = np.isfinite(hold)
    parts = [
        _arcs(plain.source, reads, plain.arcs["writes"], plain.arcs["cost"] + enter[reads], number[place[:-1]]),
        _arcs(number[held], entered[held], EPSILON, hold[held], number[held]),
        _arcs(number[own], EPSILON, EPSILON, 0.0, state[own]),
    ]
    final = np.concatenate([plain.final, np.full(own.sum(), np.inf, np.float32)])
    return Arrays(plain.start, final, np.concatenate([s for s, _ in parts]), np.concatenate([a for _, a in parts]))


def _arcs(source: np.ndarray, reads: Any, writes: Any, cost: Any, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    arcs = np.empty(len(source), ARC)
    arcs["reads"], arcs["writes"], arcs["cost"], arcs["target"] = reads, writes, cost, target
    return source, arcs


def _checked_loops(model: HmmTopology) -> np.ndarray:
    loops = np.asarray(model.self_loop, np.float64)
    if loops.shape != (model.num_pdfs,):
        raise DataError(f"{loops.shape} self-loop probabilities for {model.num_pdfs} pdfs", hint="train the model again")
    bad = np.flatnonzero(~((loops >= 0) & (loops < 1)))
    if len(bad):
        raise DataError(f"the self-loop probability of pdf {bad[0]} is {loops[bad[0]]}", hint="train the model again")
    return loops


# ------------------------------------------------------------------------------------------------- files and checks


def lexicon_fingerprint(lexicon: Pronunciations) -> str:
    """The same for equal words with equal pronunciations and probabilities, in whatever order."""
    lines = sorted(
        f"{word}\t{' '.join(phones)}\t{probability:.6g}\n"
        for word, found in lexicon.entries.items()
        for phones, probability in found
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_fingerprint(model: HmmTopology) -> str:
    """The same for models with equal phones, states, tying and self-loops: those a graph serves."""
    phones = range(len(model.lexicon_phones))
    neighbours = phones if model.context > 1 else range(1)
    tying = [
        model.pdf(left, phone, right, state)
        for phone in phones
        for state in range(model.states(phone))
        for left in neighbours
        for right in neighbours
    ]
    known = json.dumps([list(model.lexicon_phones), model.context, model.num_pdfs, [model.states(p) for p in phones]])
    found = hashlib.sha256(known.encode())
    found.update(np.array(tying, "<i4").tobytes())
    found.update(np.asarray(model.self_loop).astype("<f4").tobytes())
    return found.hexdigest()


def _write(
    finished: Arrays,
    folder: Path,
    symbols: Symbols,
    model: HmmTopology,
    lexicon: Pronunciations,
    ngram: Ngram,
    pause: float,
) -> Graph:
    folder.mkdir(parents=True, exist_ok=True)
    # The record comes last: a folder with graph.json is a finished one.
    (folder / "graph.json").unlink(missing_ok=True)
    write_arrays(folder / "HCLG.fst", finished)
    (folder / "words.txt").write_text(symbols.table(), encoding="utf-8")
    record = {
        "format": FORMAT,
        "num_pdfs": model.num_pdfs,
        "context": model.context,
        "words": len(symbols.words),
        "states": finished.states,
        "arcs": len(finished.arcs),
        "order": ngram.order,
        "silence_probability": pause,
        "without_pronunciation": symbols.left_out,
        "fst": _file_hash(folder / "HCLG.fst"),
        "lexicon": lexicon_fingerprint(lexicon),
        "model": model_fingerprint(model),
    }
    (folder / "graph.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return Graph(folder / "HCLG.fst", folder / "words.txt", model.num_pdfs, None, record)


def load_graph(folder: str | Path, *, lexicon: Pronunciations | None = None, model: HmmTopology | None = None) -> Graph:
    """The graph in a folder; with a lexicon or a model, only if it was built from these."""
    folder = Path(folder)
    where = str(folder / "graph.json")
    try:
        record = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        pdfs, format_ = int(record["num_pdfs"]), int(record["format"])
        hashes = {name: str(record[name]) for name in ("fst", "lexicon", "model")}
    except OSError:
        raise DataError("there is no finished decoding graph", where=where, hint="build it with build_graph") from None
    except (ValueError, KeyError, TypeError):
        raise DataError("the record of the decoding graph is damaged", where=where, hint="build the graph again") from None
    if format_ > FORMAT:
        raise DataError(f"a decoding graph of format {format_}, written by a later version", where=where, hint="build it again")
    if not (folder / "HCLG.fst").exists() or _file_hash(folder / "HCLG.fst") != hashes["fst"]:
        raise DataError("HCLG.fst is not the one the record speaks of", where=where, hint="build the graph again")
    if lexicon is not None and lexicon_fingerprint(lexicon) != hashes["lexicon"]:
        raise DataError(
            "the decoding graph was built from another lexicon",
            where=where,
            hint="decode with the run's own lexicon, or build it again",
        )
    if model is not None and model_fingerprint(model) != hashes["model"]:
        raise DataError(
            "the decoding graph was built for another acoustic model",
            where=where,
            hint="decode with the run's own model, or build it again",
        )
    return Graph(folder / "HCLG.fst", folder / "words.txt", pdfs, None, record)


def own_graph(
    fst: str | Path, words: str | Path, *, transitions: np.ndarray | None = None, num_pdfs: int | None = None
) -> Graph:
    """A graph made elsewhere: labels are transition-ids where their pdfs are given (entry 0 unused), else pdf + 1."""
    if transitions is not None:
        transitions = np.asarray(transitions)
        if transitions.ndim != 1 or len(transitions) < 2 or transitions[1:].min() < 0:
            raise DataError(
                "the table of transition-ids is empty or holds negative pdfs", hint="read it from the graph's final.mdl"
            )
        least = int(transitions[1:].max()) + 1
        if num_pdfs is not None and num_pdfs < least:
            raise DataError(
                f"the transition-ids name {least} pdfs, the scores have {num_pdfs}", hint="use the model the graph was made for"
            )
    return Graph(Path(fst), Path(words), num_pdfs, transitions)


def _file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
