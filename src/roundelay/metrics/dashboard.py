"""What a person sees of a training run: on a terminal a panel that is drawn anew every second, in a file a line a minute.

Rank 0 draws, in a thread of its own; the other ranks' metrics come with the signs of life that its watchdog reads anyhow, so no
gradient waits for a drawing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundelay.log.progress import (
    PLAIN_EVERY_S,
    ProgressRate,
    columns,
    format_duration,
    format_rate,
    make_console,
    select_mode,
    wrapped,
)

DRAW_EVERY_S = 1.0
RANKS_SHOWN = 8
KINDS = ("data", "compute", "comm")

Metrics = dict[str, Any]
"""What a learner's recorder wrote last, and `rank`."""


@dataclass(frozen=True)
class RunTitle:
    """What is being trained."""

    title: str
    """Such as: adpsgd, 2 learners."""
    samples: int
    """In an epoch."""
    frames: float = 0.0
    """Of one sample; 0 where the task does not know frames."""
    seconds: float = 0.0
    """Of sound in one sample."""


@dataclass(frozen=True)
class FleetMetrics:
    """The learners' metrics as one."""

    loss: float | None
    lr: float
    samples_per_s: float
    shares: dict[str, float]
    staleness: float
    most_stale: int
    apart: float | None
    slowest: int
    times_slower: float
    """A step of the slowest rank against one of the fastest."""


def aggregate(ranks: list[Metrics]) -> FleetMetrics:
    losses = [(f["loss"], f["samples"]) for f in ranks if f.get("loss") is not None]
    weight = sum(n for _, n in losses)
    elapsed = max(sum(f["elapsed_s"] for f in ranks), 1e-9)
    stale = [(int(k), n) for f in ranks for k, n in f.get("staleness", {}).items()]
    distances = [f["pair_distance"] for f in ranks if "pair_distance" in f]
    own = {f["rank"]: step_seconds(f) for f in ranks}
    slowest = max(own, key=lambda rank: own[rank])
    return FleetMetrics(
        loss=sum(loss * n for loss, n in losses) / weight if weight else None,
        lr=ranks[0].get("lr", 0.0),
        samples_per_s=sum(f["samples_per_s"] for f in ranks),
        shares={kind: sum(f["seconds"].get(kind, 0.0) for f in ranks) / elapsed for kind in KINDS},
        staleness=sum(k * n for k, n in stale) / max(sum(n for _, n in stale), 1),
        most_stale=max((k for k, _ in stale), default=0),
        apart=sum(distances) / len(distances) if distances else None,
        slowest=slowest,
        times_slower=own[slowest] / max(min(own.values()), 1e-9),
    )


def step_seconds(metrics: Metrics) -> float:
    """Of this learner's own work; waiting for others does not count."""
    own = sum(metrics["seconds"].get(kind, 0.0) for kind in ("data", "compute", "update"))
    return float(own / max(metrics["steps"], 1))


