"""The same work on many items over several processes, results in the order of the items, with a progress line."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from roundelay.core.interrupts import block_sigint
from roundelay.errors import RoundelayError
from roundelay.log.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 8
"""Chunks per process that may wait: enough that nobody idles, few enough that results do not pile up."""


def process_map(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    jobs: int = 1,
    progress: str = "auto",
    chunk: int = 16,
    what: str = "",
    unit: str = "utterances",
) -> Iterator[Result]:
    """work(item) for every item, in order. Both must be picklable with jobs > 1, and scripts need the usual
    `if __name__ == "__main__"`: processes are spawned, since forking a process that has threads may hang."""
    shown = Progress(what, unit, progress)
    try:
        found = map(work, items) if jobs <= 1 or len(items) <= 1 else _spread(work, items, jobs, chunk)
        for done, result in enumerate(found, 1):
            yield result
            shown.step(done, len(items))
    finally:
        shown.close()


def _spread(work: Callable[[Item], Result], items: Sequence[Item], jobs: int, chunk: int) -> Iterator[Result]:
    pieces = [items[i : i + chunk] for i in range(0, len(items), chunk)]
    waiting: deque[Future[list[Any]]] = deque()
    with one_thread_each(), ProcessPoolExecutor(min(jobs, len(pieces)), multiprocessing.get_context("spawn")) as pool:
        try:
            for piece in pieces:
                with block_sigint():
                    waiting.append(pool.submit(_several, work, piece))
                if len(waiting) >= AHEAD * jobs:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise RoundelayError(
                "a working process died", where=f"one of {jobs} jobs", hint="it may have run out of memory: use fewer jobs"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _several(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [work(item) for item in items]


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes started inside do not start a thread per core for every matrix product."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
