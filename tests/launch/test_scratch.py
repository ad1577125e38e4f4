"""The private folder of a local job is removed, if any of its processes is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.launch import scratch

LAUNCHER = """
import os, sys, time
from roundelay.launch.scratch import ScratchFolder, remove_if_orphaned
folder, launcher = ScratchFolder(), str(os.getpid())
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.close(write_end)
    os.environ |= {"ROUNDELAY_FOLDER": folder.path, "ROUNDELAY_LAUNCHER": launcher}
    os.read(read_end, 1)  # until the launcher has died
    if sys.argv[1] == "cleans":
        for _ in range(200):
            remove_if_orphaned()
            time.sleep(0.01)
    os._exit(0)
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
def test_a_learner_removes_the_folder_of_a_killed_launcher() -> None:
    assert not killed_launcher("cleans").exists()


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
