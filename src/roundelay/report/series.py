"""The curves of a run, from its events: mean over the learners in bins, so that 64 learners draw no more than one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roundelay.report.run_reader import Event, RunView

Points = list[tuple[float, float]]
BINS = 120
KINDS = ("compute", "data", "update", "comm", "save", "eval")
"""Where a learner's time goes; what is left of a second is `other`."""
TAIL = ((8, 15), (16, 31), (32, 63), (64, 127))


def train_loss(run: RunView, against: str) -> Points:
    """Mean training loss, weighted by steps. Against `position` or `at`."""
    return mean_in_bins(
        ((e[against], e["loss"], e.get("steps") or 1) for e in steps(run) if finite(e.get("loss")) and finite(e.get(against))),
        len(run.steps),
    )


def learning_rate(run: RunView, against: str) -> Points:
    found = ((e[against], e["lr"], 1.0) for e in steps(run) if finite(e.get("lr")) and finite(e.get(against)))
    return mean_in_bins(found, len(run.steps))


def pair_distance(run: RunView, against: str) -> Points:
    """|w_i - w_j| / |w_i| that exchanges found, weighted by exchanges."""
    return mean_in_bins(
        (
            (e[against], e["pair_distance"], e.get("exchanges") or 1)
            for e in steps(run)
            if finite(e.get("pair_distance")) and finite(e.get(against))
        ),
        len(run.steps),
    )


def spread(run: RunView, against: str) -> Points:
    """sqrt(mean |w_l - mean|^2) / |mean| of the checkpoints."""
    found = {e["position"]: (e[against], e["spread"]) for e in run.checkpoints if finite(e.get("spread")) and "position" in e}
    found |= {
        e["position"]: (e[against], e["spread"])
        for e in run.evaluations
        if finite(e.get("spread")) and e.get("position") not in found
    }
    return sorted(found.values())


def held_out(figure: str, run: RunView, against: str) -> Points:
    """One of the held-out metrics of the average model. Of the final model only where no checkpoint has its place."""
    found = {}
    for e in run.evaluations:
        if finite(e["metrics"].get(figure)) and finite(e.get(against)):
            found[e.get("position")] = (float(e[against]), float(e["metrics"][figure]))
    return sorted(found.values())


def throughput(run: RunView) -> Points:
    """Samples per second of all learners together, over the seconds."""
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
    """Share of the gradients by staleness, large ones together; percent."""
    counts: Counter[int] = Counter()
    for e in steps(run):
        counts.update({int(k): int(v) for k, v in (e.get("staleness") or {}).items()})
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
    pairs = [(int(k), int(v)) for e in steps(run) for k, v in (e.get("staleness") or {}).items()]
    total = sum(v for _, v in pairs)
    return sum(k * v for k, v in pairs) / total if total else None


@dataclass(frozen=True)
class Strip:
    """One learner's time: in every bin the share of each kind, and the seconds of each in all."""

    rank: int
    bins: list[dict[str, float]]
    seconds: dict[str, float]
    elapsed: float


def strips(run: RunView, bins: int) -> list[Strip]:
    """The time of every learner, cut into equal bins of the whole run."""
    if not run.seconds:
        return []
    begin, width = min(e["from"] for e in steps(run)), run.seconds / bins
    found = []
    for rank in sorted(run.steps):
        cells: list[dict[str, float]] = [{} for _ in range(bins)]
        total: Counter[str] = Counter()
        for e in run.steps[rank]:
            parts = split(e)
            total.update(parts)
            for b, share in overlaps(e["from"] - begin, e["at"] - begin, width, bins):
                for kind, seconds in parts.items():
                    cells[b][kind] = cells[b].get(kind, 0.0) + share * seconds / width
        found.append(Strip(rank, cells, dict(total), sum(e["at"] - e["from"] for e in run.steps[rank])))
    return found


def split(event: Event) -> dict[str, float]:
    """Seconds by kind, `other` included; they sum to the time that went by."""
    elapsed = max(event["at"] - event["from"], 1e-9)
    parts = {k: float(v) for k, v in (event.get("seconds") or {}).items() if finite(v) and v > 0}
    known = sum(parts.values())
    if known > elapsed:
        return {k: v * elapsed / known for k, v in parts.items()}
    return parts | {"other": elapsed - known}


def overlaps(begin: float, end: float, width: float, bins: int) -> list[tuple[int, float]]:
    """Which share of an interval lies in which bin."""
    if not end > begin:
        return []
    first, last = max(0, int(begin / width)), min(bins - 1, int(end / width))
    cut = [(b, min(end, (b + 1) * width) - max(begin, b * width)) for b in range(first, last + 1)]
    return [(b, part / (end - begin)) for b, part in cut if part > 0]


def mean_in_bins(found: Iterable[tuple[float, float, float]], together: int) -> Points:
    """(x, y, weight) to as many points as one of the `together` learners would give, each at the mean of its own."""
    rows = sorted(found)
    if not rows:
        return []
    bins = max(1, min(BINS, len(rows) // max(together, 1)))
    low, width = rows[0][0], (rows[-1][0] - rows[0][0]) / bins or 1.0
    sums: dict[int, list[float]] = {}
    for x, y, weight in rows:
        cell = sums.setdefault(min(int((x - low) / width), bins - 1), [0.0, 0.0, 0.0])
        cell[0] += weight * x
        cell[1] += weight * y
        cell[2] += weight
    return [(x / w, y / w) for x, y, w in sums.values() if w > 0]


def steps(run: RunView) -> Sequence[Event]:
    return [e for events in run.steps.values() for e in events]


def finite(x: object) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
