"""The private folder of one local job, with the socket of its store.

The launcher creates it and removes it at the end. If the launcher is killed, its learners remove it when they exit; if all of
them are killed, the next launcher of the same user on this machine does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

FOLDER_VARIABLE = "ROUNDELAY_FOLDER"
"""Environment variable with the path of the folder, which the last learner removes if the launcher has died."""
LAUNCHER_VARIABLE = "ROUNDELAY_LAUNCHER"
"""Environment variable with the process id of the launcher."""
PREFIX = "roundelay-"
LOCK = "launcher.lock"
STALE_S = 60.0
MAX_PATH = 70
"""Longest path in which Unix sockets still have room for a name."""


class ScratchFolder:
    """A new folder of mode 700 on the memory file system. Its lock file is locked while its launcher or a learner lives."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=_root())
        self._lock = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def socket(self) -> str:
        return os.path.join(self.path, "store")

    def environment(self) -> dict[str, str]:
        """Return the variables for the learners. Call it in the launcher."""
        return {FOLDER_VARIABLE: self.path, LAUNCHER_VARIABLE: str(os.getpid())}

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _root() -> str | None:
    if os.access("/dev/shm", os.W_OK | os.X_OK):
        return "/dev/shm"
    return None if len(tempfile.gettempdir()) < MAX_PATH else "/tmp"


def remove_if_orphaned() -> None:
    """Remove the folder of this learner's job if its launcher has died. Call it when the learner exits."""
    folder, launcher = os.environ.get(FOLDER_VARIABLE), os.environ.get(LAUNCHER_VARIABLE)
    if folder and launcher and os.getppid() != int(launcher):
        shutil.rmtree(folder, ignore_errors=True)


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
