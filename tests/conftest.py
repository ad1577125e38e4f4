"""What all tests share: one thread per process, compiled kernels, and processes that never outlive their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import Jobs
from crew import Crew
from hypothesis import HealthCheck, settings

from roundelay.core import kernels

# Timing decides nothing here: a loaded machine may take its time over an example.
settings.register_profile("roundelay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roundelay")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compiles (or loads) the kernels once, here, so that processes started later find them ready."""
    kernels.compile_for(torch.float32)
    kernels.compile_for(torch.float64)


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Processes that outlive a test: starting one takes seconds, and most tests need a tenth of one."""
    made = Crew()
    yield made
    made.stop()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts commands in a folder of their own; whatever still runs at the end of the test is killed."""
    with Jobs(tmp_path) as started:
        yield started
