"""Progress for people: a live line on a terminal, one plain line a minute in files, nothing where nobody looks.

rich    a terminal that can move its cursor: what is done, a bar, the rate, the time left
plain   a file, a pipe, TERM=dumb: the same in words, once a minute
none    silence
auto    rich or plain, by what the stream is; NO_COLOR takes colours away, the width of the terminal is kept
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from typing import Any

PLAIN_EVERY_S = 60.0
LIVE_EVERY_S = 0.25
NARROW = 76
"""Columns below which the bar makes room for the metrics."""


def select_mode(kind: str, stream: Any) -> str:
    """rich, plain or none."""
    if kind != "auto":
        return kind
    return "rich" if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown") else "plain"


def columns(stream: Any) -> int:
    """The width of a terminal; 0: no terminal, lines may be as long as they are."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def make_console(stream: Any) -> Any:
    """rich's, as wide as the terminal, without colours where they are not wanted."""
    from rich.console import Console

    width = columns(stream) or None
    if os.environ.get("NO_COLOR"):
        return Console(file=stream, width=width, color_system=None, force_terminal=True, highlight=False)
    return Console(file=stream, width=width, force_terminal=True, highlight=False)


def wrapped(text: str, width: int) -> str:
    """Lines no longer than the terminal, continued under their own indent."""
    if width <= 0:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent + "  " * bool(indent.strip() or line), break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def say(text: str) -> None:
    """A line for the person who watches, on standard error."""
    print(wrapped(text, columns(sys.stderr)), file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """0:07, 12:30, 3:02:11; a dash where nobody can tell."""
    if not math.isfinite(seconds) or seconds < 0:
        return "–"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(value: float) -> str:
    """A rate in few digits: 1,234 or 12 or 0.31."""
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


class ProgressRate:
    """How fast something goes, and how long the rest of it takes."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self.done = self.total = 0
        self._now = 0.0

    def at(self, done: int, total: int, now: float) -> None:
        if self._first is None:
            self._first = (done, now)
        self.done, self.total, self._now = done, total, now

    @property
    def rate(self) -> float:
        """Per second, since the first look."""
        if self._first is None or self._now <= self._first[1]:
            return 0.0
        return (self.done - self._first[0]) / (self._now - self._first[1])

    @property
    def left_s(self) -> float:
        return (self.total - self.done) / self.rate if self.rate > 0 else math.inf

    @property
    def share(self) -> float:
        return self.done / max(self.total, 1)


class Progress:
    """One stage: `what` is going on, so many `unit` of it.

    with Progress("features", "utterances") as shown:
        shown.step(done, total)
    """

    def __init__(self, what: str = "", unit: str = "", kind: str = "auto", stream: Any = None) -> None:
        self.what, self.unit = what, unit
        self._stream = stream or sys.stderr
        self.kind = select_mode(kind, self._stream)
        self._live: Any = None
        self._pace = ProgressRate()
        self._pace.at(0, 0, time.monotonic())
        self._shown = time.monotonic() - (LIVE_EVERY_S if self.kind == "rich" else 0.0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.kind == "none":
            return
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            print(wrapped(text, columns(self._stream)), file=self._stream, flush=True)

    def step(self, done: int, total: int, note: str = "") -> None:
        """Where the stage stands: cheap enough to be called for every item."""
        now = time.monotonic()
        if self.kind == "none" or now - self._shown < (LIVE_EVERY_S if self.kind == "rich" else PLAIN_EVERY_S):
            return
        self._shown = now
        self._pace.at(done, total, now)
        if self.kind == "rich":
            self._draw(note)
        else:
            self.line(f"{self.what}: {100 * self._pace.share:.0f} %, " + self._figures(note))

    def _figures(self, note: str) -> str:
        pace = self._pace
        said = (
            f"{pace.done:,} of {pace.total:,} {self.unit}".rstrip()
            + f", {format_rate(pace.rate)}/s, {format_duration(pace.left_s)} left"
        )
        return f"{said}, {note}" if note else said

    def _draw(self, note: str) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._live is None:
            from rich.live import Live

            self._live = Live(console=make_console(self._stream), auto_refresh=False, transient=True)
            self._live.start()
        row = Table.grid(padding=(0, 1))
        cells: list[Any] = [Text(self.what, "bold"), ProgressBar(self._pace.total, self._pace.done, width=20)]
        if self._live.console.width < NARROW:
            cells = cells[:1]
        row.add_row(
            *cells,
            Text(f"{100 * self._pace.share:3.0f} %", "cyan"),
            Text(self._figures(note), no_wrap=True, overflow="ellipsis"),
        )
        self._live.update(row, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
