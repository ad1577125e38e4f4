"""Progress for people: a live line on a terminal, plain lines now and then in files, nothing where nobody looks."""

from __future__ import annotations

import sys
import time
from typing import Any

PLAIN_EVERY_S = 60.0
LIVE_EVERY_S = 0.25


class Progress:
    """kind: auto | rich | plain | none."""

    def __init__(self, kind: str = "auto", stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        if kind == "auto":
            kind = "rich" if self._stream.isatty() else "plain"
        self.kind = kind
        self._bar: Any = None
        self._task: Any = None
        self._shown = self._began = time.monotonic()
        self._first: int | None = None

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.kind == "none":
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def step(self, position: int, total: int, figures: dict[str, Any]) -> None:
        """Where the run stands: cheap enough for every step."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = position, now
        if self.kind == "none" or now - self._shown < (LIVE_EVERY_S if self.kind == "rich" else PLAIN_EVERY_S):
            return
        self._shown = now
        if self.kind == "rich":
            self._show_bar(position, total, figures)
            return
        rate = (position - self._first) / max(now - self._began, 1e-9)
        left = (total - position) / rate if rate > 0 else float("inf")
        self.line(
            f"{position}/{total} samples ({100 * position / max(total, 1):.0f} %)  {describe(figures)}  {left:.0f} s left"
        )

    def _show_bar(self, position: int, total: int, figures: dict[str, Any]) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                "[progress.percentage]{task.percentage:>3.0f}%",
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=position, description=describe(figures))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe(figures: dict[str, Any]) -> str:
    """One learner's last figures in a few words."""
    if not figures:
        return ""
    seconds, elapsed = figures.get("seconds", {}), max(figures.get("elapsed_s", 0), 1e-9)
    shares = " ".join(f"{name} {100 * seconds.get(name, 0) / elapsed:.0f}%" for name in ("data", "compute", "comm"))
    loss = figures.get("loss")
    text = f"loss {loss:.4f}  " if loss is not None else ""
    text += f"rate {figures.get('rate', 0):.4g}  {figures.get('samples_per_s', 0):.0f} samples/s  {shares}"
    if "pair_distance" in figures:
        text += f"  apart {figures['pair_distance']:.2g}"
    return text
