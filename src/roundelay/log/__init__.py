"""Logging set-up of the command line.

Modules log through `logging.getLogger(__name__)`. Without `configure` the rules of the standard library hold: warnings and
errors go to stderr, everything else is dropped.
"""

from __future__ import annotations

import logging
import sys

from roundelay.log.progress import write_line

PACKAGE = "roundelay"


class ConsoleFormatter(logging.Formatter):
    """Format information as bare lines; prefix warnings and errors with the name of the program."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{PACKAGE}: {text}" if record.levelno >= logging.WARNING else text


class ConsoleHandler(logging.Handler):
    """Write records to stderr, wrapped to the width of the terminal.

    `sys.stderr` is looked up for every record: while a live display is drawn, rich replaces it to print lines above the
    display.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self.setFormatter(ConsoleFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record), sys.stderr)
        except Exception:
            self.handleError(record)


def configure(level: int = logging.INFO) -> None:
    """Send the records of this package from `level` up to stderr. A second call replaces the first."""
    package = logging.getLogger(PACKAGE)
    for handler in [h for h in package.handlers if isinstance(h, ConsoleHandler)]:
        package.removeHandler(handler)
    package.addHandler(ConsoleHandler(level))
    package.setLevel(min(level, logging.INFO))
