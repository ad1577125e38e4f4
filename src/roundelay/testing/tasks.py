"""Tasks to learn and to measure with: made-up speech, in memory, the same wherever it is made.

`Frames` is the example task: seconds on one core, and it tells a good strategy from a bad one. `Speechlike` is the same kind
of data under a network of speech size. `Blstm` is that network fed with noise, where only time counts.

Every number here is a function of a task's fields. `seed` is that of a run: it orders the samples. The data come from
`world`, so that runs with different seeds stay comparable.
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

TRAINING, HELD_OUT = 1, 2


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A speaker of a made-up language: phones of three states, one after another, left to right.

    Pairs of phones share the sound of their middle state, so a frame alone does not give its state away: whoever wants to
    know must look at what comes before and after.
    """

    world: int
    phones: int
    features: int
    stay: float
    """Probability that the next frame is in the same state."""
    noise: float
    """Standard deviation of what is added to each feature of each frame."""
    speaker: float
    """Standard deviation of the offset that all frames of one chunk share."""

    def speak(self, chunks: int, frames: int, stream: int) -> Batch:
        """`chunks` pieces of speech, each by a speaker of its own: features and states."""
        language = np.random.default_rng([self.world, 0])
        states = 3 * self.phones
        sounds = language.standard_normal((states, self.features))
        sounds[4::6] = sounds[1::6][: len(sounds[4::6])]
        follows = language.dirichlet(np.full(self.phones, 0.5), size=self.phones).cumsum(axis=1)

        chance = np.random.default_rng([self.world, stream])
        spoken = np.empty((chunks, frames), dtype=np.int64)
        now = chance.integers(states, size=chunks)
        for t in range(frames):
            spoken[:, t] = now
            following = np.minimum((chance.random((chunks, 1)) > follows[now // 3]).sum(axis=1), self.phones - 1)
            onward = np.where(now % 3 == 2, 3 * following, now + 1)
            now = np.where(chance.random(chunks) < self.stay, now, onward)
        clean = sounds[spoken]
        blurred = clean.copy()  # neighbouring frames run into each other
        blurred[:, 1:] += 0.5 * clean[:, :-1]
        blurred[:, :-1] += 0.5 * clean[:, 1:]
        heard = np.tanh(blurred)
        heard += self.speaker * chance.standard_normal((chunks, 1, self.features))
        heard += self.noise * chance.standard_normal(heard.shape)
        return torch.from_numpy(heard.astype(np.float32)), torch.from_numpy(spoken)


@lru_cache(maxsize=8)
def spoken(teacher: Teacher, chunks: int, frames: int, stream: int) -> Batch:
    """What a teacher says, kept: every task object of one process shares it."""
    return teacher.speak(chunks, frames, stream)


class Recurrent(nn.Module):
    """Bidirectional LSTM layers and a linear layer over classes."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True, bidirectional=True)
        self.classes = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.lstm(x)[0])


def frame_loss(module: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Cross-entropy per frame."""
    return nn.functional.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


@dataclass(frozen=True, kw_only=True)
class SyntheticFrames:
    """The example task: which state is each frame of a chunk in?"""

    samples: int = 3072
    held_out: int = 1024
    frames: int = 12
    phones: int = 16
    features: int = 16
    hidden: int = 32
    layers: int = 1
    classes: int = 0
    """Outputs of the network; 0: as many as there are states."""
    stay: float = 0.2
    noise: float = 0.45
    speaker: float = 0.3
    world: int = 0
    seed: int = 0

    def _said(self, chunks: int, stream: int) -> Batch:
        teacher = Teacher(
            world=self.world, phones=self.phones, features=self.features, stay=self.stay, noise=self.noise, speaker=self.speaker
        )
        return spoken(teacher, chunks, self.frames, stream)

    def build(self) -> nn.Module:
        return Recurrent(self.features, self.hidden, self.layers, self.classes or 3 * self.phones)

    def batch(self, epoch: int, start: int, stop: int) -> Batch:
        x, y = self._said(self.samples, TRAINING)
        places = torch.from_numpy(self._order(epoch)[start:stop])
        return x[places], y[places]

    def _order(self, epoch: int) -> np.ndarray:
        return kept_order(self.seed, epoch, self.samples)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return frame_loss(module, batch)

    @torch.no_grad()
    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        """loss: mean cross-entropy per held-out frame; accuracy: share of frames whose state is found."""
        x, y = (t[part::parts] for t in self._said(self.held_out, HELD_OUT))
        loss = right = 0.0
        for at in range(0, len(y), 256):
            scores = module(x[at : at + 256]).flatten(0, 1)
            wanted = y[at : at + 256].flatten()
            loss += float(nn.functional.cross_entropy(scores, wanted, reduction="sum"))
            right += float((scores.argmax(1) == wanted).sum())
        frames = float(y.numel())
        return {"loss": (loss, frames), "accuracy": (right, frames)}


@lru_cache(maxsize=4)
def kept_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    return epoch_order(seed, epoch, samples)


@dataclass(frozen=True, kw_only=True)
class SpeechlikeBatches(SyntheticFrames):
    """The example task under a network of speech size: 4 million parameters, 21 frames of 140 features."""

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
    """The network of `Speechlike` fed with noise from a small pool: only its speed is of interest."""

    samples: int = 1 << 20
    pool: int = 256

    def build(self) -> nn.Module:
        return Recurrent(140, 256, 2, 3000)

    def batch(self, epoch: int, start: int, stop: int) -> Batch:
        x, y = noise_pool(self.pool)
        at = start % max(self.pool - (stop - start), 1)
        return x[at : at + stop - start], y[at : at + stop - start]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return frame_loss(module, batch)

    @torch.no_grad()
    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[:16][part::parts] for t in noise_pool(self.pool))
        return {"loss": (float(frame_loss(module, (x, y), "sum")) if len(y) else 0.0, float(y.numel()))}


@lru_cache(maxsize=1)
def noise_pool(size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 21, 140, generator=generator), torch.randint(0, 3000, (size, 21), generator=generator)
