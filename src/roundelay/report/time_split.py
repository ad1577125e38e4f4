"""The time and asynchrony sections: time of each learner by kind, staleness of gradients, distance between learners."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from roundelay.report import series
from roundelay.report.html import card, color, legend
from roundelay.report.run_reader import RunView
from roundelay.report.svg import Series, bar_chart, document, element, line_chart, number, round_ticks, short

MAX_CELLS = 3200
"""Bins of all learners of a run; more learners get fewer bins each."""
KIND_NAMES = {
    "compute": "computing gradients", "data": "waiting for data", "update": "writing weights", "comm": "communicating",
    "save": "writing checkpoints", "eval": "evaluating", "other": "other",
}  # fmt: skip


def time_split(runs: Sequence[RunView]) -> str:
    """Return the time section: one strip per learner, all runs on the same time scale."""
    parts: list[str] = []
    shown: set[str] = set()
    timed = [run for run in runs if run.seconds]
    longest = max((run.seconds or 0.0 for run in timed), default=0.0)
    for run in timed:
        bins = max(24, min(140, MAX_CELLS // max(len(run.steps), 1)))
        strips = series.strips(run, bins)
        rows = [strip_row(run, s, bins, (run.seconds or 0.0) / longest) for s in strips]
        shown |= {kind for s in strips for kind, seconds in s.seconds.items() if seconds > 0}
        times = "".join(f'<span style="left:{100 * t / longest:.2f}%">{short(t)} s</span>' for t in round_ticks(0, longest, 4))
        many = " many" if len(strips) > 16 else ""
        heading = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(f'{heading}<div class="strips{many}">{"".join(rows)}<div class="times">{times}</div></div>')
    if not parts:
        return ""
    keys = "".join(f'<span><i class="{k}"></i>{text}</span>' for k, text in KIND_NAMES.items() if k in shown)
    hint = (
        "Each row is one learner; time runs from left to right. The number is the share of “computing gradients”, which should "
        "be large. Much “communicating” is the cost of collective calls, usually because one learner is slow. Much “waiting "
        "for data” calls for more loader workers."
    )
    return card(f'<div class="legend">{keys}</div>{"".join(parts)}', hint, "Time of each learner", "time-split")


def strip_row(run: RunView, strip: series.Strip, bins: int, width: float) -> str:
    """Return one learner's row. `width` is the share of the longest run's time."""
    paths = []
    tops = [0.0] * bins
    for kind in (*series.KINDS, "other"):
        cells = []
        for b, cell in enumerate(strip.bins):
            share = min(cell.get(kind, 0.0), 1.0)
            if share > 0.002:
                cells.append(f"M{b} {100 * tops[b]:.0f}h1.02v{100 * share:.0f}h-1.02z")
                tops[b] += share
        if cells:
            seconds = strip.seconds.get(kind, 0.0)
            percent = 100 * seconds / max(strip.elapsed, 1e-9)
            title = f"rank {strip.rank}: {KIND_NAMES[kind]} {number(seconds, 3)} s ({percent:.0f} %)"
            paths.append(element("path", title=title, cls=kind, d="".join(cells)))
    computing = 100 * strip.seconds.get("compute", 0.0) / max(strip.elapsed, 1e-9)
    summary = f"{computing:.0f} %"
    if strip.rank in run.lost:
        summary = f'<span class="warn">lost, {summary}</span>'
    style = {"preserveAspectRatio": "none", "style": f"width:{100 * width:.2f}%"}
    chart = document(paths, f"time of rank {strip.rank}", bins, 100, **style)
    return f'<span class="who">rank {strip.rank}</span><div>{chart}</div><span class="sum">{summary}</span>'


def asynchrony(runs: Sequence[RunView]) -> str:
    """Return the asynchrony section: staleness and consensus distance."""
    parts = []
    groups = [(r.name, color(n), series.staleness(r)) for n, r in enumerate(runs) if r.learners > 1]
    stale = bar_chart(
        [g for g in groups if g[2]], "staleness of gradients", "staleness (8+: from 8 to 15, and so on)", "% of gradients"
    )
    if stale:
        means = "; ".join(
            f"{escape(r.name)} {number(m, 3)}" for r in runs if r.learners > 1 and (m := series.mean_staleness(r)) is not None
        )  # fmt: skip
        hint = (
            "Staleness is the number of other updates that changed a learner's weights between the start of a gradient and its "
            "application. It is 0 for synchronous strategies. With exchanges in the background it is larger for slow learners. "
            f"Small values are harmless, a long tail is not. Mean: {means}."
        )
        parts.append(card(legend(runs) + stale, hint, "Staleness", "staleness"))
    rows, zeros = [], 0
    for n, run in enumerate(runs):
        apart, pairs = series.spread(run, "position"), series.pair_distance(run, "position")
        zeros += sum(y == 0 for _, y in [*apart, *pairs])
        if any(y > 0 for _, y in apart):
            rows.append(Series(f"{run.name}, all learners", color(n), [p for p in apart if p[1] > 0], marks=True))
        if any(y > 0 for _, y in pairs):
            rows.append(Series(f"{run.name}, exchanging pairs", color(n), [p for p in pairs if p[1] > 0], dashed=True))
    chart = line_chart(rows, "distance between learners against samples", "samples", "relative distance", log=True)
    if chart:
        omitted = f" {zeros} values of exactly 0 are not shown on the logarithmic axis." if zeros else ""
        hint = (
            "Distance between the weights of the learners, relative to their norm. Marks: all learners at a checkpoint "
            "(sqrt(mean |w − mean|²) / |mean|). Dashed: the two learners of each exchange. It should fall with the learning "
            f"rate. If it grows, use a topology with a larger spectral gap or a smaller learning rate.{omitted}"
        )
        parts.append(card(legend(runs) + chart, hint, "Consensus distance", "consensus"))
    return f'<div class="pair">{"".join(parts)}</div>' if parts else ""
