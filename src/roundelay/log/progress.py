"""Progress bars for stages that take long, in one of four modes.

rich    a terminal that can move its cursor: a bar with percentage, count, rate and remaining time
plain   a file, a pipe or TERM=dumb: the same numbers as one line per minute
none    no output
auto    rich or plain, depending on the stream; NO_COLOR disables colors, and lines fit the terminal
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from contextlib import suppress
from typing import Any

PLAIN_EVERY_S = 60.0
LIVE_EVERY_S = 0.25
NARROW = 76
"""Width in columns below which the bar is left out."""


def select_mode(mode: str, stream: Any) -> str:
    """Return rich, plain or none; auto selects rich or plain by the stream."""
    if mode != "auto":
        return mode
    return "rich" if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown") else "plain"


def terminal_width(stream: Any) -> int:
    """Return the columns of a terminal, or 0 if the stream is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def make_console(stream: Any) -> Any:
    """Create a rich console with the width of the terminal. NO_COLOR disables its colors."""
    from rich.console import Console

    width = terminal_width(stream) or None
    if os.environ.get("NO_COLOR"):
        return Console(file=stream, width=width, color_system=None, force_terminal=True, highlight=False)
    return Console(file=stream, width=width, force_terminal=True, highlight=False)


def wrap(text: str, width: int) -> str:
    """Wrap every line at `width` columns and indent the continuations. Width 0 leaves the text unchanged."""
    if width <= 0:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent + "  " * bool(indent.strip() or line), break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def write_line(text: str, stream: Any) -> None:
    """Print a message to a stream, wrapped to the width of the terminal. Does not raise if the stream cannot be written."""
    with suppress(OSError):
        print(wrap(text, terminal_width(stream)), file=stream, flush=True)


def say(text: str) -> None:
    """Print text on stderr, wrapped to the width of the terminal."""
    write_line(text, sys.stderr)


def format_duration(seconds: float) -> str:
    """Format seconds as 0:07, 12:30 or 3:02:11; a dash if they are negative or infinite."""
    if not math.isfinite(seconds) or seconds < 0:
        return "–"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(value: float) -> str:
    """Format a rate with few digits, such as 1,234 or 12 or 0.31."""
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


class ProgressRate:
    """Estimate the rate and the remaining time of a stage from its first and its latest count."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self.done = self.total = 0
        self._now = 0.0

    def update(self, done: int, total: int, now: float) -> None:
        """Set the latest count. The first call also starts the clock, so a resumed run need not start at 0."""
        if self._first is None:
            self._first = (done, now)
        self.done, self.total, self._now = done, total, now

    @property
    def rate(self) -> float:
        """Items per second since the first update."""
        if self._first is None or self._now <= self._first[1]:
            return 0.0
        return (self.done - self._first[0]) / (self._now - self._first[1])

    @property
    def eta_s(self) -> float:
        """Remaining seconds; infinite as long as the rate is 0."""
        return (self.total - self.done) / self.rate if self.rate > 0 else math.inf

    @property
    def fraction(self) -> float:
        return self.done / max(self.total, 1)


class Progress:
    """Progress of one stage.

    with Progress("features", "utterances") as progress:
        progress.step(done, total)
    """

    def __init__(self, description: str = "", unit: str = "", mode: str = "auto", stream: Any = None) -> None:
        self.description, self.unit = description, unit
        self._stream = stream or sys.stderr
        self.mode = select_mode(mode, self._stream)
        self._display: Any = None
        self._task: Any = None
        self._rate = ProgressRate()
        self._rate.update(0, 0, time.monotonic())
        self._updated = time.monotonic() - (LIVE_EVERY_S if self.mode == "rich" else 0.0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self.mode == "none":
            return
        if self._display is not None:
            self._display.console.print(text, markup=False)
        else:
            write_line(text, self._stream)

    def step(self, done: int, total: int, note: str = "") -> None:
        """Set the number of finished items. Most calls only read the clock, so call it for every item."""
        now = time.monotonic()
        if self.mode == "none" or now - self._updated < (LIVE_EVERY_S if self.mode == "rich" else PLAIN_EVERY_S):
            return
        self._updated = now
        self._rate.update(done, total, now)
        if self.mode == "rich":
            self._refresh(note)
        else:
            self.line(f"{self.description}: {100 * self._rate.fraction:.0f} %, " + self._status(note))

    def _status(self, note: str) -> str:
        rate = self._rate
        count = f"{rate.done:,} of {rate.total:,} {self.unit}".rstrip()
        status = f"{count}, {format_rate(rate.rate)}/s, {format_duration(rate.eta_s)} left"
        return f"{status}, {note}" if note else status

    def _refresh(self, note: str) -> None:
        values: dict[str, Any] = {"completed": self._rate.done, "total": self._rate.total, "status": self._status(note)}
        if self._display is None:
            self._display = self._make_display()
            self._task = self._display.add_task(self.description, **values)
            self._display.start()
        self._display.update(self._task, **values, refresh=True)

    def _make_display(self) -> Any:
        """Create the rich progress display. Only the status may be cut off on a narrow terminal."""
        from rich import progress
        from rich.table import Column

        console = make_console(self._stream)
        width = min(len(self.description), max(console.width - 10, 1))
        name, percentage = Column(no_wrap=True, min_width=width), Column(no_wrap=True, min_width=5)
        columns: list[Any] = [progress.TextColumn("{task.description}", style="bold", markup=False, table_column=name)]
        if console.width >= NARROW:
            columns.append(progress.BarColumn(bar_width=20))
        columns.append(progress.TextColumn("{task.percentage:3.0f} %", style="cyan", markup=False, table_column=percentage))
        status = Column(no_wrap=True, overflow="ellipsis")
        columns.append(progress.TextColumn("{task.fields[status]}", markup=False, table_column=status))
        return progress.Progress(*columns, console=console, auto_refresh=False, transient=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._display is not None:
            self._display.stop()
            self._display = None
