"""The porter: the one thread of a process that speaks MPI.

Open MPI moves nothing while nobody calls it, and waits by spinning. So one thread makes all calls, tests what is under way
again and again, and sleeps in between: an all-reduce travels while the learner computes, whoever waits for it sleeps on a
lock, and no thread level above MPI_THREAD_SERIALIZED is needed. The sleeps grow with the wait, a tenth of it at a time, up to
a limit: soon after something happened they are short.
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

SHORTEST_S = 20e-6
WAITED_FOR_S = 200e-6
"""The longest sleep while a thread waits for something under way."""
UNWATCHED_S = 1e-3
"""The longest sleep while everybody computes."""


class MpiRequestBatch:
    """Something the porter was asked to do: requests that are posted together; done when all of them are."""

    def __init__(self, post: Callable[[], Sequence[Any]], then: Callable[[], None] | None = None) -> None:
        self.post, self.then = post, then
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self.open: list[Any] = []
        self.left = 0


class MpiProgressThread:
    """Runs errands. Posts are made in the order of `send_out`, as collectives need it."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._new: deque[MpiRequestBatch] = deque()
        self._dropped: deque[MpiRequestBatch] = deque()
        self._bell = threading.Event()
        self._requests: list[Any] = []
        self._owners: list[MpiRequestBatch] = []
        self._waiting = 0
        self._counting = threading.Lock()
        self._quit = False
        self._thread = threading.Thread(target=self._run, name="porter", daemon=True)
        self._thread.start()

    def send_out(self, post: Callable[[], Sequence[Any]], then: Callable[[], None] | None = None) -> MpiRequestBatch:
        """`post` is called by the porter and returns MPI requests; `then`, when all of them are complete."""
        errand = MpiRequestBatch(post, then)
        self._new.append(errand)
        self._bell.set()
        return errand

    def do(self, what: Callable[[], Any]) -> Any:
        """The result of a call that does not wait for anybody else."""
        found: list[Any] = []

        def post() -> Sequence[Any]:
            found.append(what())
            return ()

        errand = self.send_out(post)
        errand.finished.wait()
        if errand.error is not None:
            raise errand.error
        return found[0]

    def wait(self, errand: MpiRequestBatch, seconds: float) -> bool:
        """Whether the errand has ended within that time."""
        if errand.finished.is_set():
            return True
        with self._counting:
            self._waiting += 1
        self._bell.set()  # from a long sleep into short ones
        try:
            return errand.finished.wait(seconds)
        finally:
            with self._counting:
                self._waiting -= 1

    def drop(self, errand: MpiRequestBatch) -> None:
        """Takes back a receive that nobody will answer."""
        self._dropped.append(errand)
        self._bell.set()
        errand.finished.wait(10.0)

    def stop(self) -> None:
        self._quit = True
        self._bell.set()
        self._thread.join(10.0)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        quiet_since = time.perf_counter()
        while not self._quit:
            moved = self._post() | self._test() | self._take_back()
            now = time.perf_counter()
            if moved:
                quiet_since = now
            if self._new or self._dropped:
                continue
            if not self._requests:
                self._bell.wait()
            else:
                limit = WAITED_FOR_S if self._waiting else UNWATCHED_S
                self._bell.wait(min(max((now - quiet_since) / 10, SHORTEST_S), limit))
            self._bell.clear()

    def _post(self) -> bool:
        posted = False
        while self._new:
            errand, posted = self._new.popleft(), True
            try:
                errand.open = list(errand.post())
            except BaseException as error:  # told to whoever waits
                self._end(errand, error)
                continue
            errand.left = len(errand.open)
            self._requests += errand.open
            self._owners += [errand] * errand.left
            if not errand.left:
                self._end(errand)
        return posted

    def _test(self) -> bool:
        if not self._requests:
            return False
        try:
            complete = self._mpi.Request.Testsome(self._requests)
        except BaseException as error:  # of some request; MPI does not let us go on after it
            for errand in dict.fromkeys(self._owners):
                self._end(errand, error)
            self._requests, self._owners = [], []
            return True
        if not complete:
            return False
        ended = []
        for index in complete:
            self._owners[index].left -= 1
            if not self._owners[index].left:
                ended.append(self._owners[index])
        gone = set(complete)
        self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
        self._owners = [o for i, o in enumerate(self._owners) if i not in gone]
        for errand in ended:
            self._end(errand)
        return True

    def _take_back(self) -> bool:
        taken = False
        while self._dropped:
            errand, taken = self._dropped.popleft(), True
            for index in [i for i, owner in enumerate(self._owners) if owner is errand][::-1]:
                request = self._requests.pop(index)
                self._owners.pop(index)
                request.Cancel()
                request.Wait()  # returns at once: what is cancelled is complete
            errand.finished.set()
        return taken

    def _end(self, errand: MpiRequestBatch, error: BaseException | None = None) -> None:
        errand.error = error
        if error is None and errand.then is not None:
            try:
                errand.then()
            except BaseException as mistake:  # told to whoever waits
                errand.error = mistake
        errand.finished.set()


class MpiRuntime:
    """MPI in this process: started once, and ended when the interpreter ends."""

    def __init__(self) -> None:
        self.mpi, self._ours = _start_mpi()
        self.comm = self.mpi.COMM_WORLD
        self.rank, self.size = int(self.comm.rank), int(self.comm.size)
        self.porter = MpiProgressThread(self.mpi)
        self.exit_code = 0
        """Not 0: something went wrong; instead of waiting for the others at the end, all are ended with this code."""
        atexit.register(self._end)

    def _end(self) -> None:
        code = self.exit_code or (1 if getattr(sys, "last_value", None) is not None else 0)
        if self.mpi.Is_finalized():
            return
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            self.porter.send_out(lambda: self.comm.Abort(code)).finished.wait(10.0)  # does not come back
            os._exit(code)
        self.porter.stop()
        if self._ours:
            self.mpi.Finalize()


_world: MpiRuntime | None = None


def mpi_runtime() -> MpiRuntime:
    """This process's world; starts MPI at the first call, which all ranks must make."""
    global _world
    if _world is None:
        _world = MpiRuntime()
    return _world


def abort_mpi(code: int) -> None:
    """This process leaves in the middle of things: at its end MPI is to end the others too, with this exit code."""
    if _world is not None:
        _world.exit_code = _world.exit_code or code


def _start_mpi() -> tuple[Any, bool]:
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, the MPI library is not
        raise UsageError(
            "backend=mpi needs mpi4py and an MPI library",
            where=str(error).splitlines()[0],
            hint="pip install 'roundelay[mpi]', or mpi4py built for your cluster's MPI; or choose another backend=…",
        ) from error
    ours = not MPI.Is_initialized()
    level = MPI.Init_thread(MPI.THREAD_MULTIPLE) if ours else MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise UsageError(
            "this MPI library lets only the main thread call it",
            where=MPI.Get_library_version().splitlines()[0],
            hint="use an MPI library built with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, or another backend=…",
        )
    return MPI, ours
