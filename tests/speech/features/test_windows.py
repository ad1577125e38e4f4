"""Windows of frames: every frame counts once, in an order that depends on seed and epoch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roundelay.speech.features.windows import IGNORE, cut, gather, order


class PositionFeatures:
    """Features that contain utterance and frame number."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def frames(self, utterance: str) -> int:
        return self.lengths[int(utterance)]

    def __getitem__(self, utterance: str) -> np.ndarray:
        number = int(utterance)
        return np.stack([np.full(self.lengths[number], number), np.arange(self.lengths[number])], 1).astype(np.float32)


class PositionTargets(PositionFeatures):
    """Targets that are frame numbers."""

    def __getitem__(self, utterance: str) -> np.ndarray:
        return np.arange(self.lengths[int(utterance)], dtype=np.int32)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 25), st.integers(0, 5))
def test_every_frame_counts_once_with_its_target(lengths: list[int], window: int, context: int) -> None:
    windows = cut(lengths, window)
    ids = [str(n) for n in range(len(lengths))]
    x, y = gather(windows, np.arange(len(windows)), ids, PositionFeatures(lengths), PositionTargets(lengths), context)
    assert x.shape[:2] == y.shape == (len(windows), window + 2 * context)
    counted = y != IGNORE
    seen = sorted(zip(x[counted][:, 0].astype(int).tolist(), y[counted].tolist(), strict=True))
    assert seen == [(u, t) for u, total in enumerate(lengths) for t in range(total)]
    assert (x[counted][:, 1] == y[counted]).all()


@given(st.integers(0, 2**31), st.integers(0, 1000), st.integers(1, 300))
def test_the_order_of_an_epoch_is_a_reproducible_shuffle(seed: int, epoch: int, samples: int) -> None:
    permutation = order(seed, epoch, samples)
    assert sorted(permutation.tolist()) == list(range(samples))
    assert (permutation == order(seed, epoch, samples)).all()
    if samples > 50:
        assert (permutation != order(seed, epoch + 1, samples)).any()
        assert (permutation != order(seed + 1, epoch, samples)).any()
