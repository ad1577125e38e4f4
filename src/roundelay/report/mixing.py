"""The mixing section: learners on a circle with a line per averaging pair, the mixing matrix, gradients without an exchange."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from roundelay.metrics.gaps import quantile
from roundelay.report import series
from roundelay.report.html import card, color, legend, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg import bar_chart, coordinate, document, element, label, number

SIDE = 300
HINT = (
    "Left: a line joins learners that average with each other. Right: the mixing matrix, the mean weight of learner j (column) "
    "in the average of learner i (row) per round. The larger the spectral gap, the faster an update of one learner reaches all."
)
GAP_HINT = (
    "A run is the gradients of a learner in a row without an exchange; its length is 0 where an exchange follows every "
    "gradient. Lengths below steps_per_exchange are normal. A long tail means that a learner trains alone for some time: its "
    "partners or its connections to them are too slow. Compare it with the consensus distance."
)
MAX_LINES = 700
"""A graph with more than MAX_LINES pairs is drawn as a disc."""


def matrix_of(mixing: Mapping[str, Any]) -> list[list[float]]:
    """Return T: the weight of learner j in the average of learner i per round. Rows sum to 1. Empty without averaging."""
    size = len(mixing.get("nodes") or [])
    if mixing.get("kind") not in ("exchanges", "neighbors", "mean") or size < 2:
        return []
    uniform = float(mixing.get("every_pair") or 0.0)
    matrix = [[uniform] * size for _ in range(size)]
    for i, j, weight in mixing.get("weights") or []:
        matrix[int(i)][int(j)] = matrix[int(j)][int(i)] = float(weight)
    for i, row in enumerate(matrix):
        row[i] = 0.0
        row[i] = 1 - sum(row)
    return matrix


def pairs_of(mixing: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the communicating pairs as indices into `nodes`."""
    size = len(mixing.get("nodes") or [])
    if mixing.get("kind") == "server":
        return [(0, j) for j in range(1, size)]
    if mixing.get("every_pair"):
        return [(i, j) for i in range(size) for j in range(i + 1, size)]
    return [(int(i), int(j)) for i, j, _ in mixing.get("weights") or []]


