"""Exact Viterbi search (no beam) of an utterance through its graph of emitting states, compiled.

States are numbered so that every arc except self-loops leads to a higher number. One array then holds the scores of both the
previous and the current frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from roundelay.errors import DataError

Array = np.ndarray[Any, Any]

# Backpointers take two bytes per frame and state. Longer utterances must be segmented first.
MAX_CELLS = 1_000_000_000

_compiled: Any = numba.njit(nogil=True, cache=True)


@dataclass(frozen=True)
class StateGraph:
    """Emitting states with their incoming arcs; those of state i are `first[i]:first[i + 1]`. All weights are logarithms."""

    first: Array  # int32 [states + 1]
    source: Array  # int32 [arcs], always lower than the state that the arc enters
    weight: Array  # float64 [arcs]
    start: Array  # float64 [states]: -inf where no path begins
    final: Array  # float64 [states]: -inf where no path ends

    @property
    def states(self) -> int:
        return len(self.start)


@_compiled
def _search(scores, column, stay, leave, first, source, weight, start, final, back):  # type: ignore[no-untyped-def]
    frames, states = scores.shape[0], start.size
    far = 2 * frames + 2
    since = np.full(states, far)  # minimum number of frames from a start to the state
    until = np.full(states, far)  # minimum number of frames from the state to an end
    for j in range(states):
        if start[j] > -np.inf:
            since[j] = 0
        for a in range(first[j], first[j + 1]):
            since[j] = min(since[j], since[source[a]] + 1)
    for j in range(states - 1, -1, -1):
        if final[j] > -np.inf:
            until[j] = 0
        for a in range(first[j], first[j + 1]):
            until[source[a]] = min(until[source[a]], until[j] + 1)
    for j in range(states - 2, -1, -1):
        since[j] = min(since[j], since[j + 1])  # minimum over this state and later ones, so that it never decreases
    best = np.empty(states)
    for j in range(states):
        best[j] = start[j] + scores[0, column[j]]
    lowest, highest = 0, 0
    for t in range(1, frames):
        # States above `highest` are not reachable yet; states below `lowest` cannot reach an end any more.
        while highest + 1 < states and since[highest + 1] <= t:
            highest += 1
        previous = lowest
        while lowest < states - 1 and until[lowest] > frames - 1 - t:
            lowest += 1
        for j in range(highest, lowest - 1, -1):
            top = best[j] + stay[j]
            incoming = 0
            for a in range(first[j], first[j + 1]):
                i = source[a]
                value = best[i] + leave[i] + weight[a]
                if value > top:
                    top = value
                    incoming = a - first[j] + 1
            best[j] = top + scores[t, column[j]]
            back[t, j] = incoming
        for j in range(previous, lowest):
            best[j] = -np.inf
    path = np.empty(frames, np.int32)
    score = -np.inf
    state = -1
    for j in range(states):
        value = best[j] + leave[j] + final[j]
        if value > score:
            score = value
            state = j
    if state < 0:
        return score, path
    for t in range(frames - 1, -1, -1):
        path[t] = state
        if t > 0 and back[t, state] > 0:
            state = source[first[state] + back[t, state] - 1]
    return score, path


def best_path(scores: Array, column: Array, self_loop: Array, graph: StateGraph) -> tuple[float, Array]:
    """Return the total log score and the state of each frame; the score is -inf if no path has this length.

    scores: log likelihoods [T, columns]; column[i] is the column of state i, self_loop[i] its self-loop probability.
    Raises DataError if the backpointers would need too much memory.
    """
    frames = len(scores)
    if frames * graph.states > MAX_CELLS:
        raise DataError(
            f"too long to align: {frames} frames, {graph.states} states",
            hint="split the recording into utterances with a segments file",
        )
    back = np.empty((frames, graph.states), np.int16)
    stay, leave = np.log(self_loop, dtype=np.float64), np.log1p(-self_loop, dtype=np.float64)
    arrays = (graph.first, graph.source, graph.weight, graph.start, graph.final)
    score, path = _search(np.ascontiguousarray(scores, np.float32), column.astype(np.int32), stay, leave, *arrays, back)
    return float(score), path
