"""The private folder of one local job, with the socket of its store.

The launcher creates it and removes it at the end. If the launcher is killed, a small process removes it as soon as its learners
have exited, too. If that process is killed as well, the next launcher of the same user on this machine does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from roundelay.core.interrupts import block_signals

PREFIX = "roundelay-"
LOCK = "launcher.lock"
STALE_S = 60.0
MAX_PATH = 70
"""Longest path in which Unix sockets still have room for a name."""


class ScratchFolder:
    """A new folder of mode 700 on the memory file system. Its lock file is locked while its launcher or a learner lives.

    Create it before the learners are forked: they inherit the pipe that tells its remover that one of them lives.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=_root())
        self._lock = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        read_end, self._write_end = os.pipe()
        with block_signals():  # they are for the launcher
            self._remover = os.fork()
            if self._remover == 0:
                os.close(self._write_end)
                _remove_at_the_end_of(read_end, self.path)
        os.close(read_end)

    @property
    def socket(self) -> str:
        return os.path.join(self.path, "store")

    def remove(self) -> None:
        """Remove the folder. Call it in the launcher."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.kill(self._remover, signal.SIGKILL)
        os.waitpid(self._remover, 0)
        os.close(self._write_end)
        os.close(self._lock)


def _remove_at_the_end_of(pipe: int, path: str) -> NoReturn:
    """Remove the folder when no process holds the other end of the pipe any more, then exit. For a forked process."""
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.read(pipe, 1)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os._exit(0)


def _root() -> str | None:
    if os.access("/dev/shm", os.W_OK | os.X_OK):
        return "/dev/shm"
    return None if len(tempfile.gettempdir()) < MAX_PATH else "/tmp"


def remove_stale_folders() -> None:
    """Remove the folders of this user's jobs that were killed as a whole: nothing holds their lock."""
    root = Path(_root() or tempfile.gettempdir())
    for path in root.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < STALE_S:
                continue
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)
