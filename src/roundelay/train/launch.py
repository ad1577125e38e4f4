"""Starting learners: alone, as local processes of one command, or where a launcher has put this process.

The starting process serves the job's store and no learner, so any learner may die without taking the store along. It
watches its children: a death is known to the others at once, and the job's exit code is that of its cause.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundelay.errors import Interrupted, UsageError
from roundelay.wire.group import Roll
from roundelay.wire.store import JobStore, join, serve

GRACE_S = 9.0
"""How long survivors of a rendezvous strategy get to leave by themselves."""


def child_environment(rank: int, size: int, host: str, port: int) -> dict[str, str]:
    """torchrun's variables for one local learner; the store is served by the parent."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def start_learners(command: Sequence[str], size: int, *, host: str, port: int, run: Path | None, survives_death: bool) -> int:
    """Runs one process per learner with torchrun's variables set; returns the job's exit code."""
    if size < 1:
        raise UsageError(f"{size} learners", where="learners", do="give at least 1")
    server = serve(host, port)
    store = JobStore(join(host, server.port, 60.0), "job/0/")
    children: list[subprocess.Popen[Any]] = []
    heard: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        heard.append(number)
        _signal_all(children, number)

    forward = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(size):
            if heard:
                return Interrupted.exit_code
            children.append(_start(command, rank, size, host, server.port, run))
        return _watch(children, Roll(store), run, survives_death)
    finally:
        _signal_all(children, signal.SIGKILL)
        for number, handler in forward.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], rank: int, size: int, host: str, port: int, run: Path | None) -> subprocess.Popen[Any]:
    log: Any = None
    if rank > 0 and run is not None:
        (run / "log").mkdir(parents=True, exist_ok=True)
        log = open(_log(run, rank), "w")  # noqa: SIM115 - the child keeps it
    try:
        return subprocess.Popen(
            command, env=child_environment(rank, size, host, port), stdout=log, stderr=log, start_new_session=True
        )
    finally:
        if log is not None:
            log.close()


def _signal_all(children: Sequence[subprocess.Popen[Any]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _watch(children: Sequence[subprocess.Popen[Any]], roll: Roll, run: Path | None, survives_death: bool) -> int:
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
                roll.report(rank, f"killed by signal {signal.Signals(-code).name}")
            elif code != 130 and (survives_death or code != 4):
                roll.report(rank, f"ended with exit code {code}")
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
    """Rank 0, which speaks to the person, is lost: the run's figures stand at the end of another one's file."""
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