class LiveDashboard:
    """kind: auto | rich | plain | none. `ranks` gives the last metrics of every rank that has some."""

    def __init__(self, kind: str, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self.kind = select_mode(kind, self._stream)
        self.subject = RunTitle("", 1)
        self.ranks: Callable[[], list[Metrics]] = list
        self.held_out = ""
        self._pace = ProgressRate()
        self._where: tuple[int, int] | None = None
        self._live: Any = None
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.kind == "none":
            return
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            print(wrapped(text, columns(self._stream)), file=self._stream, flush=True)

    def urgent(self, text: str) -> None:
        """A line that is said whatever the kind, above the panel where there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def start(self, subject: RunTitle, ranks: Callable[[], list[Metrics]]) -> None:
        self.subject, self.ranks = subject, ranks
        if self.kind == "none":
            return
        self._thread = threading.Thread(target=self._run, name="panel", daemon=True)
        self._thread.start()

    def step(self, position: int, total: int) -> None:
        """Where the run stands: one assignment, for every step."""
        self._where = (position, total)

    def close(self) -> None:
        self._leave.set()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        every = DRAW_EVERY_S if self.kind == "rich" else PLAIN_EVERY_S
        began = False
        while not self._leave.wait(every if began else 0.1):
            if self._where is None:
                continue
            self._pace.at(*self._where, time.monotonic())
            ranks = self.ranks()
            if not began:  # the clock starts with the first step
                began = True
            if not ranks:
                continue
            if self.kind == "rich":
                self._draw(ranks)
            else:
                self.line(plain(self.subject, self._pace, aggregate(ranks)))

    def _draw(self, ranks: list[Metrics]) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=make_console(self._stream), auto_refresh=False, transient=True)
            self._live.start()
        drawn = picture(self.subject, self._pace, ranks, self.held_out, self._live.console.width)
        self._live.update(drawn, refresh=True)


def speed(subject: RunTitle, whole: FleetMetrics) -> str:
    said = f"{format_rate(whole.samples_per_s)} samples/s"
    if subject.frames:
        said += f"   {format_rate(whole.samples_per_s * subject.frames)} frames/s"
    if subject.seconds:
        said += f"   {format_rate(whole.samples_per_s * subject.seconds)} × real time"
    return said


def plain(subject: RunTitle, pace: ProgressRate, whole: FleetMetrics) -> str:
    """One line for a file."""
    parts = [
        f"{100 * pace.share:.0f} %",
        f"epoch {pace.done / subject.samples:.2f} of {pace.total / subject.samples:g}",
        f"loss {whole.loss:.4f}" if whole.loss is not None else "",
        f"rate {whole.lr:.4g}",
        speed(subject, whole).replace("   ", ", "),
        ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in whole.shares.items()),
        f"staleness {whole.staleness:.1f}",
        f"apart {whole.apart:.2g}" if whole.apart is not None else "",
        f"slowest rank {whole.slowest}",
        f"{format_duration(pace.left_s)} left",
    ]
    return "; ".join(part for part in parts if part)


def picture(subject: RunTitle, pace: ProgressRate, ranks: list[Metrics], held_out: str, width: int) -> Any:
    """The panel; it fits into 60 columns."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel as Frame
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    whole = aggregate(ranks)
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    bar.add_row(
        ProgressBar(max(pace.total, 1), pace.done),
        Text.assemble((f"{100 * pace.share:.0f} %", "cyan"), f"  {format_duration(pace.left_s)} left"),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    loss = f"{whole.loss:.4f}" if whole.loss is not None else "–"
    facts.add_row("loss", Text.assemble((loss, "bold"), f"   rate {whole.lr:.4g}"))
    if held_out:
        facts.add_row("held out", held_out)
    facts.add_row("speed", speed(subject, whole))
    shares = {**whole.shares, "other": max(0.0, 1.0 - sum(whole.shares.values()))}
    named = {"comm": "communication"} if width >= 72 else {}
    facts.add_row("time", "  ".join(f"{named.get(kind, kind)} {100 * share:.0f} %" for kind, share in shares.items()))
    facts.add_row("staleness", f"{whole.staleness:.1f} on average, {whole.most_stale} at most")
    facts.add_row("apart", f"{whole.apart:.2g} of |w| between partners" if whole.apart is not None else "–")
    if len(ranks) > 1:
        facts.add_row("slowest", f"rank {whole.slowest}: a step takes {whole.times_slower:.1f} × the fastest's")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("rank", "samples/s", "step", "data", "compute", "comm", "stale"):
        table.add_column(name, justify="right")
    shown = sorted(ranks, key=lambda f: int(f["rank"]))[:RANKS_SHOWN]
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
            style="yellow" if f["rank"] == whole.slowest and whole.times_slower > 1.2 else "",
        )
    rest = [Text(f"and {len(ranks) - RANKS_SHOWN} more", "dim")] if len(ranks) > RANKS_SHOWN else []
    epochs = f"epoch {pace.done / subject.samples:.2f} of {pace.total / subject.samples:g}"
    return Frame(
        Group(bar, facts, table, *rest), title=subject.title, title_align="left", subtitle=epochs, subtitle_align="right",
        box=box.ROUNDED, width=min(width, 100),
    )  # fmt: skip
