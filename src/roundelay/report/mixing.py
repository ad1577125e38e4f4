"""Who averages with whom, drawn: the learners on a circle with a line for every pair, and the matrix of their weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from roundelay.report.html import card, table
from roundelay.report.run_reader import RunView
from roundelay.report.svg_axes import number
from roundelay.report.svg_charts import place, svg

SIDE = 300
LOOK = (
    "on the circle, a line for every pair of learners that ever average; in the table, the mixing matrix: how much of learner "
    "j (column) learner i (row) takes in one round, on average. The larger the spectral gap, the sooner a change made by one "
    "learner has reached all."
)
MOST_LINES = 700
"""Beyond so many pairs a complete graph is drawn as a disc."""


def matrix_of(mixing: Mapping[str, Any]) -> list[list[float]]:
    """T: what share of learner j's weights learner i takes, per round; rows sum to 1. Empty where nobody averages."""
    size = len(mixing.get("nodes") or [])
    if mixing.get("kind") not in ("exchanges", "neighbors", "mean") or size < 2:
        return []
    every = float(mixing.get("every_pair") or 0.0)
    matrix = [[every] * size for _ in range(size)]
    for i, j, weight in mixing.get("weights") or []:
        matrix[int(i)][int(j)] = matrix[int(j)][int(i)] = float(weight)
    for i, row in enumerate(matrix):
        row[i] = 0.0
        row[i] = 1 - sum(row)
    return matrix


