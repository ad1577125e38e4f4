"""Runtime of real jobs: the system's clock, torch's RNG, threads."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from roundelay.data.loader import PrefetchLoader
from roundelay.metrics.events import EventLog

C = TypeVar("C")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class SystemRuntime:
    """Implements `roundelay.core.contracts.Runtime` on the machine this process runs on."""

    clock = staticmethod(time.perf_counter)

    def cpu_s(self) -> float:
        return cpu_seconds()

    def stamp(self) -> str:
        return time.strftime("%H:%M:%S")

    def seed_init(self, number: int) -> None:
        torch.manual_seed(number)

    def seed_rank(self, number: int) -> None:
        torch.manual_seed(number)

    def rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def rng_scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute(self, gradient: Callable[[], float], samples: int, slow: float) -> float:
        if slow <= 1.0:
            return gradient()
        began = time.perf_counter()
        loss = gradient()
        time.sleep((slow - 1.0) * (time.perf_counter() - began))
        return loss

    def prefetch(
        self, leases: Iterable[C], prepare: Callable[[C], Any], samples: Callable[[C], int], loaders: int
    ) -> PrefetchLoader[C]:
        return PrefetchLoader(leases, prepare, workers=loaders)

    def start_periodic(self, poll: Callable[[], None], on_failure: Callable[[], None], every_s: float) -> Callable[[], None]:
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(every_s):
                poll()

        thread = threading.Thread(target=run, name="heartbeat", daemon=True)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(5.0)

        return end

    def events(self, path: Path | None, rank: int) -> EventLog:
        return EventLog(path, rank)

    def owns_terminal(self, rank: int) -> bool:
        return True
