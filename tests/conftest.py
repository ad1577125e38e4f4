"""Fixtures of all tests: one thread per process, compiled kernels, and processes that never outlive their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import Jobs
from crew import Crew
from hypothesis import HealthCheck, settings

from roundelay.core import kernels

# No deadline per example: the machine may have other work.
settings.register_profile("roundelay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roundelay")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile or load the kernels once, so that processes started later find them in the cache."""
    kernels.compile_for(torch.float32)
    kernels.compile_for(torch.float64)


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Processes shared by all tests, because starting one takes seconds."""
    processes = Crew()
    yield processes
    processes.stop()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Start commands in a separate folder; kill those that still run at the end of the test."""
    with Jobs(tmp_path) as running:
        yield running
