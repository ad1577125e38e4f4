"""Charts over a logarithmic axis as SVG, and an HTML page of them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from roundelay.report.svg import axis, document, element, label, short

Points = Sequence[tuple[float, float]]
COLORS = ("#c0392b", "#2471a3", "#1e8449", "#7d3c98", "#b9770e", "#566573")
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 280, 70, 50
MAX_TICKS = 6
"""Label each x value if there are at most MAX_TICKS of them; otherwise label round numbers."""


def page(path: Path, title: str, text: str, charts: Sequence[str]) -> None:
    """Write an HTML page with a title, a paragraph and charts."""
    body = f"<h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>" + "".join(charts)
    style = "body{font:15px sans-serif;max-width:700px;margin:2em auto}svg{display:block;margin:1em 0 2em}"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>{body}")


def chart(title: str, unit: str, curves: dict[str, Points], *, across: str, from_zero: bool = False) -> str:
    """Return curves over a logarithmic x axis. Points without a finite value are left out."""
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    values = [x for points in kept.values() for x, _ in points]
    names_height = 16 * len(kept)  # the names of the curves are above the plot
    height = HEIGHT + names_height
    right, top, bottom = WIDTH - 20, 20 + names_height, height - BOTTOM
    x_axis = axis(values, LEFT, right, log=True)
    y_axis = axis([y for points in kept.values() for _, y in points], bottom, top, zero=from_zero)
    parts = [label(title, LEFT, 20, font_weight="bold")]
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(element("line", x1=LEFT, x2=right, y1=y, y2=y, stroke="#ddd"))
        parts.append(label(short(tick), LEFT - 6, y + 4, text_anchor="end"))
    distinct = sorted(set(values))
    for tick in distinct if len(distinct) <= MAX_TICKS else x_axis.ticks():
        parts.append(label(short(tick), x_axis(tick), bottom + 18, text_anchor="middle"))
    parts.append(label(across, (LEFT + WIDTH) / 2, height - 10, text_anchor="middle"))
    parts.append(label(unit, 14, height / 2, text_anchor="middle", transform=f"rotate(-90 14 {height / 2})"))
    for number, (name, points) in enumerate(kept.items()):
        color, line = COLORS[number % len(COLORS)], [(x_axis(x), y_axis(y)) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(element("polyline", points=path, fill="none", stroke=color, stroke_width=2))
        parts += [element("circle", cx=x, cy=y, r=3, fill=color) for x, y in line]
        parts.append(label(name, right, 20 + 16 * number, text_anchor="end", fill=color))
    look = {"width": str(WIDTH), "font-size": "12", "font-family": "sans-serif", "style": "overflow:visible"}
    return document(parts, title, WIDTH, height, **look)
