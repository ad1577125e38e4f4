"""The n best sentences of an utterance, from a lattice.

kaldi-decoder's LatticeSimpleDecoder keeps every path near the best one. Its lattices have a path per alignment, so that the
n best paths are mostly one sentence over and over: the lattice is reduced to words first, keeping the best alignment of each
sentence. Held against exhaustive search the sentences and their scores agree (tests/asr/test_decode.py). It takes four to seven
times as long as the search for the best path, and knows a beam but no limit of active states.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import kaldi_decoder
import kaldifst
import numpy as np

from roundelay.speech.graph.fst import ARC, Arrays, fst_of, header

LATTICE_ARC = np.dtype([("reads", "<i4"), ("writes", "<i4"), ("graph", "<f4"), ("acoustic", "<f4"), ("target", "<i4")])


def best_sentences(fst: Any, scaled: np.ndarray, count: int, beam: float, lattice_beam: float) -> list[tuple[list[int], float]]:
    """Word labels and cost of at most so many sentences, the best first. Some path must lie within the beam."""
    search = kaldi_decoder.LatticeSimpleDecoder(
        fst, kaldi_decoder.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=lattice_beam)
    )
    search.decode(kaldi_decoder.DecodableCtc(scaled))
    some, lattice = search.get_raw_lattice()
    if not some:
        return []
    words = fst_of(_words_only(lattice))
    kaldifst.rmepsilon(words)
    words = kaldifst.determinize(words)
    found = []
    for path in kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(words, count)):
        _, _, labels, cost = kaldifst.get_linear_symbol_sequence(path)
        found.append((labels, float(cost.value)))
    return sorted(found, key=lambda pair: pair[1])


def _words_only(lattice: Any) -> Arrays:
    """An acceptor of words with the sum of both costs, from the file of a lattice: its arcs cannot be visited otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lattice"
        lattice.write(str(path))
        content = path.read_bytes()
    _, _, start, states, _, at = header(content, "a lattice in memory")
    final = np.empty(states, np.float32)
    degree, pieces = np.empty(states, np.int64), []
    for state in range(states):
        graph, acoustic, degree[state] = struct.unpack_from("<ffq", content, at)
        final[state] = graph + acoustic
        pieces.append(np.frombuffer(content, LATTICE_ARC, degree[state], at + 16))
        at += 16 + degree[state] * LATTICE_ARC.itemsize
    found = np.concatenate(pieces)
    arcs = np.empty(len(found), ARC)
    arcs["reads"] = arcs["writes"] = found["writes"]
    arcs["cost"] = found["graph"] + found["acoustic"]
    arcs["target"] = found["target"]
    return Arrays(start, final, np.repeat(np.arange(states), degree), arcs)