def pairs_of(mixing: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Who talks to whom, as places in `nodes`."""
    size = len(mixing.get("nodes") or [])
    if mixing.get("kind") == "server":
        return [(0, j) for j in range(1, size)]
    if mixing.get("every_pair"):
        return [(i, j) for i in range(size) for j in range(i + 1, size)]
    return [(int(i), int(j)) for i, j, _ in mixing.get("weights") or []]


def ring(mixing: Mapping[str, Any], lost: Mapping[int, Any]) -> str:
    """The learners on a circle, the first at the top; lines join those that talk."""
    nodes, size = list(mixing.get("nodes") or [0]), len(mixing.get("nodes") or [0])
    middle, radius = SIDE / 2, SIDE / 2 - 30
    dot = max(4.0, min(17.0, 0.8 * math.pi * radius / max(size, 2)))
    members = {m[0]: m for m in mixing.get("machines") or [] if m and len(m) > 1 and size < sum(map(len, mixing["machines"]))}

    def at(n: int) -> tuple[float, float]:
        angle = 2 * math.pi * n / size - math.pi / 2
        return (middle, middle) if size == 1 else (middle + radius * math.cos(angle), middle + radius * math.sin(angle))

    drawn, pairs = [], pairs_of(mixing)
    if len(pairs) > MOST_LINES:
        drawn.append(f'<circle class="disc" cx="{middle:g}" cy="{middle:g}" r="{radius:g}"/>')
        pairs = []
    thin = " thin" if len(pairs) > 60 else ""
    for i, j in pairs:
        (x1, y1), (x2, y2) = at(i), at(j)
        title = f"<title>{nodes[i]} and {nodes[j]}</title>"
        drawn.append(f'<path class="edge{thin}" d="M{place(x1)} {place(y1)}L{place(x2)} {place(y2)}">{title}</path>')
    for n, rank in enumerate(nodes):
        x, y = at(n)
        gone, inside = rank in lost, members.get(rank, [rank])
        text = f"rank {rank}" if len(inside) == 1 else f"machine of ranks {inside[0]} to {inside[-1]}"
        kind = "node gone" if gone else "node"
        title = f"<title>{text}{' (lost)' if gone else ''}</title>"
        drawn.append(f'<circle class="{kind}" cx="{place(x)}" cy="{place(y)}" r="{place(dot)}">{title}</circle>')
        if dot >= 8:
            label = str(rank) if len(inside) == 1 else f"{inside[0]}–{inside[-1]}"
            drawn.append(f'<text class="rank" x="{place(x)}" y="{place(y)}" dy=".35em" text-anchor="middle">{label}</text>')
        elif n % max(1, size // 8) == 0:
            far = (radius + dot + 10) / radius
            x, y = middle + (x - middle) * far, middle + (y - middle) * far
            drawn.append(f'<text class="tick" x="{place(x)}" y="{place(y)}" dy=".35em" text-anchor="middle">{rank}</text>')
    name = mixing.get("topology") or mixing.get("kind") or ""
    return svg(drawn, f"{size} learners, {name}: {len(pairs_of(mixing))} pairs", SIDE, SIDE)


def heat(mixing: Mapping[str, Any]) -> str:
    """The mixing matrix as a table of squares, darker where the weight is larger."""
    matrix = matrix_of(mixing)
    if not matrix:
        return ""
    nodes, size = mixing["nodes"], len(matrix)
    left, cell = 26.0, (SIDE - 32.0) / size
    largest = max(max(row) for row in matrix)
    # the value that most cells have is one square behind them all: 64 learners are 4096 cells
    common = Counter(round(w, 9) for row in matrix for w in row).most_common(1)[0][0]
    drawn = [square(left, left, cell * size, common, largest, f"{number(common, 3)} wherever nothing else is drawn")]
    for i, row in enumerate(matrix):
        for j, weight in enumerate(row):
            x, y = left + j * cell, left + i * cell
            if round(weight, 9) != common or size <= 12:
                title = f"rank {nodes[i]} takes {number(weight, 3)} of rank {nodes[j]}"
                drawn.append(square(x, y, cell, weight, largest, title, covers=common > 0))
            if size <= 8 and weight > 0:
                strong = " on" if weight > 0.55 * largest else ""
                drawn.append(
                    f'<text class="weight{strong}" x="{place(x + cell / 2)}" y="{place(y + cell / 2)}" dy=".35em" '
                    f'text-anchor="middle">{weight:.2g}</text>'
                )
    every = max(1, math.ceil(size / 12))
    for n in range(0, size, every):
        middle = place(left + (n + 0.5) * cell)
        drawn.append(f'<text class="tick" x="{middle}" y="{left - 7:g}" text-anchor="middle">{nodes[n]}</text>')
        drawn.append(f'<text class="tick" x="{left - 6:g}" y="{middle}" dy=".35em" text-anchor="end">{nodes[n]}</text>')
    return svg(drawn, f"mixing matrix of {size} learners", SIDE, SIDE)


def square(x: float, y: float, side: float, weight: float, largest: float, title: str, *, covers: bool = False) -> str:
    """Darker where the weight is larger. `covers`: what lies behind it must not shine through."""
    strength = 0.04 + 0.9 * weight / largest if weight > 0 else 0.0
    where = f'x="{place(x)}" y="{place(y)}" width="{side:.2f}" height="{side:.2f}"'
    behind = f'<rect class="blank" {where}/>' if covers else ""
    return f'{behind}<rect class="heat" {where} fill-opacity="{strength:.3f}"><title>{escape(title)}</title></rect>'


def section(runs: Sequence[RunView]) -> str:
    """A ring and a matrix for every way of averaging that occurs."""
    found: dict[str, list[RunView]] = {}
    for run in runs:
        about = run.start.get("mixing")
        if isinstance(about, Mapping) and about.get("kind") != "none":
            found.setdefault(json.dumps([about, sorted(run.lost)]), []).append(run)
    parts: list[str] = []
    for same in found.values():
        about = same[0].start["mixing"]
        heading = "Who averages with whom" + (f": {', '.join(r.name for r in same)}" if len(runs) > 1 else "")
        drawn = [ring(about, same[0].lost), heat(about), in_words(about)]
        inside = f'<div class="ringed">{"".join(f"<div>{d}</div>" for d in drawn)}</div>'
        look = LOOK if len(parts) == len(found) - 1 else ""
        parts.append(card(inside, look, heading, "mixing"))
    return "".join(parts)


def in_words(about: Mapping[str, Any]) -> str:
    kind, name, size = about.get("kind"), about.get("topology"), len(about.get("nodes") or [])
    text = {
        "exchanges": f"Topology <b>{escape(str(name))}</b>: in every round each learner averages with at most one other, in the "
        "background.",
        "neighbors": f"Topology <b>{escape(str(name))}</b>: after every step each learner averages with all its neighbours.",
        "mean": "Everybody averages with everybody: one mean over all learners.",
        "server": "Learner 0 keeps the weights; all others send it their updates and fetch what it has. There is no mixing "
        "matrix, and no gap.",
    }.get(str(kind), "")
    facts = [("learners" if size == sum(len(m) for m in about.get("machines") or []) else "machines", number(size))]
    if about.get("period"):
        facts.append(("rounds in a sweep", number(about["period"])))
    if about.get("gap") is not None:
        facts.append(("spectral gap per round", number(about["gap"])))
    if about.get("rounds_to_1_percent") is not None:
        facts.append(("rounds until 1 % is left", number(about["rounds_to_1_percent"])))
    return f"<p>{text}</p>{table([], [[k, v] for k, v in facts])}"
