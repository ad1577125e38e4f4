"""Cut utterances into training samples: short windows of frames, in an order that depends on seed and epoch only.

Windows do not overlap, as in the published systems (21 frames). The last window of an utterance is shifted back to end with the
utterance. The frames it shares with the window before get the target IGNORE, so that every frame counts once. An utterance
shorter than a window is one window; its last frame is repeated and the repetitions do not count. `context` frames on both sides
of a window do not count either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORE = -100
"""Target of frames that do not count: the default `ignore_index` of torch's cross-entropy."""


class FrameSource(Protocol):
    """Features by utterance."""

    def frames(self, utterance: str) -> int: ...

    def __getitem__(self, utterance: str) -> np.ndarray: ...


class FrameTargets(Protocol):
    """Tied states by utterance."""

    def __getitem__(self, utterance: str) -> np.ndarray: ...


@dataclass(frozen=True)
class WindowIndex:
    """Position of every window: utterance number, first frame, first frame that counts (both within the utterance)."""

    utterance: np.ndarray
    start: np.ndarray
    counts_from: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.start)


def cut(frames: Sequence[int], length: int) -> WindowIndex:
    """Return the windows of utterances, given the number of frames of each utterance."""
    total = np.asarray(frames, np.int64)
    pieces = -(-np.maximum(total, 1) // length)
    utterance = np.repeat(np.arange(len(total)), pieces)
    counts_from = length * (np.arange(len(utterance)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    start = np.maximum(np.minimum(counts_from, total[utterance] - length), 0)
    return WindowIndex(utterance, start, counts_from, length)


def order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """Return the permutation of sample numbers in an epoch, a function of the arguments only."""
    return np.random.default_rng([seed, 0xC0FFEE, epoch]).permutation(samples)


def gather(
    windows: WindowIndex, chosen: np.ndarray, ids: Sequence[str], features: FrameSource, targets: FrameTargets, context: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return features [chosen, context + length + context, dim] and targets [chosen, context + length + context].

    At the ends of an utterance the first or last frame is repeated. `chosen` must not be empty.
    """
    width = windows.length + 2 * context
    x: np.ndarray | None = None
    y = np.full((len(chosen), width), IGNORE, np.int64)
    offsets = np.arange(-context, windows.length + context)
    for row, window in enumerate(chosen):
        id = ids[windows.utterance[window]]
        frames, states = features[id], targets[id]
        if x is None:
            x = np.empty((len(chosen), width, frames.shape[1]), np.float32)
        at = windows.start[window] + offsets
        x[row] = frames[np.clip(at, 0, len(frames) - 1)]
        first = windows.counts_from[window]
        counted = (at >= first) & (at < min(len(frames), windows.start[window] + windows.length))
        y[row, counted] = states[at[counted]]
    assert x is not None, "chosen must not be empty"
    return x, y
