"""`FrameTask` with training batches from an archive. Model, loss and validation are the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roundelay.data.collate import Perturbation
from roundelay.data.examples import Examples
from roundelay.errors import UsageError
from roundelay.recipes.pack import configuration
from roundelay.speech.features import windows
from roundelay.speech.nnet.frame_task import FrameTask, device_of


class PackedTask(FrameTask):
    """`FrameTask` that reads an `archive` packed from the same features and alignments.

    speed   largest relative change of tempo, drawn per example and epoch; 0: none
    noise   standard deviation of noise on the normalized static features; 0: none
    """

    def __init__(self, *, archive: str, speed: float = 0.0, noise: float = 0.0, **options: Any) -> None:
        self._arguments = {"archive": archive, "speed": speed, "noise": noise, **options}
        if not 0 <= speed < 0.5 or not 0 <= noise < 10:
            raise UsageError(
                f"speed must be in [0, 0.5) and noise in [0, 10) (got {speed} and {noise})",
                where="task_options",
                hint="set them to 0 to switch them off",
            )
        self._archive = archive
        self._perturbation = Perturbation(speed, noise)
        super().__init__(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PackedTask, **self._arguments), ()

    def _open_training(self, where: str) -> None:
        self.examples = Examples(self._archive, self.seed, self._perturbation)
        archive = self.examples.archive
        window = self.window if archive.layout.window else 0
        archive.require(configuration(self._features, self._targets), self._targets.num_pdfs, window, self.context)

    @property
    def samples(self) -> int:
        return len(self.examples)

    @property
    def frames_per_sample(self) -> float:
        """Mean number of frames per example that have a target."""
        return self.examples.archive.metadata.counted / len(self.examples)

    def batch(self, epoch: int, start: int, stop: int) -> Any:
        examples = self.examples.batch(epoch, start, stop)
        self._augment([x[:length] for x, length in zip(examples.x, examples.lengths, strict=True)], examples.numbers, epoch)
        x, y = torch.from_numpy(examples.x), torch.from_numpy(examples.y)
        return (x, y) if self.examples.archive.layout.window else (x, y, torch.from_numpy(examples.lengths))

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        if len(batch) == 2:
            return super().loss(module, batch)
        x, y, lengths = batch
        scores = module(x.to(device_of(module)), lengths)
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.to(scores.device).flatten(), ignore_index=windows.IGNORE)
