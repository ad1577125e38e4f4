"""Work on several processes: `process_map` for functions, `WorkerPool` for objects that live between calls.

Both return results in the order of the items and run in the calling process with jobs=1. Exceptions of a process are raised
in the caller with the same type and message. A process that dies raises `WorkerDied`. Processes ignore Ctrl-C: the caller
handles it. Processes are spawned, because forking a process that has threads may deadlock. So functions, objects and
arguments must be picklable with jobs > 1, and scripts need `if __name__ == "__main__"`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from roundelay.core.interrupts import block_sigint
from roundelay.errors import RoundelayError
from roundelay.log.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 8
"""Requests per process that may be queued: enough to keep processes busy, few enough to bound memory."""
CLOSE_S = 5.0
"""How long `close` waits for processes to exit before it terminates them."""

_starting = threading.Lock()


class WorkerDied(RoundelayError):
    """A worker process ended without an answer."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} died", where=where, hint="use fewer jobs if memory ran out; jobs=1 shows other causes")


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker process, attached as its cause."""


# -- functions ---------------------------------------------------------------------------------------------------------


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
    """Yield work(item) for every item, in order, and show a progress line.

    `chunk` items travel together. `progress` is a mode of `log.progress.Progress`; `what` and `unit` label the line.
    """
    bar = Progress(what, unit, progress)
    try:
        results = map(work, items) if jobs <= 1 or len(items) <= 1 else _map_chunks(work, items, jobs, chunk)
        for done, result in enumerate(results, 1):
            yield result
            bar.step(done, len(items))
    finally:
        bar.close()


def _map_chunks(work: Callable[[Item], Result], items: Sequence[Item], jobs: int, chunk: int) -> Iterator[Result]:
    chunks = [items[i : i + chunk] for i in range(0, len(items), chunk)]
    queued: deque[Future[list[Any]]] = deque()
    with one_thread_each(), ProcessPoolExecutor(min(jobs, len(chunks)), multiprocessing.get_context("spawn")) as executor:
        try:
            for piece in chunks:
                with block_sigint():
                    queued.append(executor.submit(_run_chunk, work, piece))
                if len(queued) >= AHEAD * jobs:
                    yield from queued.popleft().result()
            while queued:
                yield from queued.popleft().result()
        except BrokenProcessPool:
            raise WorkerDied("a worker process", f"one of {jobs} jobs") from None
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _run_chunk(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [work(item) for item in items]


# -- objects -----------------------------------------------------------------------------------------------------------


class WorkerProcess:
    """One process that keeps one object, `build(*arguments)`, and calls its methods on request.

    The object is built in the process before the first call is answered; an exception of `build` is raised by every call.
    Not thread-safe: one call at a time. Raises what pickling raises if `build` or `arguments` cannot be pickled.
    """

    def __init__(self, build: Callable[..., object], *arguments: Any, what: str = "a worker process") -> None:
        self._what = what
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, build, arguments), daemon=True)
        try:
            with _starting, one_thread_each(), block_sigint():
                self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            remote.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return object.method(*arguments); block until the result arrives."""
        self.send(method, *arguments)
        return self.receive()

    def send(self, method: str, *arguments: Any) -> None:
        """Request a call without waiting. Every `send` needs one `receive` before the next `send`."""
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """Return the result of the last `send`, or raise its exception; block until one of them arrives."""
        try:
            value, error, trace = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if error is not None:
            raise error from WorkerTraceback(trace)
        return value

    def _death(self) -> WorkerDied:
        self._process.join(1.0)
        code = self._process.exitcode
        return WorkerDied(self._what, f"process {self.pid}, " + ("connection closed" if code is None else f"exit code {code}"))

    def request_exit(self) -> None:
        """Close the connection: the process exits after its current call."""
        self._pipe.close()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Request the exit, wait at most `timeout_s`, then terminate the process."""
        self.request_exit()
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(CLOSE_S)


def _serve(pipe: Connection, build: Callable[..., object], arguments: Sequence[Any]) -> None:
    """Answer requests until the connection closes."""
    target: object = None
    failure: Exception | None = None
    try:
        target = build(*arguments)
    except Exception as error:
        failure = error
    while True:
        try:
            method, values = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if failure is not None:
                raise failure
            answer: tuple[Any, Exception | None, str] = (getattr(target, method)(*values), None, "")
        except Exception as error:
            answer = (None, _picklable(error), traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # the caller closed the connection
            return


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class WorkerPool:
    """Objects spread over processes, kept between calls.

    Object n is `build(*arguments[n])`. It lives in process n modulo the number of processes, which is min(jobs, objects);
    with one process the objects live in the caller. A context manager; leaving it by an exception terminates the processes.
    Not thread-safe. After an exception of a method the pool remains usable; after `WorkerDied` it does not.
    """

    def __init__(
        self,
        build: Callable[..., object],
        arguments: Sequence[Sequence[Any]],
        *,
        jobs: int = 1,
        what: str = "a worker process",
    ) -> None:
        self.objects, self.jobs = len(arguments), max(1, min(jobs, len(arguments)))
        self._local = _Objects(build, arguments) if self.jobs == 1 else None
        self._workers: list[WorkerProcess] = []
        try:
            for n in range(self.jobs if self._local is None else 0):
                self._workers.append(WorkerProcess(_Objects, build, arguments[n :: self.jobs], what=what))
        except BaseException:
            self.terminate()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call object.method(*arguments) on every object; return the results in the order of the objects."""
        if self._local is not None:
            return self._local.call_all(method, arguments)
        answers: list[list[Any]] = []
        failure: Exception | None = None
        try:
            for worker in self._workers:
                worker.send("call_all", method, arguments)
            for worker in self._workers:
                try:
                    answers.append(worker.receive())
                except WorkerDied:
                    raise
                except Exception as error:  # the other answers must still be read
                    failure = failure or error
        except BaseException:
            self.terminate()
            raise
        if failure is not None:
            raise failure
        return [answers[n % self.jobs][n // self.jobs] for n in range(self.objects)]

    def map(
        self, method: str, items: Iterable[Sequence[Any]], on_result: Callable[[int], None] = lambda done: None
    ) -> Iterator[Any]:
        """Yield object.method(*item) for every item, in order, on whichever process is free.

        For pools of equal objects: the first object of each process is called. `items` is read at most AHEAD items per process
        in advance. After each result has been consumed, `on_result` gets the number of results so far.
        """
        results = self._map_local(method, items) if self._local is not None else self._map_processes(method, items)
        for done, result in enumerate(results, 1):
            yield result
            on_result(done)

    def _map_local(self, method: str, items: Iterable[Sequence[Any]]) -> Iterator[Any]:
        assert self._local is not None
        for item in items:
            yield self._local.call_first(method, item)

    def _map_processes(self, method: str, items: Iterable[Sequence[Any]]) -> Iterator[Any]:
        idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def run(item: Sequence[Any]) -> Any:
            worker = idle.get()
            try:
                return worker.call("call_first", method, item)
            finally:
                idle.put(worker)

        queued: deque[Future[Any]] = deque()
        executor = ThreadPoolExecutor(self.jobs)
        try:
            for item in items:
                queued.append(executor.submit(run, item))
                if len(queued) >= AHEAD * self.jobs:
                    yield queued.popleft().result()
            while queued:
                yield queued.popleft().result()
        except (KeyboardInterrupt, WorkerDied):
            self.terminate()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Let the processes exit; terminate those that still run after CLOSE_S."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.request_exit()
        deadline = time.monotonic() + CLOSE_S
        for worker in workers:
            worker.close(max(0.0, deadline - time.monotonic()))

    def terminate(self) -> None:
        """End the processes at once."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close(0.0)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.terminate()


class _Objects:
    """The objects of one process of a pool."""

    def __init__(self, build: Callable[..., object], arguments: Sequence[Sequence[Any]]) -> None:
        self._objects = [build(*values) for values in arguments]

    def call_all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return [getattr(target, method)(*arguments) for target in self._objects]

    def call_first(self, method: str, arguments: Sequence[Any]) -> Any:
        return getattr(self._objects[0], method)(*arguments)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Make processes started inside use one thread for matrix products. Changes the environment of this process meanwhile."""
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
