"""Train the acoustic model frame by frame: batches of windows, cross-entropy, validation on whole utterances.

`FrameTask` implements the engine's task protocol and imports nothing from the engine. Validation scores whole utterances, as
decoding does. It reports the mean log probability of the aligned state (`logprob`), its negative (`loss`), and the share of
frames whose most probable state is the aligned one (`accuracy`).
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
from roundelay.speech.features.augment import SpecAugment, Vtlp
from roundelay.speech.features.fbank import SHIFT_S
from roundelay.speech.features.feature_store import ConcatFeatures, FeatureStore, Stream, from_spec
from roundelay.speech.hmm.align import Alignments, matching_utterances
from roundelay.speech.nnet.lstm import AcousticModel, ModelShape, model_folder, preset_shape

VALIDATION_FRAMES = 8_000
"""Frames of a validation batch, including padding."""
SPEC_AUGMENT_STREAM, VTLP_STREAM = 0x3A5C, 0x7E47
"""Words of the seed that make the random numbers of the two augmentations independent."""
CACHE_FRAMES = 400_000
"""Frames kept in memory (200 MB at 120 dimensions). Features beyond this are read again when needed."""


class FrameTask:
    """Predict tied states from features, frame by frame.

    features            features for training: a folder written by `roundelay prepare`, or a specification such as "a.scp+b.scp"
    alignments          tied states for training: a folder written by `roundelay align`
    valid_features      features of the validation set
    valid_alignments    tied states of the validation set
    model               preset; the numbers of inputs and outputs follow from the data
    window              frames of a training sample that count
    context             frames on both sides of a window that do not count
    seed                seed of the sample order and of augmentation
    layers, hidden, bottleneck, dropout   change the preset
    spec_augment_freq   widest masked band in filters (SpecAugment); 0: none
    spec_augment_time   longest masked stretch in frames (SpecAugment); 0: none
    vtlp                largest relative change of frequencies, such as 0.1 (VTLP); 0: none
    init_from           trained model (its folder, or a run directory) whose layers, except the last, initialize the network
    valid_utterances    largest number of validation utterances; they are taken at equal distances
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
            context=context,
            **{name: value for name, value in changes.items() if value is not None},
        )
        self._init_from = Path(init_from) if init_from else None
        self._spec_augment = self._make_spec_augment(spec_augment_freq, spec_augment_time)
        self._vtlp = self._make_vtlp(vtlp)
        self._order: tuple[int, np.ndarray] | None = None
        self._cache: dict[str, np.ndarray] = {}
        self._cached_frames = 0

    def _open_training(self, where: str) -> None:
        """Find the utterances with features and alignments, and cut them into windows. Subclasses may override this."""
        self.ids = matching_utterances(self._features, self._targets, where)
        self.windows = windows.cut([self._features.frames(name) for name in self.ids], self.window)

    def _make_spec_augment(self, freq: int, time: int) -> SpecAugment | None:
        if not freq and not time:
            return None
        static_dim = getattr(self._features, "static_dim", 0)
        if isinstance(self._features, ConcatFeatures) or not static_dim:
            raise UsageError(
                "SpecAugment needs a single feature stream",
                where=self._features.name,
                hint="set spec_augment_freq and spec_augment_time to 0, or do not paste features",
            )
        if not 0 <= freq <= static_dim:
            raise UsageError(f"spec_augment_freq must be between 0 and {static_dim} (got {freq})", where=self._features.name)
        if time < 0:
            raise UsageError(f"spec_augment_time must be at least 0 (got {time})", where=self._features.name)
        return SpecAugment(freq, time, static_dim)

    def _make_vtlp(self, max_warp: float) -> Vtlp | None:
        if not max_warp:
            return None
        if not isinstance(self._features, FeatureStore):
            raise UsageError(
                "VTLP needs log-mel features extracted by roundelay", where=self._features.name, hint="set vtlp to 0"
            )
        if not 0 < max_warp < 0.5:
            raise UsageError(f"vtlp must be at least 0 and below 0.5 (got {max_warp:g})", where=self._features.name)
        options = self._features.options
        return Vtlp(max_warp, int(options["rate"]), int(options["mels"]), float(options["low_hz"]), float(options["high_hz"]))

    @property
    def samples(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self.windows)

    @property
    def frames_per_sample(self) -> float:
        """Return the mean number of frames that count in a sample. The last window of an utterance counts fewer."""
        return sum(self._features.frames(name) for name in self.ids) / max(self.samples, 1)

    @property
    def seconds_per_sample(self) -> float:
        """Return the mean duration of the frames that count in a sample."""
        return self.frames_per_sample * SHIFT_S

    def build(self) -> nn.Module:
        """Build the network, with the layers of `init_from` if it is set."""
        model = AcousticModel(self.shape)
        if self._init_from is not None:
            model.load_pretrained_layers(model_folder(self._init_from))
        return model

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return features and targets of the samples at positions start to stop of an epoch, augmented."""
        order = self._order
        if order is None or order[0] != epoch:
            order = self._order = (epoch, windows.order(self.seed, epoch, self.samples))
        chosen = order[1][start:stop]
        x, y = windows.gather(self.windows, chosen, self.ids, self, self._targets, self.context)
        self._augment(x, chosen, epoch)
        return torch.from_numpy(x), torch.from_numpy(y)

    def _augment(self, examples: Iterable[np.ndarray], numbers: Iterable[int], epoch: int) -> None:
        """Apply VTLP, then SpecAugment, in place. The result depends on seed, epoch and example number, not on the rank."""
        for augmentation, stream in ((self._vtlp, VTLP_STREAM), (self._spec_augment, SPEC_AUGMENT_STREAM)):
            if augmentation is not None:
                for example, number in zip(examples, numbers, strict=True):
                    augmentation.apply(example, np.random.default_rng([self.seed, stream, epoch, int(number)]))

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy of the frames that count."""
        x, y = batch
        scores = module(x.to(device_of(module)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.to(scores.device).flatten(), ignore_index=windows.IGNORE)

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        """Return (sum, frames) of every metric over every `parts`-th validation batch from `part` on."""
        logprob, correct, frames = 0.0, 0, 0
        for features, lengths, targets in self._validation[part::parts]:
            scores = module(features.to(device_of(module)), lengths).log_softmax(-1).cpu()
            counted = targets != windows.IGNORE
            logprob += float(scores.gather(2, targets.clamp_min(0)[..., None])[..., 0][counted].double().sum())
            correct += int((scores.argmax(-1) == targets)[counted].sum())
            frames += int(counted.sum())
        return {
            "loss": (-logprob, float(frames)),
            "logprob": (logprob, float(frames)),
            "accuracy": (float(correct), float(frames)),
        }

    # -- FrameSource of the training features, with a cache ----------------------------------------------------------

    def frames(self, utterance: str) -> int:
        return self._features.frames(utterance)

    def __getitem__(self, utterance: str) -> np.ndarray:
        features = self._cache.get(utterance)
        if features is None:
            features = self._features[utterance]
            if self._cached_frames + len(features) <= CACHE_FRAMES:
                self._cache[utterance] = features
                self._cached_frames += len(features)
        return features

    @cached_property
    def _validation(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return list(padded_batches(self.valid_ids, self._valid_features, self._valid_targets, self.context))


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    return next(module.parameters()).device


def padded_batches(
    ids: Sequence[str], features: Stream, targets: Alignments, context: int = 0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield features, lengths and targets of batches of whole utterances of similar length.

    The first and the last frame of an utterance are repeated `context` times; the repetitions get the target IGNORE.
    """
    remaining = sorted(ids, key=features.frames, reverse=True)
    while remaining:
        longest = features.frames(remaining[0])
        batch = remaining[: max(1, VALIDATION_FRAMES // longest)]
        remaining = remaining[len(batch) :]
        x = torch.zeros(len(batch), longest + 2 * context, features.dim)
        y = torch.full((len(batch), longest + 2 * context), windows.IGNORE)
        for row, name in enumerate(batch):
            frames = features.frames(name)
            x[row, : frames + 2 * context] = torch.from_numpy(np.pad(features[name], ((context, context), (0, 0)), mode="edge"))
            y[row, context : context + frames] = torch.from_numpy(targets[name].astype(np.int64))
        yield x, torch.tensor([features.frames(name) + 2 * context for name in batch]), y
