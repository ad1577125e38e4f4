"""The acoustic model as something the engine can train: batches of windows, cross-entropy, whole-utterance validation.

It has the shape of a task of the engine and imports nothing of it. Validation runs over whole utterances, as decoding does, and
reports the mean log-probability per frame of the aligned state (`logprob`), its negative (`loss`) and the share of frames
whose best state is the aligned one (`accuracy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from roundelay.errors import UsageError
from roundelay.speech.features import windows
from roundelay.speech.features.augment import Masks, Warp
from roundelay.speech.features.fbank import SHIFT_S
from roundelay.speech.features.feature_store import ConcatFeatures, FeatureStore, Stream, from_spec
from roundelay.speech.hmm.align import Alignments, matching_utterances
from roundelay.speech.nnet.lstm import AcousticModel, ModelShape, model_folder, preset_shape

VALIDATION_FRAMES = 8_000
"""Frames of a validation batch: small enough for any machine, large enough to be fast."""
MASK_DICE, WARP_DICE = 0x3A5C, 0x7E47
CACHE_FRAMES = 400_000
"""Frames kept ready in memory (120 dimensions: 200 MB); beyond that features are read again when needed."""


class FrameTask:
    """Tied states from features, frame by frame.

    features, alignments   folders written by `roundelay prepare` and `roundelay align` (features may be pasted: "a.scp+b.scp")
    valid_features, valid_alignments   the same of held-out speakers
    spec_augment_freq, spec_augment_time   widest band and longest stretch that is hidden from the network while it learns; 0: none
    warp                   frequencies are stretched by up to this share while it learns, such as 0.1; 0: not
    init_from             a trained model (a folder, or a recipe's run): its layers but the last are where training begins
    model                  a preset; layers, hidden, bottleneck, dropout change it; inputs and outputs follow from the data
    """

    def __init__(
        self,
        features: str,
        alignments: str,
        valid_features: str,
        valid_alignments: str,
        model: str = "small",
        window: int = 21,
        context: int = 0,
        seed: int = 0,
        layers: int | None = None,
        hidden: int | None = None,
        bottleneck: int | None = None,
        dropout: float | None = None,
        spec_augment_freq: int = 0,
        spec_augment_time: int = 0,
        vtlp: float = 0.0,
        init_from: str = "",
        valid_utterances: int = 200,
    ) -> None:
        self.seed, self.window, self.context = seed, window, context
        self._features, self._targets = from_spec(features), Alignments.open(Path(alignments))
        self._valid_features, self._valid_targets = from_spec(valid_features), Alignments.open(Path(valid_alignments))
        self._open_training(features)
        valid = matching_utterances(self._valid_features, self._valid_targets, valid_features)
        self.valid_ids = valid[:: max(1, len(valid) // valid_utterances)][:valid_utterances]
        changes = {"layers": layers, "hidden": hidden, "bottleneck": bottleneck, "dropout": dropout}
        self.shape: ModelShape = preset_shape(
            model,
            inputs=self._features.dim,
            outputs=self._targets.num_pdfs,
            edge=context,
            **{name: value for name, value in changes.items() if value is not None},
        )
        self._start_from = Path(init_from) if init_from else None
        self._masks = self._make_masks(spec_augment_freq, spec_augment_time)
        self._warp = self._make_warp(vtlp)
        self._order: tuple[int, np.ndarray] | None = None
        self._cache: dict[str, np.ndarray] = {}
        self._cached_frames = 0

    def _open_training(self, where: str) -> None:
        self.ids = matching_utterances(self._features, self._targets, where)
        self.windows = windows.cut([self._features.frames(name) for name in self.ids], self.window)

    def _make_masks(self, mels: int, frames: int) -> Masks | None:
        if not mels and not frames:
            return None
        static = getattr(self._features, "static_dim", 0)
        if isinstance(self._features, ConcatFeatures) or not static or not 0 <= mels <= static or frames < 0:
            raise UsageError(
                f"spec_augment_freq = {mels}, spec_augment_time = {frames} do not fit these features",
                where=self._features.name,
                hint=f"give a band of at most {static or 0} mels; pasted streams cannot be masked",
            )
        return Masks(mels, frames, static)

    def _make_warp(self, widest: float) -> Warp | None:
        if not widest:
            return None
        if not isinstance(self._features, FeatureStore) or not 0 < widest < 0.5:
            raise UsageError(
                f"warp = {widest:g} does not fit these features",
                where=self._features.name,
                hint="give a share below 0.5; only log-mels made here can be warped",
            )
        of = self._features.options
        return Warp(widest, int(of["rate"]), int(of["mels"]), float(of["low_hz"]), float(of["high_hz"]))

    @property
    def samples(self) -> int:
        return len(self.windows)

    @property
    def frames_per_sample(self) -> float:
        """On average: windows at the end of an utterance are shorter."""
        return sum(self._features.frames(name) for name in self.ids) / max(self.samples, 1)

    @property
    def seconds_per_sample(self) -> float:
        return self.frames_per_sample * SHIFT_S

    def build(self) -> nn.Module:
        model = AcousticModel(self.shape)
        if self._start_from is not None:
            model.take_layers(model_folder(self._start_from))
        return model

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        order = self._order
        if order is None or order[0] != epoch:
            order = self._order = (epoch, windows.order(self.seed, epoch, self.samples))
        chosen = order[1][start:stop]
        x, y = windows.gather(self.windows, chosen, self.ids, self, self._targets, self.context)
        self._change(x, chosen, epoch)
        return torch.from_numpy(x), torch.from_numpy(y)

    def _change(self, examples: Iterable[np.ndarray], numbers: Iterable[int], epoch: int) -> None:
        """Warps and masks in place, as a function of (seed, epoch, number of the example), whoever trains on it."""
        for change, dice in ((self._warp, WARP_DICE), (self._masks, MASK_DICE)):
            if change is not None:
                for example, number in zip(examples, numbers, strict=True):
                    change.apply(example, np.random.default_rng([self.seed, dice, epoch, int(number)]))

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        scores = module(x.to(device_of(module)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.to(scores.device).flatten(), ignore_index=windows.IGNORE)

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        logprob, right, frames = 0.0, 0, 0
        for features, lengths, targets in self._validation[part::parts]:
            scores = module(features.to(device_of(module)), lengths).log_softmax(-1).cpu()
            counted = targets != windows.IGNORE
            logprob += float(scores.gather(2, targets.clamp_min(0)[..., None])[..., 0][counted].double().sum())
            right += int((scores.argmax(-1) == targets)[counted].sum())
            frames += int(counted.sum())
        return {
            "loss": (-logprob, float(frames)),
            "logprob": (logprob, float(frames)),
            "accuracy": (float(right), float(frames)),
        }

    # -- features, kept ready while there is room --------------------------------------------------------------------

    def frames(self, utterance: str) -> int:
        return self._features.frames(utterance)

    def __getitem__(self, utterance: str) -> np.ndarray:
        found = self._cache.get(utterance)
        if found is None:
            found = self._features[utterance]
            if self._cached_frames + len(found) <= CACHE_FRAMES:
                self._cache[utterance] = found
                self._cached_frames += len(found)
        return found

    @cached_property
    def _validation(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return list(padded_batches(self.valid_ids, self._valid_features, self._valid_targets, self.context))


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def padded_batches(
    ids: Sequence[str], features: Stream, targets: Alignments, edge: int = 0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Whole utterances of similar length side by side, their first and last frame repeated `edge` times."""
    waiting = sorted(ids, key=features.frames, reverse=True)
    while waiting:
        longest = features.frames(waiting[0])
        here = waiting[: max(1, VALIDATION_FRAMES // longest)]
        waiting = waiting[len(here) :]
        x = torch.zeros(len(here), longest + 2 * edge, features.dim)
        y = torch.full((len(here), longest + 2 * edge), windows.IGNORE)
        for row, name in enumerate(here):
            frames = features.frames(name)
            x[row, : frames + 2 * edge] = torch.from_numpy(np.pad(features[name], ((edge, edge), (0, 0)), mode="edge"))
            y[row, edge : edge + frames] = torch.from_numpy(targets[name].astype(np.int64))
        yield x, torch.tensor([features.frames(name) + 2 * edge for name in here]), y
