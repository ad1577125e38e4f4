"""Exit codes of commands, closed output, and the signals that stop a run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
from command import ROUNDELAY, Jobs

from roundelay.core.interrupts import StopOnSignals, exit_code_of, install_handlers

LIMIT_S = 60.0

BROKEN_LOSS = """
from tasks import Dots

class Broken(Dots):
    def loss(self, module, batch):
        raise BrokenPipeError(32, "Broken pipe")
"""


def test_a_broken_pipe_inside_a_command_is_an_error() -> None:
    def command() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        exit_code_of(command)


@pytest.mark.dist
def test_a_task_with_a_broken_pipe_does_not_end_with_exit_code_0(jobs: Jobs) -> None:
    (jobs.folder / "broken.py").write_text(BROKEN_LOSS)
    ended = jobs.train("task=broken:Broken", "learners=1", "epochs=1").end(LIMIT_S)
    assert ended.code == 1
    assert "BrokenPipeError" in ended.err
    assert not (jobs.folder / "run" / "model.safetensors").exists()


@pytest.mark.dist
@pytest.mark.parametrize("learners", [1, 2])
def test_a_run_outlives_the_readers_of_its_output(jobs: Jobs, learners: int) -> None:
    """As in `roundelay train … 2>&1 | head -0`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [ROUNDELAY, "train", jobs.task(), "run=run", f"learners={learners}", "epochs=2", "progress=plain"]
    try:
        ended = subprocess.run(command, cwd=jobs.folder, stdout=write_end, stderr=write_end, timeout=LIMIT_S, check=False)
    finally:
        os.close(write_end)
    assert ended.returncode == 0
    assert (jobs.folder / "run" / "model.safetensors").exists()


@pytest.fixture
def sighup() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("sighup")
def test_a_closed_terminal_stops_a_run_as_sigterm_does() -> None:
    def write_line(text: str) -> None:
        raise OSError(5, "Input/output error")

    signal.signal(signal.SIGHUP, lambda *_: None)
    flag = threading.Event()
    with StopOnSignals(flag, write_line):
        signal.raise_signal(signal.SIGHUP)
    assert flag.is_set()
    with pytest.raises(KeyboardInterrupt), install_handlers():
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.usefixtures("sighup")
def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag = threading.Event()
    with install_handlers(), StopOnSignals(flag, print):
        signal.raise_signal(signal.SIGHUP)
    assert not flag.is_set()
