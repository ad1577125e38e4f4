"""Loaders in processes of their own: for tasks whose batches are made by Python itself, which threads cannot do side by side.

Every loader thread has one child that holds a copy of the task. A child that dies is replaced, and asked for the same piece
again: a batch is a function of its place, so nothing is lost and nothing is trained on twice.
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

LIVES = 3
"""Children that may die over one piece before the piece is given up."""


class Batches(Protocol):
    def batch(self, epoch: int, start: int, stop: int) -> Any: ...


class SampleRange(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class ProcessBatches:
    """prepare(claim) -> task.batch(claim.epoch, claim.start, claim.stop), computed elsewhere. None for an empty claim."""

    def __init__(self, task: Batches, finish: Callable[[Any], Any] = lambda batch: batch) -> None:
        """`finish` is done to a batch in the loader's thread, here."""
        self._task, self._finish = task, finish
        self._own = threading.local()
        self._children: list[tuple[Any, Connection]] = []
        self._lock = threading.Lock()
        self._closed = False
        self.deaths = 0

    @property
    def ids(self) -> list[int]:
        """Process ids of the living children."""
        with self._lock:
            return [process.pid for process, _ in self._children if process.is_alive()]

    def __call__(self, claim: SampleRange) -> Any:
        if claim.stop <= claim.start:
            return None
        for _ in range(LIVES):
            pipe = self._child()
            try:
                pipe.send((claim.epoch, claim.start, claim.stop))
                kind, value = pipe.recv()
            except (EOFError, OSError):
                self._own.child = None
                if self._closed:
                    break
                self.deaths += 1
                continue
            if kind == "error":
                raise DataError(value[0], where=value[1], hint=value[2])
            if kind == "bug":
                raise RoundelayError(
                    f"a loader failed:\n{value}", where=f"epoch {claim.epoch}, places {claim.start} to {claim.stop}"
                )
            return self._finish(as_tensors(value))
        raise DataError(
            f"{LIVES} loader processes died over the same piece of data",
            where=f"epoch {claim.epoch}, places {claim.start} to {claim.stop}",
            hint="too little memory kills processes: lower batch or loaders, or use loader_kind=thread; see also the lines above",
        )

    def _child(self) -> Connection:
        found: Connection | None = getattr(self._own, "child", None)
        if found is not None:
            return found
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._task), daemon=True)
        with self._lock:
            try:
                process.start()
            except (TypeError, AttributeError, ValueError) as error:
                raise UsageError(
                    f"this task cannot be copied into a process: {error}",
                    where="loader_kind=process",
                    hint="use loader_kind=thread",
                ) from error
            self._children = [(p, c) for p, c in self._children if p.is_alive()] + [(process, ours)]
        theirs.close()
        self._own.child = ours
        return ours

    def close(self) -> None:
        self._closed = True
        with self._lock:
            for process, pipe in self._children:
                process.terminate()
                process.join(5)
                pipe.close()
            self._children = []


def _serve(pipe: Connection, task: Batches) -> None:
    """A child: makes batches until nobody asks any more."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        try:
            place = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        answer: tuple[str, Any]
        try:
            answer = "done", as_arrays(task.batch(*place))
        except RoundelayError as error:
            answer = "error", (error.message, error.where, error.hint)
        except Exception:
            answer = "bug", traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            return


def as_arrays(batch: Any) -> Any:
    """Tensors as arrays: they are sent by value, without file descriptors that could outlive a dead child."""
    return mapped(batch, torch.Tensor, lambda t: t.numpy())


def as_tensors(batch: Any) -> Any:
    return mapped(batch, np.ndarray, torch.from_numpy)


def mapped(batch: Any, kind: type, change: Any) -> Any:
    """A batch with every part of a kind changed."""
    if isinstance(batch, kind):
        return change(batch)
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(part, kind, change) for part in batch)
    if isinstance(batch, dict):
        return {key: mapped(part, kind, change) for key, part in batch.items()}
    return batch
