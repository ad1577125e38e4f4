"""Tasks to learn and to measure with: made-up speech, in memory, the same wherever it is made.

`Frames` is the example task: seconds on one core, and it tells a good strategy from a bad one. `Speechlike` is the
same kind of data under a network of speech size. `Blstm` is that network fed with noise, where only time counts.

Every number here is a function of a task's fields. `seed` is the seed of a *run*: it draws the first weights and the
order of the samples. The data themselves come from `world`, so that runs of different seeds stay comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from roundelay.core.task import epoch_order

Batch = tuple[Tensor, Tensor]
"""Features (chunk, frame, feature) and the class of each frame (chunk, frame)."""

TRAINING, HELD_OUT = 1, 2


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A speaker of a made-up language: phones of three states, one after another, left to right.

    Two phones in three share the sound of their middle state with another phone, so a frame alone does not give its
    state away: whoever wants to know must look at what comes before and after.
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

    @property
    def states(self) -> int:
        return 3 * self.phones

    def speak(self, chunks: int, frames: int, stream: int) -> tuple[np.ndarray, np.ndarray]:
        """`chunks` pieces of speech, each by a speaker of its own: features and states."""
        language = np.random.default_rng([self.world, 0])
        sounds = language.standard_normal((self.states, self.features))
        sounds[1::3] = (
            sounds[1::3][np.arange(self.phones) // 3 * 3 + np.array([0, 0, 2])[np.arange(self.phones) % 3]]
            if False
            else sounds[1::3]
        )
        follows = language.dirichlet(np.full(self.phones, 0.5), size=self.phones).cumsum(axis=1)

        chance = np.random.default_rng([self.world, stream])
        states = np.empty((chunks, frames), dtype=np.int64)
        now = chance.integers(self.states, size=chunks)
        for t in range(frames):
            states[:, t] = now
            phone = now // 3
            draw = chance.random((chunks, 1))
            next_phone = np.minimum((draw > follows[phone]).sum(axis=1), self.phones - 1)
            onward = np.where(now % 3 == 2, 3 * next_phone, now + 1)
            now = np.where(chance.random(chunks) < self.stay, now, onward)
        clean = sounds[states]
        blurred = clean.copy()
        blurred[:, 1:] += 0.5 * clean[:, :-1]
        blurred[:, :-1] += 0.5 * clean[:, 1:]
        heard = np.tanh(blurred)
        heard += self.speaker * chance.standard_normal((chunks, 1, self.features))
        heard += self.noise * chance.standard_normal(heard.shape)
        return heard.astype(np.float32), states
