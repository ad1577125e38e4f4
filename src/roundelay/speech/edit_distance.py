"""Which word was taken for which: the alignment of what was said with what was heard.

`sclite`: an insertion or deletion costs 3, a substitution 4, and where several alignments cost the same, the one that,
followed from the end, prefers a pair of words to an insertion and that to a deletion. This is sclite's own choice, so the
counts are those it prints, utterance by utterance. (kaldialign has a mode with these costs, yet settles ties otherwise: on
random texts 2 to 8 % of the utterances then differ from sclite.)
`kaldi`: every error costs 1, as in Kaldi's compute-wer; kaldialign does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import kaldialign
import numba
import numpy as np

Costs = Literal["sclite", "kaldi"]

NOTHING = ""
"""The partner of an inserted or deleted word; no word is empty."""

PAIR, INSERTION, DELETION = 0, 1, 2


def align(said: Sequence[str], heard: Sequence[str], costs: Costs = "sclite") -> list[tuple[str, str]]:
    """Pairs of words, in order; NOTHING stands before an inserted word and after a deleted one."""
    if costs == "kaldi":
        return kaldialign.align(list(said), list(heard), NOTHING)
    numbers: dict[str, int] = {}
    one = np.array([numbers.setdefault(word, len(numbers)) for word in said], np.int32)
    other = np.array([numbers.setdefault(word, len(numbers)) for word in heard], np.int32)
    pairs, i, j = [], 0, 0
    for step in _steps(one, other):
        pairs.append((NOTHING if step == INSERTION else said[i], NOTHING if step == DELETION else heard[j]))
        i, j = i + (step != INSERTION), j + (step != DELETION)
    return pairs


@numba.njit(cache=True)
def _steps(said: np.ndarray, heard: np.ndarray) -> np.ndarray:
    choice = np.zeros((len(said) + 1, len(heard) + 1), np.int8)
    choice[1:, 0] = DELETION
    choice[0, 1:] = INSERTION
    above = 3 * np.arange(len(heard) + 1)
    for i in range(1, len(said) + 1):
        corner = above[0]
        above[0] = 3 * i
        for j in range(1, len(heard) + 1):
            pair = corner + (0 if said[i - 1] == heard[j - 1] else 4)
            insertion, deletion = above[j - 1] + 3, above[j] + 3
            corner = above[j]
            if pair <= insertion and pair <= deletion:
                above[j] = pair
            elif insertion <= deletion:
                above[j], choice[i, j] = insertion, INSERTION
            else:
                above[j], choice[i, j] = deletion, DELETION
    steps = np.empty(len(said) + len(heard), np.int8)
    i, j, count = len(said), len(heard), 0
    while i > 0 or j > 0:
        step = choice[i, j]
        steps[count] = step
        count += 1
        i -= step != INSERTION
        j -= step != DELETION
    return steps[:count][::-1].copy()
