"""The private folder of a local job is removed, if any of its processes is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.core.wait import wait_until
from roundelay.launch import scratch

LAUNCHER = """
import os, signal, sys, time
from roundelay.launch.scratch import ScratchFolder
folder = ScratchFolder()
if os.fork() == 0:
    time.sleep(1)  # a learner that outlives its launcher
    assert os.path.exists(folder.path)
    os._exit(0)
if sys.argv[1] == "dies":
    os.kill(folder._remover, signal.SIGKILL)
print(folder.path, flush=True)
time.sleep(60)
"""


def killed_launcher(child: str) -> Path:
    """Return the folder of a launcher that was killed; its child has exited."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, child], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.stat().st_mode & 0o777 == 0o700
        process.kill()
        process.stdout.read()  # until the child has exited, too
    return path


@pytest.mark.dist
def test_the_folder_of_a_killed_launcher_is_removed_once_its_learners_have_exited() -> None:
    path = killed_launcher("cleans")
    assert wait_until(lambda: not path.exists(), 20.0)


@pytest.mark.dist
def test_the_next_launcher_removes_what_nothing_holds() -> None:
    stale = killed_launcher("dies")
    assert stale.exists()
    scratch.remove_stale_folders()
    assert stale.exists(), "young folders are not touched: their launcher may not hold the lock yet"
    own = scratch.ScratchFolder()
    for folder in (stale, Path(own.path)):
        os.utime(folder / scratch.LOCK, (0, 0))
    scratch.remove_stale_folders()
    assert not stale.exists()
    assert Path(own.path).exists(), "its launcher holds the lock"
    own.remove()
    assert not Path(own.path).exists()
    shutil.rmtree(stale, ignore_errors=True)
