"""Local launcher: one process per learner on this machine.

The parent process serves the job's store and runs no learner, so the failure of a learner does not affect the store. It reports
failed children to the other ranks at once and returns the exit code of the first cause.
"""

from __future__ import annotations

import json
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
from typing import Any, NoReturn, TextIO

import torch

from roundelay.core import kernels
from roundelay.core.files import digest
from roundelay.core.interrupts import block_signals, discard_pending_signals, exit_code_of
from roundelay.errors import Interrupted, PeerLost, UsageError
from roundelay.fleet.heartbeat import HEARTBEAT
from roundelay.fleet.membership import StoreMembership, failed_key
from roundelay.fleet.store import EmbeddedStore, JobStore, connect_store, serve_store, serve_store_locally
from roundelay.fleet.store_client import parse_address
from roundelay.launch.rendezvous import STORE_VARIABLE
from roundelay.launch.scratch import ScratchFolder, remove_stale_folders
from roundelay.launch.signals import Child, SignalQueue, continue_after_parent, exit_after_parent, signal_all

GRACE_S = 9.0
"""Seconds the remaining ranks of a synchronous strategy have to exit after a failure, before they are killed.

The same holds for all strategies while a rank has not started to train: it may wait in a collective for the failed rank, and
once only ranks remain that have failed, have left or are silent.
"""
LOOK_S = 0.5
"""Interval at which the launcher looks whether the remaining ranks live, once a rank has exited."""
STARTED = "started"
"""Key of the store, with the rank behind a slash, that a learner sets when it starts to train."""
MODEL_WRITTEN = "model-written"
"""Key of the store with size and checksum of the model file, set when it has been written and verified."""

logger = logging.getLogger(__name__)


