"""Logging set-up of the command line."""

from __future__ import annotations

import logging
import sys

PACKAGE = "roundelay"


class ConsoleHandler(logging.Handler):
    """Write records to stderr, wrapped to the width of the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        from roundelay.log.progress import columns, wrapped

        text = self.format(record)
        text = f"{PACKAGE}: {text}" if record.levelno >= logging.WARNING else text
        print(wrapped(text, columns(sys.stderr)), file=sys.stderr, flush=True)


def configure(level: int = logging.INFO) -> None:
    """Send the records of this package from `level` up to stderr. A second call replaces the first."""
    package = logging.getLogger(PACKAGE)
    for handler in [h for h in package.handlers if isinstance(h, ConsoleHandler)]:
        package.removeHandler(handler)
    package.addHandler(ConsoleHandler(level))
    package.setLevel(min(level, logging.INFO))
