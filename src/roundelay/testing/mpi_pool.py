"""A process pool under mpirun, for tests on backend mpi: one mpirun runs many small jobs, each on its own communicator.

The workers connect to the pool through a Unix socket, which they reach from any network namespace of this machine.
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
from roundelay.testing.pools import ProcessPool, run_jobs

START_S = 240.0
EXIT_S = 10.0


def mpirun(size: int, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of mpirun for `size` processes, on any number of cores. Raises UsageError if there is none.

    It prefers the mpirun in the directory of this Python to that in PATH.
    """
    installed = Path(sys.executable).with_name("mpirun")
    program = str(installed) if installed.exists() else shutil.which("mpirun")
    if program is None:
        raise UsageError("mpirun not found", where="PATH", hint="run pip install 'roundelay[mpi]', or load your cluster's MPI")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(size), *options]


class MpiPool(ProcessPool):
    """`size` processes under one mpirun.

    `options`: more options of mpirun. `within`: a command that starts mpirun, for example `ip netns exec`. `bind_address`: the
    address at which rank 0 serves the store.
    """

    def __init__(
        self, size: int, options: Sequence[str] = (), within: Sequence[str] = (), bind_address: str = "127.0.0.1"
    ) -> None:
        super().__init__(size, "mpi")
        self._options, self._within, self._bind_address = options, within, bind_address
        self._job: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MpiPool:
        folder = tempfile.mkdtemp(prefix="roundelay-pool-")
        key = secrets.token_hex(16)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ROUNDELAY_POOL": f"{folder}/socket", "ROUNDELAY_POOL_KEY": key}
        env |= {"ROUNDELAY_POOL_BIND_ADDRESS": self._bind_address}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)  # the workers must import the same jobs
        command = [*self._within, *mpirun(self.size, self._options), sys.executable, "-m", "roundelay.testing.mpi_pool"]
        try:
            with Listener(f"{folder}/socket", "AF_UNIX", backlog=self.size, authkey=key.encode()) as listener:
                self._job = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
                self._members = self._accept(listener)
        except BaseException:
            self.stop()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self

    def _accept(self, listener: Listener) -> list[tuple[Any, Connection]]:
        """Wait until all workers have connected. Raises PeerLost if mpirun exits before, or after START_S."""
        accepted: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()

        def accept() -> None:
            with suppress(OSError, EOFError):
                for _ in range(self.size):
                    pipe = listener.accept()
                    accepted.put((pipe.recv(), pipe))

        threading.Thread(target=accept, name="pool-accept", daemon=True).start()
        pipes: dict[int, Connection] = {}
        deadline = time.monotonic() + START_S
        assert self._job is not None
        while len(pipes) < self.size:
            with suppress(queue.Empty):
                rank, pipe = accepted.get(timeout=0.5)
                pipes[rank] = pipe
            if self._job.poll() is not None or time.monotonic() > deadline:
                raise PeerLost(
                    f"only {len(pipes)} of {self.size} processes connected", where="mpirun", hint="read its output above"
                )
        return [(self._job, pipes[rank]) for rank in range(self.size)]

    def stop(self) -> None:
        """Close the pipes, upon which the workers exit. Terminate, then kill mpirun if they do not exit in time."""
        for _, pipe in self._members:
            pipe.close()
        self._members = []
        job, self._job = self._job, None
        if job is None:
            return
        for end in (lambda: None, job.terminate, job.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                job.wait(EXIT_S)
                return


def main() -> None:
    """Run one worker of the pool, started by mpirun."""
    from roundelay.comm.mpi_progress import mpi_runtime
    from roundelay.comm.mpi_store import store_by_mpi

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: exit with mpirun
    keep: list[Any] = []
    store, _, _ = store_by_mpi(mpi_runtime(), os.environ["ROUNDELAY_POOL_BIND_ADDRESS"], START_S, keep)
    # connect after the collective store setup: the pool accepts one worker at a time, so workers must not wait for each other
    pipe = Client(os.environ["ROUNDELAY_POOL"], "AF_UNIX", authkey=os.environ["ROUNDELAY_POOL_KEY"].encode())
    pipe.send(mpi_runtime().rank)
    run_jobs(pipe, mpi_runtime().rank, os.uname().nodename, store.client)


if __name__ == "__main__":
    main()