def child_environment(rank: int, size: int, bind_address: str, store: str) -> dict[str, str]:
    """Return torchrun's variables for one local learner, and the address of the store, which the parent serves."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": bind_address,
        "MASTER_PORT": store.rpartition(":")[2] if not store.startswith("unix:") else "0",
        STORE_VARIABLE: store,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def start_learners(
    command: Sequence[str],
    learn: Callable[[], int],
    size: int,
    *,
    bind_address: str,
    port: int,
    run: Path | None,
    survives_failures: bool,
    model: Path | None = None,
) -> int:
    """Run one process per learner with torchrun's variables set; block until all have exited and return the job's exit code.

    Learners are forked from this process, where torch is already imported, and call `learn`. If torch is built for CUDA they
    are started with `command` instead, because CUDA does not survive a fork. The store is on a Unix socket in a private
    folder; with a `port` it is on TCP. SIGINT, SIGTERM and SIGHUP are forwarded to all learners; SIGTSTP and SIGCONT suspend
    and resume the whole job.

    With `survives_failures` the job continues after a rank was killed or raised an unexpected exception. With `model` the exit
    code is 0 only if a learner has published the checksum of this file and the file has it.
    """
    if size < 1:
        raise UsageError(f"learners must be >= 1 (got {size})", where="learners", hint="set learners to at least 1")
    remove_stale_folders()
    scratch = ScratchFolder()
    try:
        return _run_learners(command, learn, size, bind_address, port, run, survives_failures, model, scratch)
    finally:
        scratch.remove()


def _run_learners(
    command: Sequence[str],
    learn: Callable[[], int],
    size: int,
    bind_address: str,
    port: int,
    run: Path | None,
    survives_failures: bool,
    model: Path | None,
    scratch: ScratchFolder,
) -> int:
    # fork before the store starts, so that the children do not inherit its threads and sockets
    fork_server = (
        ForkServer(learn, size, bind_address, run) if torch.version.cuda is None and torch.version.hip is None else None
    )
    children: list[Child] = []
    server: EmbeddedStore | None = None
    store: JobStore | None = None
    with SignalQueue() as signals:
        try:
            server = serve_store(bind_address, port) if port else serve_store_locally(scratch.socket)
            address = f"{bind_address}:{server.port}" if port else f"unix:{scratch.socket}"
            store = JobStore(connect_store(*parse_address(address), 60.0), "job/0/")
            if fork_server is not None and not signals.stopping:
                children += fork_server.release(address)
            for rank in range(size) if fork_server is None else ():
                if signals.stopping:
                    break
                children.append(_start(command, rank, size, bind_address, address, run))
            if signals.stopping and len(children) < size:
                return Interrupted.exit_code
            code = _wait_for_all(children, StoreMembership(store), run, survives_failures, signals)
            return code if code != 0 or model is None else _check_model(store, model)
        finally:
            if fork_server is not None:
                fork_server.close()
            signal_all(children, signal.SIGKILL)
            if store is not None:
                store.close()
            if server is not None:
                server.close()


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


def load_shared_code() -> None:
    """Load what every learner needs first: the machine code of the kernels, and what torch imports for its first optimizer.

    Learners that are forked afterwards share this memory, and none of them spends time on it.
    """
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    kernels.compile_for(torch.float32)


class ForkServer:
    """Fork the learners at once.

    They block on a pipe until the store's address is written; if the pipe closes first, they exit 0.
    """

    ADDRESS = struct.Struct("256s")

    def __init__(self, learn: Callable[[], int], size: int, bind_address: str, run: Path | None) -> None:
        load_shared_code()
        self._read_end, self._write_end = os.pipe()
        self._alive, self._alive_write_end = os.pipe()
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
        os.close(self._alive)

    def release(self, address: str) -> list[ForkedProcess]:
        """Send the store's address to all children, which start to learn."""
        for _ in self.children:
            os.write(self._write_end, self.ADDRESS.pack(address.encode()))
        return self.children

    def close(self) -> None:
        """Close the pipes. Children that have not received an address exit."""
        os.close(self._write_end)
        os.close(self._alive_write_end)

    def _run_child(self, learn: Callable[[], int], rank: int, size: int, bind_address: str, run: Path | None) -> NoReturn:
        """Run a child to its exit. Never returns into the code of the parent."""
        code = 1
        try:
            os.close(self._write_end)
            os.close(self._alive_write_end)
            os.setsid()
            continue_after_parent()
            exit_after_parent(self._alive)
            discard_pending_signals()
            message = os.read(self._read_end, self.ADDRESS.size)
            if not message:
                os._exit(0)
            address = message.rstrip(b"\0").decode()
            Path("/proc/self/comm").write_text(f"learner-{rank}")  # shown by ps and top
            os.environ |= child_environment(rank, size, bind_address, address)
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
    command: Sequence[str], rank: int, size: int, bind_address: str, store: str, run: Path | None
) -> subprocess.Popen[Any]:
    env = {**os.environ, **child_environment(rank, size, bind_address, store)}
    if rank == 0 or run is None:
        return subprocess.Popen(command, env=env, start_new_session=True)
    with _open_log(run, rank) as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def _open_log(run: Path, rank: int) -> TextIO:
    (run / "log").mkdir(parents=True, exist_ok=True)
    return open(_log_path(run, rank), "w")


