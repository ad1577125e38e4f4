"""Text charts of a simulated run: timeline, time shares, staleness."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.simulate.run import SimulationResult

LETTERS = {"compute": "#", "comm": "~", "copy": "=", "data": ".", "idle": " "}
LEGEND = "# gradient   ~ waits for other ranks or the network   = copies through host memory   . waits for data"
SHOWN = 16


def timeline(spans: Sequence[tuple[int, str, float, float]], learners: int, width: int = 96) -> list[str]:
    """Return the first steps of a run, one line per learner."""
    if not spans:
        return []
    shown = list(range(min(learners, SHOWN)))
    # the interval that is recorded for all displayed learners
    until = min((max((end for rank, _, _, end in spans if rank == r), default=0.0) for r in shown), default=0.0)
    begin = min((start for rank, what, start, _ in spans if what == "compute"), default=0.0)
    if until <= begin:
        return []
    column = (until - begin) / width
    lines = [f"from {begin:.4g} to {until:.4g} s ({column:.3g} s per letter):   {LEGEND}"]
    for r in shown:
        weight = [dict.fromkeys(LETTERS, 0.0) for _ in range(width)]
        for rank, what, start, end in spans:
            if rank != r or end <= begin or start >= until:
                continue
            for c in range(max(0, int((start - begin) / column)), min(width - 1, int((end - begin) / column)) + 1):
                overlap = min(end, begin + (c + 1) * column) - max(start, begin + c * column)
                if overlap > 0:
                    weight[c][what] += overlap
        for cell in weight:
            cell["idle"] = column * 1.0001 - sum(cell.values())
        lines.append(f"rank {r:>4} |" + "".join(LETTERS[max(cell, key=lambda k: cell[k])] for cell in weight) + "|")
    if len(shown) < learners:
        lines.append(f"({learners - len(shown)} learners not shown)")
    return lines


def shares(outcome: SimulationResult) -> list[str]:
    """Return a table of each learner's time by kind over the whole run; at most 16 learners, evenly spaced by rank."""
    rows = [(rank, r) for rank, r in enumerate(outcome.per_learner) if r]
    lines = [f"{'learner':>8} {'steps':>7} {'samples/s':>10} {'compute':>8} {'comm':>7} {'update':>7} {'data':>7}"]
    picked = rows if len(rows) <= SHOWN else [rows[i * (len(rows) - 1) // (SHOWN - 1)] for i in range(SHOWN)]
    for rank, r in picked:
        elapsed = max(r["elapsed_s"], 1e-12)
        part = {kind: 100 * r.get(f"{kind}_s", 0.0) / elapsed for kind in ("compute", "comm", "update", "data")}
        cells = " ".join(f"{part[kind]:>6.1f}%" for kind in ("comm", "update", "data"))
        lines.append(f"{rank:>8} {r.get('steps', 0):>7} {r['samples_per_s']:>10.4g} {part['compute']:>7.1f}% {cells}")
    if len(picked) < len(rows):
        lines.append(f"({len(rows) - len(picked)} learners not shown)")
    return lines


def histogram(staleness: dict[int, int], width: int = 40) -> list[str]:
    """Return a histogram of the staleness of gradients."""
    total = sum(staleness.values())
    if not total or set(staleness) == {0}:
        return ["staleness: none"]
    most = max(staleness.values())
    lines = ["staleness (writes to w between a gradient's read and its update):"]
    for k in sorted(staleness)[:24]:
        lines.append(f"{k:>6} {100 * staleness[k] / total:>6.1f}% {'#' * round(width * staleness[k] / most)}")
    return lines
