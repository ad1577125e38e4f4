"""Live dashboard of a training run: a panel redrawn every second on a terminal, one line per minute in a file.

Rank 0 draws it in a thread. The metrics of the other ranks arrive with the heartbeats that rank 0 reads anyway, so no gradient
waits for the display.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from roundelay.log.progress import (
    PLAIN_EVERY_S,
    ProgressRate,
    format_duration,
    format_rate,
    make_console,
    select_mode,
    write_line,
)

REDRAW_EVERY_S = 1.0
MAX_RANKS_SHOWN = 8
KINDS = ("data", "compute", "comm")

Metrics = dict[str, Any]
"""Fields of a rank's latest `steps` event, and `rank`."""


@dataclass(frozen=True)
class RunTitle:
    """Title of the dashboard, and the units of its speed."""

    title: str
    """Such as: adpsgd, 2 learners."""
    samples: int
    """Samples in one epoch."""
    frames: float = 0.0
    """Frames in one sample; 0 if the task has no frames."""
    seconds: float = 0.0
    """Seconds of audio in one sample; 0 if the task has no audio."""


@dataclass(frozen=True)
class FleetMetrics:
    """Metrics of all learners, aggregated."""

    loss: float | None
    lr: float
    samples_per_s: float
    shares: dict[str, float]
    """Fraction of the learners' time by kind."""
    staleness: float
    max_staleness: int
    pair_distance: float | None
    exchanges_per_gradient: float | None
    """Over the learners that exchange weights in the background; None if there are none."""
    longest_gap: int
    """Most gradients in a row of one learner without an exchange, since this process began."""
    slowest: int
    """Rank with the longest step."""
    slowdown: float
    """Step time of the slowest rank divided by that of the fastest."""


def aggregate(ranks: list[Metrics]) -> FleetMetrics:
    """Combine the metrics of several ranks; the loss is weighted by samples."""
    losses = [(f["loss"], f["samples"]) for f in ranks if f.get("loss") is not None]
    weight = sum(n for _, n in losses)
    elapsed = max(sum(f["elapsed_s"] for f in ranks), 1e-9)
    stale = [(int(k), n) for f in ranks for k, n in f.get("staleness", {}).items()]
    distances = [f["pair_distance"] for f in ranks if "pair_distance" in f]
    mixing = [f for f in ranks if "longest_gap" in f]
    gradients = sum(f["steps"] for f in mixing)
    own = {f["rank"]: step_seconds(f) for f in ranks}
    slowest = max(own, key=lambda rank: own[rank])
    return FleetMetrics(
        loss=sum(loss * n for loss, n in losses) / weight if weight else None,
        lr=ranks[0].get("lr", 0.0),
        samples_per_s=sum(f["samples_per_s"] for f in ranks),
        shares={kind: sum(f["seconds"].get(kind, 0.0) for f in ranks) / elapsed for kind in KINDS},
        staleness=sum(k * n for k, n in stale) / max(sum(n for _, n in stale), 1),
        max_staleness=max((k for k, _ in stale), default=0),
        pair_distance=sum(distances) / len(distances) if distances else None,
        exchanges_per_gradient=sum(f.get("exchanges", 0) for f in mixing) / gradients if gradients else None,
        longest_gap=max((f["longest_gap"] for f in mixing), default=0),
        slowest=slowest,
        slowdown=own[slowest] / max(min(own.values()), 1e-9),
    )


def step_seconds(metrics: Metrics) -> float:
    """Return the seconds per step that this rank computes itself, without waiting for other ranks."""
    own = sum(metrics["seconds"].get(kind, 0.0) for kind in ("data", "compute", "update"))
    return float(own / max(metrics["steps"], 1))


class LiveDashboard:
    """Dashboard in one of the modes auto, rich, plain and none. `step`, `line` and `urgent` may be called from any thread."""

    def __init__(self, mode: str, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self.mode = select_mode(mode, self._stream)
        self.title = RunTitle("", 1)
        self.ranks: Callable[[], list[Metrics]] = list
        self.held_out = ""
        """Metrics of the latest evaluation, as one line."""
        self._rate = ProgressRate()
        self._position: tuple[int, int] | None = None
        self._live: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def line(self, text: str) -> None:
        """Print a line that stays, above the panel if there is one. Mode none prints nothing."""
        if self.mode == "none":
            return
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            write_line(text, self._stream)

    def urgent(self, text: str) -> None:
        """Print a line in every mode, above the panel if there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            write_line(text, self._stream)

    def start(self, title: RunTitle, ranks: Callable[[], list[Metrics]]) -> None:
        """Start to draw. `ranks` returns the latest metrics of every rank that has some; the drawing thread calls it."""
        self.title, self.ranks = title, ranks
        if self.mode == "none":
            return
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self._thread.start()

    def step(self, position: int, total: int) -> None:
        """Set the position of the run in global samples. One assignment, so call it after every step."""
        self._position = (position, total)

    def close(self) -> None:
        """Stop the thread and remove the panel."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None
        if self._live is not None:
            with suppress(OSError):  # the terminal was closed
                self._live.stop()
            self._live = None

    # -- drawing thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        every = REDRAW_EVERY_S if self.mode == "rich" else PLAIN_EVERY_S
        began = False
        while not self._stop.wait(every if began else 0.1):
            if self._position is None:
                continue
            self._rate.update(*self._position, time.monotonic())
            ranks = self.ranks()
            began = True  # the rate is measured from the first step
            if not ranks:
                continue
            if self.mode == "rich":
                self._draw(ranks)
            else:
                self.line(format_line(self.title, self._rate, aggregate(ranks)))

    def _draw(self, ranks: list[Metrics]) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=make_console(self._stream), auto_refresh=False, transient=True)
            self._live.start()
        panel = render_panel(self.title, self._rate, ranks, self.held_out, self._live.console.width)
        self._live.update(panel, refresh=True)


