"""Starting learners: alone, as local processes of one command, or where a launcher has put this process.

The starting process serves the job's store and no learner, so any learner may die without taking the store along. It
watches its children: a death is known to the others at once, and the job's exit code is that of its cause.
"""

from __future__ import annotations

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

from roundelay.core.interrupts import exit_code_of
from roundelay.errors import Interrupted, UsageError
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import JobStore, connect_store, serve_store

GRACE_S = 9.0
"""How long survivors of a rendezvous strategy get to leave by themselves."""


def child_environment(rank: int, size: int, bind_address: str, port: int) -> dict[str, str]:
    """torchrun's variables for one local learner; the store is served by the parent."""
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
    """A learner's process, as its parent sees it."""

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
    survives_death: bool,
) -> int:
    """Runs one process per learner with torchrun's variables set; returns the job's exit code.

    Learners are forked from this process, which has imported everything, and call `learn`: starting torch anew takes each of
    them seconds. Where torch is built for CUDA they are started afresh with `command`, since a GPU does not survive a fork.
    """
    if size < 1:
        raise UsageError(f"{size} learners", where="learners", hint="give at least 1")
    # forked before the store is served: its threads and sockets must not be in the children, too
    nest = ForkServer(learn, size, bind_address, run) if torch.version.cuda is None and torch.version.hip is None else None
    children: list[Child] = []
    heard: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        heard.append(number)
        _signal_all(children, number)

    forward = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        server = serve_store(bind_address, port)
        store = JobStore(connect_store(bind_address, server.port, 60.0), "job/0/")
        if nest is not None and not heard:
            children += nest.send_out(server.port)
        for rank in range(size) if nest is None else ():
            if heard:
                break
            children.append(_start(command, rank, size, bind_address, server.port, run))
        if heard and len(children) < size:
            return Interrupted.exit_code
        return _watch(children, StoreMembership(store), run, survives_death)
    finally:
        if nest is not None:
            nest.close()
        _signal_all(children, signal.SIGKILL)
        for number, handler in forward.items():
            signal.signal(number, handler)


class ForkedProcess:
    """A forked learner."""

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
    """Forked learners that wait for the port of the job's store; told none, they leave without a word."""

    PORT = struct.Struct("i")

    def __init__(self, learn: Callable[[], int], size: int, bind_address: str, run: Path | None) -> None:
        self._hear, self._say = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                self._live(learn, rank, size, bind_address, run)
            self.children.append(ForkedProcess(pid))
        os.close(self._hear)

    def send_out(self, port: int) -> list[ForkedProcess]:
        os.write(self._say, self.PORT.pack(port) * len(self.children))
        return self.children

    def close(self) -> None:
        """Whoever has not been told a port goes home."""
        os.close(self._say)

    def _live(self, learn: Callable[[], int], rank: int, size: int, bind_address: str, run: Path | None) -> NoReturn:
        """A child's whole life: it never returns into its parent's code."""
        code = 1
        try:
            os.close(self._say)
            os.setsid()
            told = os.read(self._hear, self.PORT.size)
            if not told:
                os._exit(0)
            Path("/proc/self/comm").write_text(f"learner-{rank}")  # what ps and top show
            os.environ |= child_environment(rank, size, bind_address, *self.PORT.unpack(told))
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
    return open(_log(run, rank), "w")


def _signal_all(children: Sequence[Child], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _watch(children: Sequence[Child], membership: StoreMembership, run: Path | None, survives_death: bool) -> int:
    """Waits for all; the first failure that is not merely the echo of another decides the exit code."""
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
            elif code != 130 and (survives_death or code != 4):
                membership.report(rank, f"ended with exit code {code}")
            _show_log(run, rank, code)
            killed = code < 0
            # 4: one that cannot go on without the dead, such as another member of its machine; the rest can
            if not (survives_death and (killed or code == 4)):
                if cause is None or cause == 4:
                    cause = 4 if killed else code
                deadline = deadline or time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            for rank in sorted(set(range(len(children))) - set(codes) - stopped):
                print(f"roundelay: rank {rank} did not leave by itself and is stopped", file=sys.stderr)
                stopped.add(rank)
            _signal_all(children, signal.SIGKILL)
        time.sleep(0.02)
    if cause is None and all(code != 0 for code in codes.values()):
        return 4
    if codes[0] != 0 and not cause and run is not None:
        _relay_result(run, min(rank for rank, code in codes.items() if code == 0))
    return cause or 0


def _relay_result(run: Path, rank: int) -> None:
    """Rank 0, which speaks to the person, is lost: the run's metrics stand at the end of another one's file."""
    lines = _log(run, rank).read_text(errors="replace").splitlines()
    if lines:
        print(lines[-1], flush=True)


def _log(run: Path, rank: int) -> Path:
    return run / "log" / f"rank-{rank:03d}.out"


def _show_log(run: Path | None, rank: int, code: int) -> None:
    """The last words of a rank whose output went to a file."""
    if rank == 0 or run is None:
        print(f"roundelay: rank {rank} ended with {code}", file=sys.stderr)
        return
    path = _log(run, rank)
    lines = path.read_text(errors="replace").strip().splitlines()[-8:] if path.exists() else []
    print(f"roundelay: rank {rank} ended with {code}; its last lines ({path}):", file=sys.stderr)
    for line in lines or ["(nothing)"]:
        print(f"  | {line}", file=sys.stderr)
