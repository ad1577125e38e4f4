"""Alignment of reference and hypothesis words by weighted edit distance.

`sclite`: an insertion or deletion costs 3, a substitution 4. Among alignments of equal cost the traceback from the end prefers
a pair of words to an insertion, and an insertion to a deletion. These are sclite's own rules, so counts agree with sclite for
every utterance. (kaldialign has a mode with these costs, but breaks ties differently: on random texts 2 to 8 % of the
utterances then differ from sclite.)
`kaldi`: every error costs 1, as in Kaldi's compute-wer; computed by kaldialign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import kaldialign
import numba
import numpy as np

Costs = Literal["sclite", "kaldi"]

EPSILON_WORD = ""
"""Paired with an inserted or deleted word; no real word is empty."""

PAIR, INSERTION, DELETION = 0, 1, 2


def align(ref: Sequence[str], hyp: Sequence[str], costs: Costs = "sclite") -> list[tuple[str, str]]:
    """Return pairs (reference word, hypothesis word) in order; one of them is EPSILON_WORD for an insertion or deletion."""
    if costs == "kaldi":
        return kaldialign.align(list(ref), list(hyp), EPSILON_WORD)
    numbers: dict[str, int] = {}
    ref_numbers = np.array([numbers.setdefault(word, len(numbers)) for word in ref], np.int32)
    hyp_numbers = np.array([numbers.setdefault(word, len(numbers)) for word in hyp], np.int32)
    pairs, i, j = [], 0, 0
    for step in _steps(ref_numbers, hyp_numbers):
        pairs.append((EPSILON_WORD if step == INSERTION else ref[i], EPSILON_WORD if step == DELETION else hyp[j]))
        i, j = i + (step != INSERTION), j + (step != DELETION)
    return pairs


@numba.njit(cache=True)
def _steps(ref: np.ndarray, hyp: np.ndarray) -> np.ndarray:
    choice = np.zeros((len(ref) + 1, len(hyp) + 1), np.int8)
    choice[1:, 0] = DELETION
    choice[0, 1:] = INSERTION
    above = 3 * np.arange(len(hyp) + 1)
    for i in range(1, len(ref) + 1):
        corner = above[0]
        above[0] = 3 * i
        for j in range(1, len(hyp) + 1):
            pair = corner + (0 if ref[i - 1] == hyp[j - 1] else 4)
            insertion, deletion = above[j - 1] + 3, above[j] + 3
            corner = above[j]
            if pair <= insertion and pair <= deletion:
                above[j] = pair
            elif insertion <= deletion:
                above[j], choice[i, j] = insertion, INSERTION
            else:
                above[j], choice[i, j] = deletion, DELETION
    steps = np.empty(len(ref) + len(hyp), np.int8)
    i, j, count = len(ref), len(hyp), 0
    while i > 0 or j > 0:
        step = choice[i, j]
        steps[count] = step
        count += 1
        i -= step != INSERTION
        j -= step != DELETION
    return steps[:count][::-1].copy()
