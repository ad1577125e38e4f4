"""The MPI progress thread: the only thread of a process that calls MPI.

Open MPI makes no progress unless it is called, and waits by spinning. So one thread makes all calls, tests the open requests
again and again, and sleeps in between. Collectives progress while the rank computes, waiting threads sleep on an event, and
MPI_THREAD_SERIALIZED is enough. Each sleep is a tenth of the time since the last progress, up to a limit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from roundelay.errors import UsageError

MIN_SLEEP_S = 20e-6
MAX_SLEEP_WAITING_S = 200e-6
"""The longest sleep while a thread waits for a request."""
MAX_SLEEP_IDLE_S = 1e-3
"""The longest sleep while no thread waits."""


class MpiRequestBatch:
    """MPI requests that are posted together; complete when all of them are."""

    def __init__(self, post: Callable[[], Sequence[Any]], then: Callable[[], None] | None = None) -> None:
        self.post, self.then = post, then
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self.open = 0
        """Requests that are not complete."""


class MpiProgressThread:
    """Posts and tests MPI requests. Requests are posted in the order of `submit`, as collectives require."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._submitted: deque[MpiRequestBatch] = deque()
        self._canceled: deque[MpiRequestBatch] = deque()
        self._wake = threading.Event()
        self._requests: list[Any] = []
        self._owners: list[MpiRequestBatch] = []
        self._waiting_threads = 0
        self._lock = threading.Lock()
        self._quit = False
        self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
        self._thread.start()

    def submit(self, post: Callable[[], Sequence[Any]], then: Callable[[], None] | None = None) -> MpiRequestBatch:
        """Have the progress thread call `post`, which returns MPI requests, and `then` when all of them are complete."""
        batch = MpiRequestBatch(post, then)
        self._submitted.append(batch)
        self._wake.set()
        return batch

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the progress thread and return its result. It must not wait for other ranks."""
        results: list[Any] = []

        def post() -> Sequence[Any]:
            results.append(function())
            return ()

        batch = self.submit(post)
        batch.finished.wait()
        if batch.error is not None:
            raise batch.error
        return results[0]

    def wait(self, batch: MpiRequestBatch, timeout_s: float) -> bool:
        """Block until the batch has finished; return whether it has within `timeout_s`."""
        if batch.finished.is_set():
            return True
        with self._lock:
            self._waiting_threads += 1
        self._wake.set()  # end a long sleep
        try:
            return batch.finished.wait(timeout_s)
        finally:
            with self._lock:
                self._waiting_threads -= 1

    def cancel(self, batch: MpiRequestBatch) -> None:
        """Cancel a receive that will not be matched; block until it is canceled."""
        self._canceled.append(batch)
        self._wake.set()
        batch.finished.wait(10.0)

    def stop(self) -> None:
        self._quit = True
        self._wake.set()
        self._thread.join(10.0)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last_progress = time.perf_counter()
        while not self._quit:
            progress = self._post() | self._test() | self._cancel()
            now = time.perf_counter()
            if progress:
                last_progress = now
            if self._submitted or self._canceled:
                continue
            if not self._requests:
                self._wake.wait()
            else:
                limit = MAX_SLEEP_WAITING_S if self._waiting_threads else MAX_SLEEP_IDLE_S
                self._wake.wait(min(max((now - last_progress) / 10, MIN_SLEEP_S), limit))
            self._wake.clear()

    def _post(self) -> bool:
        posted = False
        while self._submitted:
            batch, posted = self._submitted.popleft(), True
            try:
                requests = list(batch.post())
            except BaseException as error:  # raised by the waiting thread
                self._finish(batch, error)
                continue
            batch.open = len(requests)
            self._requests += requests
            self._owners += [batch] * batch.open
            if not batch.open:
                self._finish(batch)
        return posted

    def _test(self) -> bool:
        if not self._requests:
            return False
        try:
            complete = self._mpi.Request.Testsome(self._requests)
        except BaseException as error:  # of one request; MPI cannot continue after it
            for batch in dict.fromkeys(self._owners):
                self._finish(batch, error)
            self._requests, self._owners = [], []
            return True
        if not complete:
            return False
        finished = []
        for index in complete:
            self._owners[index].open -= 1
            if not self._owners[index].open:
                finished.append(self._owners[index])
        removed = set(complete)
        self._requests = [r for i, r in enumerate(self._requests) if i not in removed]
        self._owners = [o for i, o in enumerate(self._owners) if i not in removed]
        for batch in finished:
            self._finish(batch)
        return True

    def _cancel(self) -> bool:
        canceled = False
        while self._canceled:
            batch, canceled = self._canceled.popleft(), True
            for index in [i for i, owner in enumerate(self._owners) if owner is batch][::-1]:
                request = self._requests.pop(index)
                self._owners.pop(index)
                request.Cancel()
                request.Wait()  # returns at once: a canceled request is complete
            batch.finished.set()
        return canceled

    def _finish(self, batch: MpiRequestBatch, error: BaseException | None = None) -> None:
        batch.error = error
        if error is None and batch.then is not None:
            try:
                batch.then()
            except BaseException as then_error:  # raised by the waiting thread
                batch.error = then_error
        batch.finished.set()


class MpiRuntime:
    """MPI in this process: initialized once, finalized or aborted when the interpreter exits."""

    def __init__(self) -> None:
        self.mpi, self._owns_mpi = _init_mpi()
        self.comm = self.mpi.COMM_WORLD
        self.rank, self.size = int(self.comm.rank), int(self.comm.size)
        self.progress = MpiProgressThread(self.mpi)
        self.exit_code = 0
        """If not 0, the exit of this process aborts all ranks with this code instead of waiting for them."""
        atexit.register(self._exit)

    def _exit(self) -> None:
        code = self.exit_code or (1 if getattr(sys, "last_value", None) is not None else 0)
        if self.mpi.Is_finalized():
            return
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            self.progress.submit(lambda: self.comm.Abort(code)).finished.wait(10.0)  # does not return
            os._exit(code)
        self.progress.stop()
        if self._owns_mpi:
            self.mpi.Finalize()


_runtime: MpiRuntime | None = None


def mpi_runtime() -> MpiRuntime:
    """Return the MPI runtime of this process. The first call initializes MPI; all ranks must make it."""
    global _runtime
    if _runtime is None:
        _runtime = MpiRuntime()
    return _runtime


def abort_mpi(code: int) -> None:
    """Make the exit of this process abort all ranks with this exit code. Does nothing without MPI."""
    if _runtime is not None:
        _runtime.exit_code = _runtime.exit_code or code


def _init_mpi() -> tuple[Any, bool]:
    """Return the MPI module and whether this call has initialized MPI."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is installed, the MPI library is not
        raise UsageError(
            "backend=mpi needs mpi4py and an MPI library",
            where=str(error).splitlines()[0],
            hint="pip install 'roundelay[mpi]', or mpi4py built for your cluster's MPI; or choose another backend=…",
        ) from error
    owns_mpi = not MPI.Is_initialized()
    level = MPI.Init_thread(MPI.THREAD_MULTIPLE) if owns_mpi else MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise UsageError(
            "this MPI library allows only the main thread to call it",
            where=MPI.Get_library_version().splitlines()[0],
            hint="use an MPI library built with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, or another backend=…",
        )
    return MPI, owns_mpi
