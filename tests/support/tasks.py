"""Tasks for the tests of whole runs: small, slow on demand, and able to stop at a place of the test's choosing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundelay.data.epoch_order import epoch_order

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Dots:
    """Three classes of points; a two-layer comm tells them apart."""

    samples: int = 120
    seed: int = 0
    dropout: float = 0.0
    pause_s: float = 0.0
    """How long every gradient takes at least."""
    trace: str = ""
    """A folder in which every process writes down the samples it computes gradients on."""
    hold_at: int = -1
    """The gradient of this run, counted from 0, at which to wait for the file `go` in the trace folder."""
    hold_rank: int = -1
    """Who waits; -1: everybody."""
    nan_place: int = -1
    """A sample whose features are not numbers."""
    hold_save: int = -1
    """The checkpoint of this run, counted from 0, in the middle of whose writing to wait for ever."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_calls", [0])
        generator = torch.Generator().manual_seed(23)
        x = torch.randn(self.samples, 6, generator=generator)
        y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
        object.__setattr__(self, "_data", (x, y))
        if self.hold_save >= 0:
            self._sabotage_saving()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))

    def batch(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.from_numpy(epoch_order(self.seed, epoch, self.samples)[start:stop])
        x, y = self._data  # type: ignore[attr-defined]
        x = x[places]
        x[places == self.nan_place] = float("nan")
        return x, y[places], places

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, places = batch
        if module.training:
            self._note(places)
            time.sleep(self.pause_s)
        if len(y) == 1:  # batch normalization cannot learn from one sample
            x, y = torch.cat([x, x + 1e-3]), torch.cat([y, y])
        return nn.functional.cross_entropy(module(x), y)

    def evaluate(self, module: nn.Module, part: int, parts: int) -> dict[str, tuple[float, float]]:
        x, y = (t[part::parts] for t in self._data)  # type: ignore[attr-defined]
        wrong = float((module(x).argmax(1) != y).sum())
        return {
            "loss": (float(nn.functional.cross_entropy(module(x), y, reduction="sum")), float(len(y))),
            "error": (wrong, float(len(y))),
        }

    # -- what tests look at ----------------------------------------------------------------------------------------

    def _note(self, places: Tensor) -> None:
        calls: list[int] = self._calls  # type: ignore[attr-defined]
        number, calls[0] = calls[0], calls[0] + 1
        if not self.trace:
            return
        folder, rank = Path(self.trace), int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
        with open(folder / f"samples-{rank}-{os.getpid()}.txt", "a") as file:
            file.write(" ".join(str(int(p)) for p in places) + "\n")
        if number == self.hold_at and self.hold_rank in (-1, rank):
            (folder / f"held-{rank}").write_text(str(os.getpid()))
            wait_for(folder / "go")

    def _sabotage_saving(self) -> None:
        """The checkpoint at that many samples stops for good when its shards are written and it is about to become complete,
        in whichever process completes it."""
        from roundelay.engine import checkpoint

        describe = checkpoint.Checkpoints.describe

        def held(self_: Any, partial: Path, position: int, living: list[int]) -> Any:
            meta = describe(self_, partial, position, living)
            if position == self.hold_save:
                (Path(self.trace) / "saving").write_text(str(os.getpid()))
                wait_for(Path(self.trace) / "never")
            return meta

        checkpoint.Checkpoints.describe = held  # type: ignore[method-assign]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
