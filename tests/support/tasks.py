"""Tasks for tests of whole runs: small, slow on demand, and able to wait at a chosen gradient."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundelay.data.epoch_order import epoch_order

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Dots:
    """Classify points of three classes with a two-layer network."""

    samples: int = 120
    seed: int = 0
    dropout: float = 0.0
    pause_s: float = 0.0
    """Minimum seconds per gradient."""
    trace: str = ""
    """Folder in which every process records the samples of its gradients."""
    hold_at: int = -1
    """Number of the gradient, from 0, at which to wait for the file `go` in the trace folder."""
    hold_rank: int = -1
    """Rank that waits; -1 for all ranks."""
    nan_sample: int = -1
    """Index of a sample whose features are NaN."""
    hold_save: int = -1
    """Position of the checkpoint that is never completed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_calls", [0])
        generator = torch.Generator().manual_seed(23)
        x = torch.randn(self.samples, 6, generator=generator)
        y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
        object.__setattr__(self, "_data", (x, y))
        if self.hold_save >= 0:
            self._hold_checkpoint()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        samples = torch.from_numpy(epoch_order(self.seed, epoch, self.samples)[start:stop])
        x, y = self._data  # type: ignore[attr-defined]
        x = x[samples]
        x[samples == self.nan_sample] = float("nan")
        return x, y[samples], samples

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, samples = batch
        if module.training:
            self._record(samples)
            time.sleep(self.pause_s)
        if len(y) == 1:  # batch normalization needs two samples
            x, y = torch.cat([x, x + 1e-3]), torch.cat([y, y])
        return nn.functional.cross_entropy(module(x), y)

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[part::parts] for t in self._data)  # type: ignore[attr-defined]
        wrong = float((module(x).argmax(1) != y).sum())
        return {
            "loss": (float(nn.functional.cross_entropy(module(x), y, reduction="sum")), float(len(y))),
            "error": (wrong, float(len(y))),
        }

    # -- records for tests -----------------------------------------------------------------------------------------

    def _record(self, samples: Tensor) -> None:
        calls: list[int] = self._calls  # type: ignore[attr-defined]
        number, calls[0] = calls[0], calls[0] + 1
        if not self.trace:
            return
        folder, rank = Path(self.trace), int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
        with open(folder / f"samples-{rank}-{os.getpid()}.txt", "a") as file:
            file.write(" ".join(str(int(p)) for p in samples) + "\n")
        if number == self.hold_at and self.hold_rank in (-1, rank):
            (folder / f"held-{rank}").write_text(str(os.getpid()))
            wait_for(folder / "go")

    def _hold_checkpoint(self) -> None:
        """Make the process that completes the checkpoint at `hold_save` wait forever when all its shards are written."""
        from roundelay.engine import checkpoint

        write_manifest = checkpoint.Checkpoints.write_manifest

        def hold(self_: Any, partial: Path, position: int, live_ranks: list[int]) -> Any:
            meta = write_manifest(self_, partial, position, live_ranks)
            if position == self.hold_save:
                (Path(self.trace) / "saving").write_text(str(os.getpid()))
                wait_for(Path(self.trace) / "never")
            return meta

        checkpoint.Checkpoints.write_manifest = hold  # type: ignore[method-assign]


def wait_for(path: Path) -> None:
    """Poll until a file exists, for at most TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
