"""Standard output and standard error of commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO


class _Output(io.FileIO):
    """A file descriptor for writing. A write that fails with one of the `ignored` errors drops its data."""

    def __init__(self, descriptor: int, ignored: type[OSError]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._ignored = ignored

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except self._ignored:
            return len(data)


@contextmanager
def surviving_output() -> Iterator[None]:
    """Let the process outlive the readers of its output, such as `head` or a terminal.

    Until exit, results on stdout are dropped once its pipe is closed; other errors, such as a full disk, are raised. Messages
    on stderr are dropped whatever the error is. Streams that something else has replaced, such as a test, are left alone.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _reopen(sys.stdout, BrokenPipeError)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _reopen(sys.stderr, OSError)
    try:
        yield
    finally:
        own, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), before
        for stream in own:
            if stream is not None:
                stream.flush()


def _reopen(stream: TextIO, ignored: type[OSError]) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), ignored)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", True),
    )


def emit(text: str) -> None:
    """Print the result of a command: one table, or one JSON document."""
    print(text, flush=True)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as a Markdown table. Floats get 4 significant digits, None becomes a dash."""

    def cell(x: Any) -> str:
        return "-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows])
