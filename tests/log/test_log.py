"""Logging set-up: what the command line shows, and what a library user sees."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay import log
from roundelay.log.console import print_error
from roundelay.log.progress import say
from roundelay.log.rank_log import close_logger, rank_logger


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


def test_a_rank_whose_terminal_is_gone_logs_to_its_file(tmp_path: Path) -> None:
    def write_line(text: str) -> None:
        raise BrokenPipeError

    logger = rank_logger(0, tmp_path / "rank-000.txt", write_line, lambda: "12:00:00")
    logger.info("resuming")
    close_logger(logger)
    assert (tmp_path / "rank-000.txt").read_text() == "12:00:00 resuming\n"


class Closed(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_messages_without_a_reader_are_dropped(package: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    log.configure()
    monkeypatch.setattr(sys, "stderr", Closed())
    print_error("failed")
    say("stopping")
    logging.getLogger(f"{log.PACKAGE}.test").warning("rank 1 is lost")
