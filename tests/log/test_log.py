"""Logging set-up: what the command line shows, and what a library user sees."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from roundelay import log


@pytest.fixture
def package() -> Iterator[logging.Logger]:
    """The package's logger, restored after the test."""
    logger = logging.getLogger(log.PACKAGE)
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:], logger.level = handlers, level
    logger.setLevel(level)


def test_configure_prints_information_bare_and_prefixes_warnings(
    package: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure()
    log.configure()  # replaces the first call: no line is printed twice
    child = logging.getLogger(f"{log.PACKAGE}.engine.test")
    child.debug("invisible")
    child.info("started with %d ranks", 2)
    child.warning("rank 1 is lost")
    assert capsys.readouterr().err == "started with 2 ranks\nroundelay: rank 1 is lost\n"


def test_level_warning_hides_information(package: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(logging.WARNING)
    logging.getLogger(f"{log.PACKAGE}.test").info("invisible")
    assert capsys.readouterr().err == ""


def test_without_configure_only_warnings_are_shown() -> None:
    script = (
        "import logging, roundelay.log\n"
        "logger = logging.getLogger('roundelay.engine.test')\n"
        "logger.info('invisible'); logger.warning('visible')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == "visible\n"
