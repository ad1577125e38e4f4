"""Local launcher: one process per learner on this machine.

The parent process serves the job's store and runs no learner, so the failure of a learner does not affect the store. It reports
failed children to the other ranks at once and returns the exit code of the first cause.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

import torch

from roundelay.core.interrupts import block_signals, discard_pending_signals, exit_code_of
from roundelay.errors import Interrupted, UsageError
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore, connect_store, serve_store

GRACE_S = 9.0
"""Seconds the remaining ranks of a synchronous strategy have to exit after a failure, before they are killed."""

logger = logging.getLogger(__name__)


def child_environment(rank: int, size: int, bind_address: str, port: int) -> dict[str, str]:
    """Return torchrun's variables for one local learner. The parent serves the store."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": bind_address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


class Child(Protocol):
    """The process of a learner: a ForkedProcess or a Popen."""

    returncode: Any

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


def start_learners(
    command: Sequence[str],
    learn: Callable[[], int],
    size: int,
    *,
    bind_address: str,
    port: int,
    run: Path | None,
    survives_failures: bool,
) -> int:
    """Run one process per learner with torchrun's variables set; block until all have exited and return the job's exit code.

    Learners are forked from this process, where torch is already imported, and call `learn`. If torch is built for CUDA they
    are started with `command` instead, because CUDA does not survive a fork. SIGINT and SIGTERM are forwarded to all learners.
    """
    if size < 1:
        raise UsageError(f"learners must be >= 1 (got {size})", where="learners", hint="set learners to at least 1")
    # fork before the store starts, so that the children do not inherit its threads and sockets
    fork_server = (
        ForkServer(learn, size, bind_address, run) if torch.version.cuda is None and torch.version.hip is None else None
    )
    children: list[Child] = []
    signals: list[int] = []

    def forward(number: int, frame: Any) -> None:
        signals.append(number)
        _signal_all(children, number)

    previous = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        server = serve_store(bind_address, port)
        store = JobStore(connect_store(bind_address, server.port, 60.0), "job/0/")
        if fork_server is not None and not signals:
            children += fork_server.release(server.port)
        for rank in range(size) if fork_server is None else ():
            if signals:
                break
            children.append(_start(command, rank, size, bind_address, server.port, run))
        if signals and len(children) < size:
            return Interrupted.exit_code
        return _wait_for_all(children, StoreMembership(store), run, survives_failures)
    finally:
        if fork_server is not None:
            fork_server.close()
        _signal_all(children, signal.SIGKILL)
        for number, handler in previous.items():
            signal.signal(number, handler)


class ForkedProcess:
    """A forked learner, with the interface of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class ForkServer:
    """Fork the learners at once.

    They block on a pipe until the store's port is written; if the pipe closes first, they exit 0.
    """

    PORT = struct.Struct("i")

    def __init__(self, learn: Callable[[], int], size: int, bind_address: str, run: Path | None) -> None:
        self._read_end, self._write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.children = []
        with block_signals():  # Python drops an exception that a signal handler raises in the callbacks of a fork
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    self._run_child(learn, rank, size, bind_address, run)
                self.children.append(ForkedProcess(pid))
        os.close(self._read_end)

    def release(self, port: int) -> list[ForkedProcess]:
        """Send the port to all children, which start to learn."""
        os.write(self._write_end, self.PORT.pack(port) * len(self.children))
        return self.children

    def close(self) -> None:
        """Close the pipe. Children that have not received a port exit."""
        os.close(self._write_end)

    def _run_child(self, learn: Callable[[], int], rank: int, size: int, bind_address: str, run: Path | None) -> NoReturn:
        """Run a child to its exit. Never returns into the code of the parent."""
        code = 1
        try:
            os.close(self._write_end)
            os.setsid()
            discard_pending_signals()
            message = os.read(self._read_end, self.PORT.size)
            if not message:
                os._exit(0)
            Path("/proc/self/comm").write_text(f"learner-{rank}")  # shown by ps and top
            os.environ |= child_environment(rank, size, bind_address, *self.PORT.unpack(message))
            if rank > 0 and run is not None:
                with _open_log(run, rank) as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
            code = exit_code_of(learn)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _start(
    command: Sequence[str], rank: int, size: int, bind_address: str, port: int, run: Path | None
) -> subprocess.Popen[Any]:
    env = {**os.environ, **child_environment(rank, size, bind_address, port)}
    if rank == 0 or run is None:
        return subprocess.Popen(command, env=env, start_new_session=True)
    with _open_log(run, rank) as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def _open_log(run: Path, rank: int) -> TextIO:
    (run / "log").mkdir(parents=True, exist_ok=True)
    return open(_log_path(run, rank), "w")


def _signal_all(children: Sequence[Child], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _wait_for_all(children: Sequence[Child], membership: StoreMembership, run: Path | None, survives_failures: bool) -> int:
    """Wait until all children have exited and return the exit code of the first failure, not of its consequences."""
    codes: dict[int, int] = {}
    deadline: float | None = None
    cause: int | None = None
    stopped: set[int] = set()
    while len(codes) < len(children):
        for rank, child in enumerate(children):
            if rank in codes or child.poll() is None:
                continue
            code = codes[rank] = child.returncode
            if code == 0:
                continue
            if code < 0:
                membership.report(rank, f"killed by signal {signal.Signals(-code).name}")
            elif code != 130 and (survives_failures or code != 4):
                membership.report(rank, f"ended with exit code {code}")
            _log_exit(run, rank, code)
            killed = code < 0
            # exit code 4: a rank that cannot continue without the failed one, such as another rank of its machine
            if not (survives_failures and (killed or code == 4)):
                if cause is None or cause == 4:
                    cause = 4 if killed else code
                deadline = deadline or time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            for rank in sorted(set(range(len(children))) - set(codes) - stopped):
                logger.warning("rank %d did not exit within %.0f s and is killed", rank, GRACE_S)
                stopped.add(rank)
            _signal_all(children, signal.SIGKILL)
        time.sleep(0.02)
    if cause is None and all(code != 0 for code in codes.values()):
        return 4
    if codes[0] != 0 and not cause and run is not None:
        _relay_result(run, min(rank for rank, code in codes.items() if code == 0))
    return cause or 0


def _relay_result(run: Path, rank: int) -> None:
    """Rank 0, which prints the result, has failed: print the last line of another rank's output instead."""
    lines = _log_path(run, rank).read_text(errors="replace").splitlines()
    if lines:
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()


def _log_path(run: Path, rank: int) -> Path:
    return run / "log" / f"rank-{rank:03d}.out"


def _log_exit(run: Path | None, rank: int, code: int) -> None:
    """Log the exit code of a rank, and the last lines of its output if that went to a file."""
    if rank == 0 or run is None:
        logger.warning("rank %d ended with exit code %d", rank, code)
        return
    path = _log_path(run, rank)
    lines = path.read_text(errors="replace").strip().splitlines()[-8:] if path.exists() else []
    tail = "\n".join(f"  | {line}" for line in lines or ["(no output)"])
    logger.warning("rank %d ended with exit code %d; last lines of %s:\n%s", rank, code, path, tail)
