"""The pool's processes under mpirun, for jobs on backend mpi: one mpirun for many small jobs, each on a communicator of its own.

The members call home through a socket in the file system, which they reach from any network namespace of this machine.
"""

from __future__ import annotations

import ctypes
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from roundelay.errors import PeerLost, UsageError
from roundelay.testing.pools import ProcessPool, do_jobs

START_S = 240.0
LEAVE_S = 10.0


def mpirun(size: int, options: Sequence[str] = ()) -> list[str]:
    """The mpirun beside this Python, or the first in the path, for `size` processes on however many cores there are."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("there is no mpirun", where="PATH", hint="pip install 'roundelay[mpi]', or load your cluster's MPI")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [found, *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(size), *options]


class MpiPool(ProcessPool):
    """`size` processes under one mpirun, which gets these `options` too and is started by the command `within`, if any; `bind_address`:
    the address where rank 0 serves the store."""

    def __init__(self, size: int, options: Sequence[str] = (), within: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        super().__init__(size, "mpi")
        self._options, self._within, self._host = options, within, host
        self._job: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MpiPool:
        folder = tempfile.mkdtemp(prefix="roundelay-pool-")
        key = secrets.token_hex(16)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ROUNDELAY_POOL": f"{folder}/door", "ROUNDELAY_POOL_KEY": key}
        env |= {"ROUNDELAY_POOL_HOST": self._host, "PYTHONPATH": os.pathsep.join(sys.path)}  # jobs are found there as here
        command = [*self._within, *mpirun(self.size, self._options), sys.executable, "-m", "roundelay.testing.mpi_pool"]
        try:
            with Listener(f"{folder}/door", "AF_UNIX", backlog=self.size, authkey=key.encode()) as door:
                self._job = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
                self._members = self._welcome(door)
        except BaseException:
            self.stop()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self

    def _welcome(self, door: Listener) -> list[tuple[Any, Connection]]:
        come: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()

        def accept() -> None:
            with suppress(OSError, EOFError):
                for _ in range(self.size):
                    pipe = door.accept()
                    come.put((pipe.recv(), pipe))

        threading.Thread(target=accept, name="door", daemon=True).start()
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + START_S
        assert self._job is not None
        while len(found) < self.size:
            with suppress(queue.Empty):
                rank, pipe = come.get(timeout=0.5)
                found[rank] = pipe
            if self._job.poll() is not None or time.monotonic() > deadline:
                raise PeerLost(f"only {len(found)} of {self.size} processes came", where="mpirun", hint="see its output above")
        return [(self._job, found[rank]) for rank in range(self.size)]

    def stop(self) -> None:
        """Members whose pipe is closed leave by themselves; what does not leave is ended."""
        for _, pipe in self._members:
            pipe.close()
        self._members = []
        job, self._job = self._job, None
        if job is None:
            return
        for end in (lambda: None, job.terminate, job.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                job.wait(LEAVE_S)
                return


def main() -> None:
    """A member."""
    from roundelay.comm.mpi_progress import mpi_runtime
    from roundelay.comm.mpi_store import store_by_mpi

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlives its mpirun
    keep: list[Any] = []
    store, _, _ = store_by_mpi(mpi_runtime(), os.environ["ROUNDELAY_POOL_HOST"], START_S, keep)
    # only now: the door lets in one after another, and those at the door must not wait for each other
    pipe = Client(os.environ["ROUNDELAY_POOL"], "AF_UNIX", authkey=os.environ["ROUNDELAY_POOL_KEY"].encode())
    pipe.send(mpi_runtime().rank)
    do_jobs(pipe, mpi_runtime().rank, os.uname().nodename, store.tcp)


if __name__ == "__main__":
    main()
