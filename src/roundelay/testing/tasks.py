"""Example tasks for training and benchmarks: synthetic speech frames, in memory, the same on every machine.

`SyntheticFrames` is the example task. It trains in seconds on one core and separates good strategies from bad ones.
`SpeechlikeBatches` has the same kind of data and a network of speech size. `Blstm` feeds that network with noise, to measure
speed.

All data are a function of a task's fields. `seed` is the seed of a run: it orders the samples. `world` seeds the data, so
that runs with different seeds stay comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from roundelay.data.epoch_order import epoch_order

Batch = tuple[Tensor, Tensor]
"""Features (chunk, frame, feature) and the class of each frame (chunk, frame)."""

TRAINING, VALIDATION = 1, 2
"""Streams of a `FrameGenerator`."""


@dataclass(frozen=True, kw_only=True)
class FrameGenerator:
    """Generator of frames of a synthetic language: a sequence of phones with three left-to-right states each.

    Pairs of phones share the mean of their middle state, so one frame does not determine its state. A model needs the frames
    before and after it.
    """

    world: int
    phones: int
    features: int
    stay: float
    """Probability that the next frame is in the same state."""
    noise: float
    """Standard deviation of the noise on each feature of each frame."""
    speaker: float
    """Standard deviation of the offset that all frames of one chunk share."""

    def generate(self, chunks: int, frames: int, stream: int) -> Batch:
        """Return features and states of `chunks` chunks, each with its own speaker offset."""
        language_rng = np.random.default_rng([self.world, 0])
        count = 3 * self.phones
        means = language_rng.standard_normal((count, self.features))
        means[4::6] = means[1::6][: len(means[4::6])]
        successors = language_rng.dirichlet(np.full(self.phones, 0.5), size=self.phones).cumsum(axis=1)

        rng = np.random.default_rng([self.world, stream])
        states = np.empty((chunks, frames), dtype=np.int64)
        state = rng.integers(count, size=chunks)
        for t in range(frames):
            states[:, t] = state
            phone = np.minimum((rng.random((chunks, 1)) > successors[state // 3]).sum(axis=1), self.phones - 1)
            successor = np.where(state % 3 == 2, 3 * phone, state + 1)
            state = np.where(rng.random(chunks) < self.stay, state, successor)
        clean = means[states]
        blurred = clean.copy()  # adjacent frames overlap
        blurred[:, 1:] += 0.5 * clean[:, :-1]
        blurred[:, :-1] += 0.5 * clean[:, 1:]
        features = np.tanh(blurred)
        features += self.speaker * rng.standard_normal((chunks, 1, self.features))
        features += self.noise * rng.standard_normal(features.shape)
        return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(states)


@lru_cache(maxsize=8)
def cached_frames(generator: FrameGenerator, chunks: int, frames: int, stream: int) -> Batch:
    """Return the frames of a generator, cached: all task objects of a process share them."""
    return generator.generate(chunks, frames, stream)


class BidirectionalLstm(nn.Module):
    """Bidirectional LSTM layers and a linear output layer."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True, bidirectional=True)
        self.classes = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.lstm(x)[0])


def frame_loss(module: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy, by default its mean per frame."""
    return nn.functional.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


@dataclass(frozen=True, kw_only=True)
class SyntheticFrames:
    """The example task: classify the state of each frame of a chunk."""

    samples: int = 3072
    held_out: int = 1024
    frames: int = 12
    phones: int = 16
    features: int = 16
    hidden: int = 32
    layers: int = 1
    classes: int = 0
    """Outputs of the network; 0: the number of states."""
    stay: float = 0.2
    noise: float = 0.45
    speaker: float = 0.3
    world: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "frames", "phones", "features", "hidden", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1 (got {getattr(self, name)})")

    def _frames(self, chunks: int, stream: int) -> Batch:
        generator = FrameGenerator(
            world=self.world, phones=self.phones, features=self.features, stay=self.stay, noise=self.noise, speaker=self.speaker
        )
        return cached_frames(generator, chunks, self.frames, stream)

    def build(self) -> nn.Module:
        return BidirectionalLstm(self.features, self.hidden, self.layers, self.classes or 3 * self.phones)

    def batch(self, epoch: int, start: int, stop: int) -> Batch:
        x, y = self._frames(self.samples, TRAINING)
        indices = torch.from_numpy(self._order(epoch)[start:stop])
        return x[indices], y[indices]

    def _order(self, epoch: int) -> np.ndarray:
        return cached_epoch_order(self.seed, epoch, self.samples)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return frame_loss(module, batch)

    @torch.no_grad()
    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        """Return sum and count of the validation loss per frame, and of the frames classified correctly."""
        x, y = (t[part::parts] for t in self._frames(self.held_out, VALIDATION))
        loss = correct = 0.0
        for start in range(0, len(y), 256):
            scores = module(x[start : start + 256]).flatten(0, 1)
            targets = y[start : start + 256].flatten()
            loss += float(nn.functional.cross_entropy(scores, targets, reduction="sum"))
            correct += float((scores.argmax(1) == targets).sum())
        frames = float(y.numel())
        return {"loss": (loss, frames), "accuracy": (correct, frames)}


@lru_cache(maxsize=4)
def cached_epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """Return the sample order of an epoch, cached."""
    return epoch_order(seed, epoch, samples)


@dataclass(frozen=True, kw_only=True)
class SpeechlikeBatches(SyntheticFrames):
    """The example task with a network of speech size: 4 million parameters, 21 frames of 140 features."""

    samples: int = 16384
    held_out: int = 128
    frames: int = 21
    phones: int = 64
    features: int = 140
    hidden: int = 256
    layers: int = 2
    classes: int = 3000
    stay: float = 0.6
    noise: float = 0.7


@dataclass(frozen=True, kw_only=True)
class Blstm:
    """The network of `SpeechlikeBatches`, fed with noise from a small pool. It measures speed only."""

    samples: int = 1 << 20
    pool: int = 256

    def build(self) -> nn.Module:
        return BidirectionalLstm(140, 256, 2, 3000)

    def batch(self, epoch: int, start: int, stop: int) -> Batch:
        x, y = noise_pool(self.pool)
        first = start % max(self.pool - (stop - start), 1)
        return x[first : first + stop - start], y[first : first + stop - start]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return frame_loss(module, batch)

    @torch.no_grad()
    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[:16][part::parts] for t in noise_pool(self.pool))
        return {"loss": (float(frame_loss(module, (x, y), "sum")) if len(y) else 0.0, float(y.numel()))}


@lru_cache(maxsize=1)
def noise_pool(size: int) -> Batch:
    """Return `size` chunks of noise with random targets, cached."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 21, 140, generator=generator), torch.randint(0, 3000, (size, 21), generator=generator)
