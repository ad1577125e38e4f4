"""N-best sentences of an utterance, from a lattice.

kaldi-decoder's LatticeSimpleDecoder keeps all paths near the best one. A raw lattice has one path per alignment, so its n best
paths are mostly the same sentence. The lattice is therefore determinized over words first, which keeps the best alignment of
each sentence. Tests compare sentences and scores with exhaustive search. This takes four to seven times as long as the search
for the best path, and has a beam but no limit of active states.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldi_decoder
import kaldifst
import numpy as np

from roundelay.speech.graph.fst import ARC, FstArrays, arrays_to_fst, header

LATTICE_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("graph", "<f4"), ("acoustic", "<f4"), ("nextstate", "<i4")])


@dataclass(frozen=True)
class Sentence:
    """Word labels of a sentence, its total cost, and the acoustic part of it."""

    labels: list[int]
    cost: float
    acoustic_cost: float


@dataclass(frozen=True)
class _Lattice:
    start: int
    final_graph: np.ndarray  # float32 [states]
    final_acoustic: np.ndarray  # float32 [states]
    source: np.ndarray  # int [arcs]
    arcs: np.ndarray  # LATTICE_ARC [arcs]

    def words(self) -> FstArrays:
        """Return an acceptor of words, weighted by the sum of graph and acoustic costs."""
        fst = self._weighted()
        fst.arcs["ilabel"] = fst.arcs["olabel"]
        return fst

    def arc_numbers(self) -> FstArrays:
        """Return an FST from arc number + 1 to words, with the same weights."""
        fst = self._weighted()
        fst.arcs["ilabel"] = 1 + np.arange(len(fst.arcs))
        return fst

    def _weighted(self) -> FstArrays:
        arcs = np.empty(len(self.arcs), ARC)
        arcs["olabel"], arcs["nextstate"] = self.arcs["olabel"], self.arcs["nextstate"]
        arcs["weight"] = self.arcs["graph"] + self.arcs["acoustic"]
        return FstArrays(self.start, self.final_graph + self.final_acoustic, self.source, arcs)


def best_sentences(fst: Any, scaled: np.ndarray, count: int, beam: float, lattice_beam: float) -> list[Sentence]:
    """Return at most `count` different sentences, the best first. At least one path must lie within the beam.

    scaled: log likelihoods times the acoustic scale, float32 [frames, pdfs].
    """
    search = kaldi_decoder.LatticeSimpleDecoder(
        fst, kaldi_decoder.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=lattice_beam)
    )
    search.decode(kaldi_decoder.DecodableCtc(scaled))
    success, raw_lattice = search.get_raw_lattice()
    if not success:
        return []
    lattice = _read_lattice(raw_lattice)
    words = arrays_to_fst(lattice.words())
    kaldifst.rmepsilon(words)
    words = kaldifst.determinize(words)
    sentences = []
    for path in kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(words, count)):
        _, _, labels, cost = kaldifst.get_linear_symbol_sequence(path)
        sentences.append((labels, float(cost.value)))
    sentences.sort(key=lambda pair: pair[1])
    acoustic_costs = _acoustic_costs(lattice, [labels for labels, _ in sentences])
    return [Sentence(*pair, acoustic) for pair, acoustic in zip(sentences, acoustic_costs, strict=True)]


def _acoustic_costs(lattice: _Lattice, sentences: Sequence[list[int]]) -> list[float]:
    """Return the acoustic cost of the best path of each sentence through the lattice."""
    numbered = arrays_to_fst(lattice.arc_numbers())
    kaldifst.arcsort(numbered, "olabel")
    costs = []
    for labels in sentences:
        paths = kaldifst.compose(numbered, kaldifst.make_linear_acceptor(labels))
        _, numbers, _, _ = kaldifst.get_linear_symbol_sequence(kaldifst.shortest_path(paths, 1))
        path = lattice.arcs[np.array(numbers, np.int64) - 1]
        final = lattice.final_acoustic[path["nextstate"][-1] if len(path) else lattice.start]
        costs.append(float(path["acoustic"].sum(dtype=np.float64) + final))
    return costs


def _read_lattice(lattice: Any) -> _Lattice:
    """Read states and arcs from the file of a lattice; kaldi-decoder has no other access to them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lattice"
        lattice.write(str(path))
        content = path.read_bytes()
    _, _, start, states, _, at = header(content, "a lattice in memory")
    final = np.empty((2, states), np.float32)
    degree, pieces = np.empty(states, np.int64), []
    for state in range(states):
        final[0, state], final[1, state], degree[state] = struct.unpack_from("<ffq", content, at)
        pieces.append(np.frombuffer(content, LATTICE_ARC, degree[state], at + 16))
        at += 16 + degree[state] * LATTICE_ARC.itemsize
    return _Lattice(start, final[0], final[1], np.repeat(np.arange(states), degree), np.concatenate(pieces))
