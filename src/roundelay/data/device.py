"""Transfer of batches to the device. On a GPU the loader copies pinned batches on a separate stream; on a CPU nothing happens.

The GPU code follows torch's documentation of streams and is untested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roundelay.data.process import map_leaves


@dataclass(frozen=True)
class _TransferredBatch:
    batch: Any
    event: Any


class DeviceTransfer:
    """Copies batches to a device: call `send` in the loader's thread and `take` in the learner's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cpu = device.type == "cpu"
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Any) -> Any:
        """Start to copy a batch and return a handle for `take`. Does not block on a GPU."""
        if self._is_cpu or batch is None:
            return batch
        if self._stream is None:
            return map_leaves(batch, torch.Tensor, lambda t: t.to(self.device))
        with torch.cuda.stream(self._stream):
            copy = map_leaves(batch, torch.Tensor, lambda t: t.pin_memory().to(self.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._stream)
        return _TransferredBatch(copy, event)

    def take(self, batch: Any) -> Any:
        """Return the batch; later kernels of the current stream wait for the copy."""
        if not isinstance(batch, _TransferredBatch):
            return batch
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(batch.event)
        # keeps the allocator from reusing the memory before the gradient is done
        map_leaves(batch.batch, torch.Tensor, lambda t: t.record_stream(stream))
        return batch.batch
