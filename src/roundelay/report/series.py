"""Curves of a run from its events, averaged over learners in bins, so that 64 learners give as many points as one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roundelay.metrics.gaps import run_lengths
from roundelay.report.run_reader import Event, RunView
from roundelay.report.svg import Points

BINS = 120
KINDS = ("compute", "data", "update", "comm", "save", "eval")
"""Kinds of time in the events; the rest is `other`."""
TAIL = ((8, 15), (16, 31), (32, 63), (64, 127))


def train_loss(run: RunView, against: str) -> Points:
    """Return the mean training loss, weighted by steps. `against` is "position" (samples) or "at" (seconds)."""
    return mean_in_bins(
        ((e[against], e["loss"], e.get("steps") or 1) for e in steps(run) if finite(e.get("loss")) and finite(e.get(against))),
        len(run.steps),
    )


def learning_rate(run: RunView, against: str) -> Points:
    rows = ((e[against], e["lr"], 1.0) for e in steps(run) if finite(e.get("lr")) and finite(e.get(against)))
    return mean_in_bins(rows, len(run.steps))


def pair_distance(run: RunView, against: str) -> Points:
    """Return |w_i - w_j| / |w_i| at exchanges, weighted by the number of exchanges."""
    return mean_in_bins(
        (
            (e[against], e["pair_distance"], e.get("exchanges") or 1)
            for e in steps(run)
            if finite(e.get("pair_distance")) and finite(e.get(against))
        ),
        len(run.steps),
    )


def spread(run: RunView, against: str) -> Points:
    """Return sqrt(mean |w_l - mean|^2) / |mean| at the checkpoints."""
    points = {e["position"]: (e[against], e["spread"]) for e in run.checkpoints if finite(e.get("spread")) and "position" in e}
    points |= {
        e["position"]: (e[against], e["spread"])
        for e in run.evaluations
        if finite(e.get("spread")) and e.get("position") not in points
    }
    return sorted(points.values())


def validation(metric: str, run: RunView, against: str) -> Points:
    """Return a validation metric of the average model, one point per position. The last evaluation of a position counts."""
    points = {}
    for e in run.evaluations:
        if finite(e["metrics"].get(metric)) and finite(e.get(against)):
            points[e.get("position")] = (float(e[against]), float(e["metrics"][metric]))
    return sorted(points.values())


def throughput(run: RunView) -> Points:
    """Return samples per second, summed over all learners, against seconds."""
    if not run.seconds:
        return []
    begin = min(e["from"] for e in steps(run))
    bins = max(1, min(BINS, max(len(events) for events in run.steps.values())))
    width = run.seconds / bins
    sums = [0.0] * bins
    for e in steps(run):
        for b, share in overlaps(e["from"] - begin, e["at"] - begin, width, bins):
            sums[b] += share * float(e.get("samples") or 0)
    return [(begin + (b + 0.5) * width, s / width) for b, s in enumerate(sums)]


def staleness(run: RunView) -> list[tuple[str, float]]:
    """Return the percentage of gradients by staleness. Values of 8 and more are grouped."""
    counts: Counter[int] = Counter()
    for e in steps(run):
        counts.update({int(k): int(v) for k, v in (e.get("staleness") or {}).items()})
    return percentages(counts)


def gap_lengths(run: RunView) -> Counter[int]:
    """Return the number of runs of gradients without an exchange by their length, over all learners; empty without gossip."""
    lengths: Counter[int] = Counter()
    for events in run.steps.values():
        gaps: Counter[int] = Counter()
        for e in events:
            for gap, count in (e.get("exchange_gaps") or {}).items():
                gaps[int(gap)] += int(count)
        lengths.update(run_lengths(gaps))
    return lengths


def exchanges_per_gradient(run: RunView) -> float | None:
    """Return exchanges divided by gradients, over the learners that exchange in the background; None without gossip."""
    mixing = [e for events in run.steps.values() if any(e.get("exchange_gaps") for e in events) for e in events]
    gradients = sum(int(count) for e in mixing for count in (e.get("exchange_gaps") or {}).values())
    return sum(max(e.get("exchanges") or 0, 0) for e in mixing) / gradients if gradients else None


def percentages(counts: Counter[int]) -> list[tuple[str, float]]:
    """Return (value, percentage of the counts) for bars. Values of 8 and more are grouped."""
    total = sum(counts.values())
    if not total:
        return []
    rows = [(str(k), counts[k]) for k in range(8)]
    rows += [(f"{a}+", sum(v for k, v in counts.items() if a <= k <= b)) for a, b in TAIL]
    rows.append(("128+", sum(v for k, v in counts.items() if k >= 128)))
    while len(rows) > 4 and not rows[-1][1]:
        rows.pop()
    return [(label, 100 * count / total) for label, count in rows]


def mean_staleness(run: RunView) -> float | None:
    """Return the mean staleness of all gradients, or None if none was recorded."""
    pairs = [(int(k), int(v)) for e in steps(run) for k, v in (e.get("staleness") or {}).items()]
    total = sum(v for _, v in pairs)
    return sum(k * v for k, v in pairs) / total if total else None


@dataclass(frozen=True)
class Strip:
    """Time of one learner: the share of each kind in every bin, and the total seconds of each kind."""

    rank: int
    bins: list[dict[str, float]]
    seconds: dict[str, float]
    elapsed: float


def strips(run: RunView, bins: int) -> list[Strip]:
    """Return the time of every learner in `bins` equal bins of the run."""
    if not run.seconds:
        return []
    begin, width = min(e["from"] for e in steps(run)), run.seconds / bins
    rows = []
    for rank in sorted(run.steps):
        cells: list[dict[str, float]] = [{} for _ in range(bins)]
        total: Counter[str] = Counter()
        for e in run.steps[rank]:
            parts = split(e)
            total.update(parts)
            for b, share in overlaps(e["from"] - begin, e["at"] - begin, width, bins):
                for kind, seconds in parts.items():
                    cells[b][kind] = cells[b].get(kind, 0.0) + share * seconds / width
        rows.append(Strip(rank, cells, dict(total), sum(e["at"] - e["from"] for e in run.steps[rank])))
    return rows


def split(event: Event) -> dict[str, float]:
    """Return seconds by kind, including `other`. They sum to the elapsed time."""
    elapsed = max(event["at"] - event["from"], 1e-9)
    parts = {k: float(v) for k, v in (event.get("seconds") or {}).items() if finite(v) and v > 0}
    total = sum(parts.values())
    if total > elapsed:
        return {k: v * elapsed / total for k, v in parts.items()}
    return parts | {"other": elapsed - total}


def overlaps(begin: float, end: float, width: float, bins: int) -> list[tuple[int, float]]:
    """Return (bin, share of the interval in it) for all bins that an interval overlaps."""
    if not end > begin:
        return []
    first, last = max(0, int(begin / width)), min(bins - 1, int(end / width))
    cut = [(b, min(end, (b + 1) * width) - max(begin, b * width)) for b in range(first, last + 1)]
    return [(b, part / (end - begin)) for b, part in cut if part > 0]


def mean_in_bins(values: Iterable[tuple[float, float, float]], learners: int) -> Points:
    """Return weighted means of (x, y, weight) in bins. There are as many bins as one of the learners has values."""
    rows = sorted(values)
    if not rows:
        return []
    bins = max(1, min(BINS, len(rows) // max(learners, 1)))
    low, width = rows[0][0], (rows[-1][0] - rows[0][0]) / bins or 1.0
    sums: dict[int, list[float]] = {}
    for x, y, weight in rows:
        cell = sums.setdefault(min(int((x - low) / width), bins - 1), [0.0, 0.0, 0.0])
        cell[0] += weight * x
        cell[1] += weight * y
        cell[2] += weight
    return [(x / w, y / w) for x, y, w in sums.values() if w > 0]


def steps(run: RunView) -> Sequence[Event]:
    """Return the step events of all learners."""
    return [e for events in run.steps.values() for e in events]


def finite(x: object) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