def format_speed(title: RunTitle, fleet: FleetMetrics) -> str:
    """Format samples/s, and frames/s and the real-time factor for tasks that have them."""
    text = f"{format_rate(fleet.samples_per_s)} samples/s"
    if title.frames:
        text += f"   {format_rate(fleet.samples_per_s * title.frames)} frames/s"
    if title.seconds:
        text += f"   {format_rate(fleet.samples_per_s * title.seconds)} × real time"
    return text


def format_exchanges(fleet: FleetMetrics, *, short: bool = False) -> str:
    """Format exchanges per gradient and the longest run of gradients without one, or "" without gossip."""
    if fleet.exchanges_per_gradient is None:
        return ""
    gradients = "" if short else " gradient" if fleet.longest_gap == 1 else " gradients"
    return f"{fleet.exchanges_per_gradient:.2f} per gradient, at most {fleet.longest_gap}{gradients} without one"


def format_line(title: RunTitle, rate: ProgressRate, fleet: FleetMetrics) -> str:
    """Format all metrics as one line for a file."""
    parts = [
        f"{100 * rate.fraction:.0f} %",
        f"epoch {rate.done / title.samples:.2f} of {rate.total / title.samples:g}",
        f"loss {fleet.loss:.4f}" if fleet.loss is not None else "",
        f"lr {fleet.lr:.4g}",
        format_speed(title, fleet).replace("   ", ", "),
        ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in fleet.shares.items()),
        f"staleness {fleet.staleness:.1f}",
        f"pair distance {fleet.pair_distance:.2g}" if fleet.pair_distance is not None else "",
        f"exchanges {exchanges}" if (exchanges := format_exchanges(fleet)) else "",
        f"slowest rank {fleet.slowest}",
        f"{format_duration(rate.eta_s)} left",
    ]
    return "; ".join(part for part in parts if part)


def render_panel(title: RunTitle, rate: ProgressRate, ranks: list[Metrics], held_out: str, width: int) -> Any:
    """Build the panel as a rich renderable of at most `width` columns; 60 columns suffice."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    fleet = aggregate(ranks)
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    bar.add_row(
        ProgressBar(max(rate.total, 1), rate.done),
        Text.assemble((f"{100 * rate.fraction:.0f} %", "cyan"), f"  {format_duration(rate.eta_s)} left"),
    )
    summary = Table.grid(padding=(0, 2))
    summary.add_column(style="dim")
    summary.add_column()
    loss = f"{fleet.loss:.4f}" if fleet.loss is not None else "–"
    summary.add_row("loss", Text.assemble((loss, "bold"), f"   lr {fleet.lr:.4g}"))
    if held_out:
        summary.add_row("held out", held_out)
    summary.add_row("speed", format_speed(title, fleet))
    shares = {**fleet.shares, "other": max(0.0, 1.0 - sum(fleet.shares.values()))}
    long_names = {"comm": "communication"} if width >= 72 else {}
    summary.add_row("time", "  ".join(f"{long_names.get(kind, kind)} {100 * share:.0f} %" for kind, share in shares.items()))
    summary.add_row("staleness", f"{fleet.staleness:.1f} on average, {fleet.max_staleness} at most")
    summary.add_row(
        "distance", f"{fleet.pair_distance:.2g} of |w| between partners" if fleet.pair_distance is not None else "–"
    )
    if exchanges := format_exchanges(fleet, short=width < 72):
        summary.add_row("exchanges", exchanges)
    if len(ranks) > 1:
        summary.add_row("slowest", f"rank {fleet.slowest}: {fleet.slowdown:.1f} × the step time of the fastest")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("rank", "samples/s", "step", "data", "compute", "comm", "stale"):
        table.add_column(name, justify="right")
    shown = sorted(ranks, key=lambda f: int(f["rank"]))[:MAX_RANKS_SHOWN]
    for f in shown:
        elapsed = max(f["elapsed_s"], 1e-9)
        counts = [(int(k), n) for k, n in f.get("staleness", {}).items()]
        stale = sum(k * n for k, n in counts) / max(sum(n for _, n in counts), 1)
        table.add_row(
            str(f["rank"]),
            format_rate(f["samples_per_s"]),
            f"{1000 * step_seconds(f):.0f} ms",
            *(f"{100 * f['seconds'].get(kind, 0.0) / elapsed:.0f} %" for kind in KINDS),
            f"{stale:.1f}",
            style="yellow" if f["rank"] == fleet.slowest and fleet.slowdown > 1.2 else "",
        )
    rest = [Text(f"and {len(ranks) - MAX_RANKS_SHOWN} more", "dim")] if len(ranks) > MAX_RANKS_SHOWN else []
    epochs = f"epoch {rate.done / title.samples:.2f} of {rate.total / title.samples:g}"
    return Panel(
        Group(bar, summary, table, *rest), title=title.title, title_align="left", subtitle=epochs, subtitle_align="right",
        box=box.ROUNDED, width=min(width, 100),
    )  # fmt: skip
