"""Where each learner's time goes, how stale gradients are, and how far apart the learners."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from roundelay.report import series
from roundelay.report.html import card, colour, legend
from roundelay.report.run_reader import RunView
from roundelay.report.svg_axes import number, round_ticks, short
from roundelay.report.svg_charts import Series, bars, lines

MOST_CELLS = 3200
"""Bins of all strips of a run together; more learners get fewer each."""
KIND_NAMES = {
    "compute": "computing gradients", "data": "waiting for data", "update": "writing weights", "comm": "waiting for others",
    "save": "saving", "eval": "judging", "other": "anything else",
}  # fmt: skip


def time_split(runs: Sequence[RunView]) -> str:
    """A strip per learner, all runs on one scale of time."""
    parts: list[str] = []
    shown: set[str] = set()
    timed = [run for run in runs if run.seconds]
    longest = max((run.seconds or 0.0 for run in timed), default=0.0)
    for run in timed:
        bins = max(24, min(140, MOST_CELLS // max(len(run.steps), 1)))
        found = series.strips(run, bins)
        rows = [strip_row(run, s, bins, (run.seconds or 0.0) / longest) for s in found]
        shown |= {kind for s in found for kind, seconds in s.seconds.items() if seconds > 0}
        times = "".join(f'<span style="left:{100 * t / longest:.2f}%">{short(t)} s</span>' for t in round_ticks(0, longest, 4))
        many = " many" if len(found) > 16 else ""
        heading = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(f'{heading}<div class="strips{many}">{"".join(rows)}<div class="times">{times}</div></div>')
    if not parts:
        return ""
    keys = "".join(f'<span><i class="{k}"></i>{text}</span>' for k, text in KIND_NAMES.items() if k in shown)
    look = (
        "every row is one learner, its time running from left to right and cut by what it did. Much of “computing” is good. "
        "Much “waiting for others” is the price of a rendezvous, usually because of one slow learner; “waiting for data” "
        "asks for a faster loader. The number is the share of computing."
    )
    return card(f'<div class="legend">{keys}</div>{"".join(parts)}', look, "Where each learner's time went", "time-split")


def strip_row(run: RunView, strip: series.Strip, bins: int, width: float) -> str:
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
            of = 100 * seconds / max(strip.elapsed, 1e-9)
            title = f"rank {strip.rank}: {KIND_NAMES[kind]} {number(seconds, 3)} s ({of:.0f} %)"
            paths.append(f'<path class="{kind}" d="{"".join(cells)}"><title>{title}</title></path>')
    computing = 100 * strip.seconds.get("compute", 0.0) / max(strip.elapsed, 1e-9)
    said = f"{computing:.0f} %"
    if strip.rank in run.lost:
        said = f'<span class="warn">lost, {said}</span>'
    drawn = f'<svg viewBox="0 0 {bins} 100" preserveAspectRatio="none" role="img" aria-label="time of rank {strip.rank}" '
    drawn += f'style="width:{100 * width:.2f}%">{"".join(paths)}</svg>'
    return f'<span class="who">rank {strip.rank}</span><div>{drawn}</div><span class="sum">{said}</span>'


def asynchrony(runs: Sequence[RunView]) -> str:
    parts = []
    groups = [(r.name, colour(n), series.staleness(r)) for n, r in enumerate(runs) if r.learners > 1]
    stale = bars(
        [g for g in groups if g[2]], "staleness of gradients", "staleness (8+: from 8 to 15, and so on)", "% of gradients"
    )
    if stale:
        means = "; ".join(
            f"{escape(r.name)} {number(m, 3)}" for r in runs if r.learners > 1 and (m := series.mean_staleness(r)) is not None
        )  # fmt: skip
        look = (
            "how many other updates went into a learner's weights between the moment its gradient was begun and the moment it "
            "was applied. Strategies with a rendezvous have 0 throughout; with exchanges in the background, a slow learner has "
            "more. "
            f"Values of a few are harmless, a long tail is not. Mean: {means}."
        )
        parts.append(card(legend(runs) + stale, look, "Staleness", "staleness"))
    rows, zeros = [], 0
    for n, run in enumerate(runs):
        apart, pairs = series.spread(run, "position"), series.pair_distance(run, "position")
        zeros += sum(y == 0 for _, y in [*apart, *pairs])
        if any(y > 0 for _, y in apart):
            rows.append(Series(f"{run.name}, all learners", colour(n), [p for p in apart if p[1] > 0], marks=True))
        if any(y > 0 for _, y in pairs):
            rows.append(Series(f"{run.name}, pairs that met", colour(n), [p for p in pairs if p[1] > 0], dashed=True))
    chart = lines(rows, "distance between learners against samples", "samples", "relative distance", log=True)
    if chart:
        nothing = (
            f" {zeros} values were exactly 0, where learners had just become equal; this scale cannot show them."
            if zeros
            else ""
        )
        look = (
            "how far apart the learners' weights are, relative to their length: marks, all learners at a checkpoint "
            "(sqrt(mean |w − mean|²) / |mean|); dashed, the two ends of each exchange. It should fall as the rate falls. If it "
            f"grows, they drift apart: use a topology with a larger gap, or a smaller rate.{nothing}"
        )
        parts.append(card(legend(runs) + chart, look, "Consensus distance", "consensus"))
    return f'<div class="pair">{"".join(parts)}</div>' if parts else ""
