"""Loader processes, for tasks whose batches are computed in Python and would contend for the GIL in threads.

Every loader thread owns one child process with a copy of the task. A child that dies is replaced and the same batch is
requested again. A batch depends only on its indices, so no sample is lost or used twice.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import torch

from roundelay.errors import DataError, RoundelayError, UsageError

MAX_DEATHS = 3
"""Child processes that may die over one batch before an error is raised."""


class Batches(Protocol):
    """The part of a task that loaders use."""

    def batch(self, epoch: int, start: int, stop: int) -> Any: ...


class SampleRange(Protocol):
    """The samples start <= index < stop of an epoch."""

    @property
    def epoch(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class ProcessBatches:
    """Call task.batch(lease.epoch, lease.start, lease.stop) in a child process of the calling thread.

    Returns None for an empty lease. `deaths` counts the children that died.
    """

    def __init__(self, task: Batches, finish: Callable[[Any], Any] = lambda batch: batch) -> None:
        """`finish` is applied to every batch in the calling thread."""
        self._task, self._finish = task, finish
        self._local = threading.local()
        self._children: list[tuple[Any, Connection]] = []
        self._lock = threading.Lock()
        self._closed = False
        self.deaths = 0

    @property
    def ids(self) -> list[int]:
        """Process ids of the children that are alive."""
        with self._lock:
            return [process.pid for process, _ in self._children if process.is_alive()]

    def __call__(self, lease: SampleRange) -> Any:
        if lease.stop <= lease.start:
            return None
        for _ in range(MAX_DEATHS):
            pipe = self._child()
            try:
                pipe.send((lease.epoch, lease.start, lease.stop))
                kind, value = pipe.recv()
            except (EOFError, OSError):
                self._local.child = None
                if self._closed:
                    break
                self.deaths += 1
                continue
            if kind == "error":
                raise DataError(value[0], where=value[1], hint=value[2])
            if kind == "bug":
                raise RoundelayError(f"task.batch failed in a loader process:\n{value}", where=_location(lease))
            return self._finish(as_tensors(value))
        raise DataError(
            f"{MAX_DEATHS} loader processes died while preparing the same batch",
            where=_location(lease),
            hint="if memory is short, lower batch or num_workers, or use loader_kind=thread; see the lines above",
        )

    def _child(self) -> Connection:
        existing: Connection | None = getattr(self._local, "child", None)
        if existing is not None:
            return existing
        context = multiprocessing.get_context("spawn")
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_serve, args=(child_end, self._task), daemon=True)
        with self._lock:
            try:
                process.start()
            except (TypeError, AttributeError, ValueError) as error:
                raise UsageError(
                    f"pickling the task for a loader process failed: {error}",
                    where="loader_kind=process",
                    hint="use loader_kind=thread",
                ) from error
            self._children = [(p, c) for p, c in self._children if p.is_alive()] + [(process, parent_end)]
        child_end.close()
        self._local.child = parent_end
        return parent_end

    def close(self) -> None:
        """Terminate all children."""
        self._closed = True
        with self._lock:
            for process, pipe in self._children:
                process.terminate()
                process.join(5)
                pipe.close()
            self._children = []


def _location(lease: SampleRange) -> str:
    return f"epoch {lease.epoch}, samples {lease.start} to {lease.stop}"


def _serve(pipe: Connection, task: Batches) -> None:
    """Answer requests for batches until the pipe is closed. Runs in the child process."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        answer: tuple[str, Any]
        try:
            answer = "done", as_arrays(task.batch(*request))
        except RoundelayError as error:
            answer = "error", (error.message, error.where, error.hint)
        except Exception:
            answer = "bug", traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            return


def as_arrays(batch: Any) -> Any:
    """Replace tensors by arrays, which are sent by value and need no file descriptors that outlive the child."""
    return map_leaves(batch, torch.Tensor, lambda t: t.numpy())


def as_tensors(batch: Any) -> Any:
    """Replace arrays by tensors."""
    return map_leaves(batch, np.ndarray, torch.from_numpy)


def map_leaves(batch: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all parts of type `kind` in nested tuples, lists and dicts."""
    if isinstance(batch, kind):
        return function(batch)
    if isinstance(batch, tuple | list):
        return type(batch)(map_leaves(part, kind, function) for part in batch)
    if isinstance(batch, dict):
        return {key: map_leaves(part, kind, function) for key, part in batch.items()}
    return batch
