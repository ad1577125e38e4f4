"""Batches on their way to a GPU: pinned and copied on a stream of their own by the loader, waited for by the learner's stream.

Written after torch's documentation of streams; there was no GPU to run it on. On a CPU nothing happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roundelay.data.process import mapped


@dataclass(frozen=True)
class _Arriving:
    batch: Any
    there: Any


class DeviceTransfer:
    """`send` in the loader's thread, `take` in the learner's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stays = device.type == "cpu"
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Any) -> Any:
        if self._stays or batch is None:
            return batch
        if self._stream is None:
            return mapped(batch, torch.Tensor, lambda t: t.to(self.device))
        with torch.cuda.stream(self._stream):
            there = mapped(batch, torch.Tensor, lambda t: t.pin_memory().to(self.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Arriving(there, event)

    def take(self, batch: Any) -> Any:
        if not isinstance(batch, _Arriving):
            return batch
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(batch.there)
        mapped(
            batch.batch, torch.Tensor, lambda t: t.record_stream(stream)
        )  # its memory is not reused before the gradient ends
        return batch.batch