def ring(mixing: Mapping[str, Any], lost: Mapping[int, Any]) -> str:
    """Return the learners on a circle, the first at the top, with a line per communicating pair."""
    nodes, size = list(mixing.get("nodes") or [0]), len(mixing.get("nodes") or [0])
    middle, radius = SIDE / 2, SIDE / 2 - 30
    dot = max(4.0, min(17.0, 0.8 * math.pi * radius / max(size, 2)))
    members = {m[0]: m for m in mixing.get("machines") or [] if m and len(m) > 1 and size < sum(map(len, mixing["machines"]))}

    def at(n: int) -> tuple[float, float]:
        angle = 2 * math.pi * n / size - math.pi / 2
        return (middle, middle) if size == 1 else (middle + radius * math.cos(angle), middle + radius * math.sin(angle))

    parts, pairs = [], pairs_of(mixing)
    if len(pairs) > MAX_LINES:
        parts.append(element("circle", cls="disc", cx=middle, cy=middle, r=radius))
        pairs = []
    thin = " thin" if len(pairs) > 60 else ""
    for i, j in pairs:
        (x1, y1), (x2, y2) = at(i), at(j)
        path = f"M{coordinate(x1)} {coordinate(y1)}L{coordinate(x2)} {coordinate(y2)}"
        parts.append(element("path", title=f"{nodes[i]} and {nodes[j]}", cls=f"edge{thin}", d=path))
    for n, rank in enumerate(nodes):
        x, y = at(n)
        ranks = members.get(rank, [rank])
        title = f"rank {rank}" if len(ranks) == 1 else f"node of ranks {ranks[0]} to {ranks[-1]}"
        kind, title = ("node gone", f"{title} (lost)") if rank in lost else ("node", title)
        parts.append(element("circle", title=title, cls=kind, cx=x, cy=y, r=dot))
        if dot >= 8:
            text = str(rank) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
            parts.append(label(text, x, y, cls="rank", dy=".35em", text_anchor="middle"))
        elif n % max(1, size // 8) == 0:
            outside = (radius + dot + 10) / radius
            x, y = middle + (x - middle) * outside, middle + (y - middle) * outside
            parts.append(label(str(rank), x, y, cls="tick", dy=".35em", text_anchor="middle"))
    name = mixing.get("topology") or mixing.get("kind") or ""
    return document(parts, f"{size} learners, {name}: {len(pairs_of(mixing))} pairs", SIDE, SIDE)


def heat(mixing: Mapping[str, Any]) -> str:
    """Return the mixing matrix as squares, darker for larger weights."""
    matrix = matrix_of(mixing)
    if not matrix:
        return ""
    nodes, size = mixing["nodes"], len(matrix)
    left, cell = 26.0, (SIDE - 32.0) / size
    largest = max(max(row) for row in matrix)
    # The most common value is one square behind all cells: 64 learners have 4096 cells.
    common = Counter(round(w, 9) for row in matrix for w in row).most_common(1)[0][0]
    parts = [square(left, left, cell * size, common, largest, f"{number(common, 3)} for all other pairs")]
    for i, row in enumerate(matrix):
        for j, weight in enumerate(row):
            x, y = left + j * cell, left + i * cell
            if round(weight, 9) != common or size <= 12:
                title = f"weight of rank {nodes[j]} in the average of rank {nodes[i]}: {number(weight, 3)}"
                parts.append(square(x, y, cell, weight, largest, title, covers=common > 0))
            if size <= 8 and weight > 0:
                strong = " on" if weight > 0.55 * largest else ""
                at = {"cls": f"weight{strong}", "dy": ".35em", "text_anchor": "middle"}
                parts.append(label(f"{weight:.2g}", x + cell / 2, y + cell / 2, **at))
    every = max(1, math.ceil(size / 12))
    for n in range(0, size, every):
        middle = left + (n + 0.5) * cell
        parts.append(label(str(nodes[n]), middle, left - 7, cls="tick", text_anchor="middle"))
        parts.append(label(str(nodes[n]), left - 6, middle, cls="tick", dy=".35em", text_anchor="end"))
    return document(parts, f"mixing matrix of {size} learners", SIDE, SIDE)


def square(x: float, y: float, side: float, weight: float, largest: float, title: str, *, covers: bool = False) -> str:
    """Return a square whose opacity grows with the weight. `covers` hides what is behind it."""
    opacity = 0.04 + 0.9 * weight / largest if weight > 0 else 0.0
    at = {"x": coordinate(x), "y": coordinate(y), "width": f"{side:.2f}", "height": f"{side:.2f}"}
    behind = element("rect", cls="blank", **at) if covers else ""
    return behind + element("rect", title=title, cls="heat", **at, fill_opacity=f"{opacity:.3f}")


def section(runs: Sequence[RunView]) -> str:
    """Return a ring and a matrix for every distinct topology of the runs, and the gradients without an exchange."""
    groups: dict[str, list[RunView]] = {}
    for run in runs:
        mixing = run.start.get("mixing")
        if isinstance(mixing, Mapping) and mixing.get("kind") != "none":
            groups.setdefault(json.dumps([mixing, sorted(run.lost)]), []).append(run)
    parts: list[str] = []
    for same in groups.values():
        mixing = same[0].start["mixing"]
        heading = "Averaging between learners" + (f": {', '.join(r.name for r in same)}" if len(runs) > 1 else "")
        columns = [ring(mixing, same[0].lost), heat(mixing), in_words(mixing)]
        content = f'<div class="ringed">{"".join(f"<div>{column}</div>" for column in columns)}</div>'
        hint = HINT if len(parts) == len(groups) - 1 else ""
        parts.append(card(content, hint, heading, "mixing"))
    return "".join([*parts, gaps(runs)])


def gaps(runs: Sequence[RunView]) -> str:
    """Return how often learners exchange weights: runs of gradients without an exchange by length. "" without gossip."""
    bars, rows = [], []
    for n, run in enumerate(runs):
        lengths, ratio = series.gap_lengths(run), series.exchanges_per_gradient(run)
        if lengths and ratio is not None:
            bars.append((run.name, color(n), series.percentages(lengths)))
            rows.append([escape(run.name), number(ratio, 3), number(max(lengths)), number(quantile(lengths, 0.99))])
    if not bars:
        return ""
    if len(runs) == 1:
        names = [
            "exchanges per gradient",
            "longest run of gradients without an exchange",
            "99 % of the runs are at most this long",
        ]
        numbers = table([], [list(row) for row in zip(names, rows[0][1:], strict=True)])
    else:
        numbers = table(["run", "exchanges per gradient", "longest run", "99 % of runs at most"], rows, stacks=True)
    axes = ("length of a run (8+: from 8 to 15, and so on)", "% of runs")
    chart = bar_chart(bars, "runs of gradients without an exchange by length", *axes)
    content = f'<div class="pair uneven"><div>{chart}</div><div>{numbers}</div></div>'
    return card(legend(runs) + content, GAP_HINT, "Gradients without an exchange", "exchange-gaps")


def in_words(mixing: Mapping[str, Any]) -> str:
    """Return a sentence about the strategy's averaging, and a table of its numbers."""
    kind, name, size = mixing.get("kind"), mixing.get("topology"), len(mixing.get("nodes") or [])
    text = {
        "exchanges": f"Topology <b>{escape(str(name))}</b>: in every round each learner averages with at most one other "
        "learner, in the background.",
        "neighbors": f"Topology <b>{escape(str(name))}</b>: after every step each learner averages with all its neighbors.",
        "mean": "All learners average with each other: one mean over all learners.",
        "server": "Learner 0 holds the weights. All other learners send it their updates and fetch its weights. There is "
        "no mixing matrix and no spectral gap.",
    }.get(str(kind), "")
    facts = [("learners" if size == sum(len(m) for m in mixing.get("machines") or []) else "nodes", number(size))]
    if mixing.get("period"):
        facts.append(("rounds per sweep", number(mixing["period"])))
    if mixing.get("gap") is not None:
        facts.append(("spectral gap per round", number(mixing["gap"])))
    if mixing.get("rounds_to_1_percent") is not None:
        facts.append(("rounds until 1 % of the distance is left", number(mixing["rounds_to_1_percent"])))
    return f"<p>{text}</p>{table([], [[k, v] for k, v in facts])}"
