"""Training samples: utterances cut into short windows of frames, in an order that is a pure function of seed and epoch.

Windows follow each other without overlap, as in the published systems (21 frames). The last one of an utterance is moved
back to end with it, and the frames it shares with the one before do not count twice: their target is IGNORE. An utterance
shorter than a window is one window, its missing frames repeated from the last and not counted. `context` frames on both sides
give the network context; they do not count either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORE = -100
"""torch's cross-entropy leaves these targets out."""


class FrameSource(Protocol):
    """Features by utterance."""

    def frames(self, utterance: str) -> int: ...

    def __getitem__(self, utterance: str) -> np.ndarray: ...


class FrameTargets(Protocol):
    """Tied states by utterance."""

    def __getitem__(self, utterance: str) -> np.ndarray: ...


@dataclass(frozen=True)
class WindowIndex:
    """Where every window lies: utterance number, first frame, first frame that counts (both within the utterance)."""

    utterance: np.ndarray
    start: np.ndarray
    counts_from: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.start)


def cut(frames: Sequence[int], length: int) -> WindowIndex:
    """Windows over utterances of so many frames each."""
    total = np.asarray(frames, np.int64)
    pieces = -(-np.maximum(total, 1) // length)
    utterance = np.repeat(np.arange(len(total)), pieces)
    counts_from = length * (np.arange(len(utterance)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    start = np.maximum(np.minimum(counts_from, total[utterance] - length), 0)
    return WindowIndex(utterance, start, counts_from, length)


def order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """Who comes when in an epoch: drawn from (seed, epoch) alone."""
    return np.random.default_rng([seed, 0xC0FFEE, epoch]).permutation(samples)


def gather(
    windows: WindowIndex, chosen: np.ndarray, ids: Sequence[str], features: FrameSource, targets: FrameTargets, context: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Features [chosen, context + length + context, dim] and targets [chosen, the same] of some windows."""
    width = windows.length + 2 * context
    x: np.ndarray | None = None
    y = np.full((len(chosen), width), IGNORE, np.int64)
    offsets = np.arange(-context, windows.length + context)
    for row, window in enumerate(chosen):
        name = ids[windows.utterance[window]]
        whole, states = features[name], targets[name]
        if x is None:
            x = np.empty((len(chosen), width, whole.shape[1]), np.float32)
        at = windows.start[window] + offsets
        x[row] = whole[np.clip(at, 0, len(whole) - 1)]
        first = windows.counts_from[window]
        counted = (at >= first) & (at < min(len(whole), windows.start[window] + windows.length))
        y[row, counted] = states[at[counted]]
    assert x is not None, "no window was chosen"
    return x, y
