"""Log of one rank: a file in the run directory, and the terminal for the rank that owns it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PARENT = "roundelay.rank"


class _FileHandler(logging.Handler):
    """Append records to a file. A write error, such as a full disk, ends the log and not the run."""

    def __init__(self, path: Path, timestamp: Callable[[], str]) -> None:
        super().__init__()
        self._file, self._timestamp = open(path, "a", encoding="utf-8"), timestamp  # noqa: SIM115

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            self._file.write(f"{self._timestamp()} {record.getMessage()}\n")
            self._file.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        super().close()


class _LineHandler(logging.Handler):
    """Pass messages to a function that prints a line. A write error, such as a closed pipe, drops the line."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        super().__init__()
        self._write_line = write_line

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._write_line(record.getMessage())


def rank_logger(
    rank: int, file: Path | None, write_line: Callable[[str], None] | None, timestamp: Callable[[], str]
) -> logging.Logger:
    """Return a logger for one rank, at level INFO, that also passes records to handlers of the logger "roundelay.rank".

    It is not registered by name: several ranks of one process, or several runs one after another, do not share handlers.
    Records do not reach the console of `log.configure`: `write_line` does that. Close it with `close_logger`.
    """
    logger = logging.Logger(f"{PARENT}.{rank}", logging.INFO)
    logger.parent = logging.getLogger(PARENT)
    logger.parent.propagate = False
    if file is not None:
        logger.addHandler(_FileHandler(file, timestamp))
    if write_line is not None:
        logger.addHandler(_LineHandler(write_line))
    return logger


def close_logger(logger: logging.Logger) -> None:
    """Close and remove the handlers of a rank's logger."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