class _ExitCodes:
    """The exit codes of the learners, and what follows from them for the job."""

    def __init__(self, size: int, membership: StoreMembership, run: Path | None, survives_failures: bool) -> None:
        self.size, self.membership, self.run, self.survives_failures = size, membership, run, survives_failures
        self.codes: dict[int, int] = {}
        self.cause: int | None = None
        self.deadline: float | None = None
        """When the remaining ranks are killed."""
        self._silent_since: float | None = None
        self._looked_at = 0.0

    def add(self, rank: int, code: int) -> None:
        """Note that a rank has exited: report its failure, and set a deadline for the other ranks if they cannot continue."""
        self.codes[rank] = code
        if code == 0:
            return
        if code < 0:
            self.membership.report(rank, f"killed by signal {signal.Signals(-code).name}")
        elif code != Interrupted.exit_code and (self.survives_failures or code != PeerLost.exit_code):
            self.membership.report(rank, f"ended with exit code {code}")
        _log_exit(self.run, rank, code)
        # exit code 1: an exception in one rank; 4: a rank that cannot continue without another, such as one of its machine
        if self.survives_failures and (code < 0 or code in (1, PeerLost.exit_code)):
            if not self._all_started():
                self.deadline = self.deadline or time.monotonic() + GRACE_S
            return
        if self.cause is None or self.cause == PeerLost.exit_code:
            self.cause = PeerLost.exit_code if code < 0 else code
        self.deadline = self.deadline or time.monotonic() + GRACE_S

    def _all_started(self) -> bool:
        """Return whether all ranks that run have started to train."""
        store = self.membership.store
        return all(store.get(f"{STARTED}/{rank}") is not None for rank in range(self.size) if rank not in self.codes)

    def _are_silent(self) -> bool:
        """Return whether all remaining ranks were declared failed, have left or have no heartbeat: they run on without effect.

        There may be no rank left to declare the last ranks failed, so an expired heartbeat counts, too. One store call.
        """
        remaining = [rank for rank in range(self.size) if rank not in self.codes]
        texts = self.membership.store.get_many(
            [key for rank in remaining for key in (failed_key(rank), f"{HEARTBEAT}{rank}", f"{STARTED}/{rank}")]
        )

        def silent(rank: int) -> bool:
            beat = texts[f"{HEARTBEAT}{rank}"]
            expired = beat is None and texts[f"{STARTED}/{rank}"] is not None
            return texts[failed_key(rank)] is not None or expired or (beat is not None and "left" in json.loads(beat))

        return all(silent(rank) for rank in remaining)

    def _look(self) -> None:
        """Note since when the remaining ranks are silent. Looks once per LOOK_S, and only once a rank has exited."""
        now = time.monotonic()
        if self.codes and len(self.codes) < self.size and now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._silent_since = (self._silent_since or now) if self._are_silent() else None

    def expired(self) -> bool:
        """Return whether the remaining ranks must be killed."""
        self._look()
        if self._silent_since is not None and time.monotonic() > self._silent_since + GRACE_S:
            return True
        if self.deadline is None or time.monotonic() <= self.deadline:
            return False
        if self.cause is None and self._all_started():
            self.deadline = None
        return self.deadline is not None

    def result(self) -> int:
        """Return the exit code of the job: that of the first failure, not of its consequences."""
        if self.cause is not None or any(code == 0 for code in self.codes.values()):
            return self.cause or 0
        own = [code for code in self.codes.values() if code > 0 and code != PeerLost.exit_code]
        return own[0] if own else PeerLost.exit_code


def _wait_for_all(
    children: Sequence[Child], membership: StoreMembership, run: Path | None, survives_failures: bool, signals: SignalQueue
) -> int:
    """Wait until all children have exited and return the exit code of the first failure, not of its consequences.

    Training has no time limit. Once a rank has exited, ranks that are silent are killed GRACE_S after the last live one.
    """
    exits = _ExitCodes(len(children), membership, run, survives_failures)
    codes = exits.codes
    stopped: set[int] = set()
    while len(codes) < len(children):
        signals.forward(children)
        for rank, child in enumerate(children):
            if rank not in codes and child.poll() is not None:
                exits.add(rank, child.returncode)
        if exits.expired():
            for rank in sorted(set(range(len(children))) - set(codes) - stopped):
                logger.warning("rank %d did not exit within %.0f s and is killed", rank, GRACE_S)
                stopped.add(rank)
            signal_all(children, signal.SIGKILL)
        time.sleep(0.02)
    if codes[0] != 0 and exits.result() == 0 and run is not None:
        _relay_result(run, min(rank for rank, code in codes.items() if code == 0))
    return exits.result()


def _check_model(store: JobStore, model: Path) -> int:
    """Return 0 if the model file has the size and checksum that a learner has published; else log the error and return 4."""
    note = json.loads(store.get(MODEL_WRITTEN) or "{}")
    if note and model.is_file() and model.stat().st_size == note["bytes"] and digest(model) == note["sha256"]:
        return 0
    problem = "is missing or damaged" if note else "was not written by any learner"
    logger.error("the model %s %s; start again with resume=auto", model, problem)
    return PeerLost.exit_code


def _relay_result(run: Path, rank: int) -> None:
    """Rank 0, which prints the result, has failed: print the last line of another rank's output instead, if there is one."""
    lines: list[str] = []
    with suppress(OSError):  # the run directory may have been removed
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
    lines: list[str] = []
    with suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()[-8:]
    tail = "\n".join(f"  | {line}" for line in lines or ["(no output)"])
    logger.warning("rank %d ended with exit code %d; last lines of %s:\n%s", rank, code, path, tail)
