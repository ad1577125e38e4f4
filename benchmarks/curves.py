"""A page with curves: plain SVG in plain HTML, nothing to load."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from roundelay.report.svg_axes import axis, short

Points = Sequence[tuple[float, float]]
COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#7d3c98", "#b9770e", "#566573")
WIDE, HIGH, LEFT, BOTTOM = 640, 280, 70, 50
MOST_TICKS = 6
"""So many different places at most are named one by one; above that round numbers are."""


def page(path: Path, title: str, text: str, charts: Sequence[str]) -> None:
    body = f"<h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>" + "".join(charts)
    style = "body{font:15px sans-serif;max-width:700px;margin:2em auto}svg{display:block;margin:1em 0 2em}"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>{body}")


def chart(title: str, unit: str, curves: dict[str, Points], *, across: str, from_zero: bool = False) -> str:
    """Curves over a logarithmic axis; points without a value are left out."""
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    values = [x for points in kept.values() for x, _ in points]
    names_high = 16 * len(kept)  # the names stand above the curves, whatever way those go
    high = HIGH + names_high
    right, top, bottom = WIDE - 20, 20 + names_high, high - BOTTOM
    x_axis = axis(values, LEFT, right, log=True)
    y_axis = axis([y for points in kept.values() for _, y in points], bottom, top, zero=from_zero)
    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{html.escape(title)}</text>']
    for y in y_axis.ticks():
        at = y_axis(y)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short(y)}</text>')
    few = sorted(set(values))
    for x in few if len(few) <= MOST_TICKS else x_axis.ticks():
        parts.append(f'<text x="{x_axis(x):.1f}" y="{bottom + 18}" text-anchor="middle">{short(x)}</text>')
    parts.append(f'<text x="{(LEFT + WIDE) / 2}" y="{high - 10}" text-anchor="middle">{html.escape(across)}</text>')
    parts.append(
        f'<text x="14" y="{high / 2}" text-anchor="middle" transform="rotate(-90 14 {high / 2})">{html.escape(unit)}</text>'
    )
    for number, (name, points) in enumerate(kept.items()):
        colour, line = COLOURS[number % len(COLOURS)], [(x_axis(x), y_axis(y)) for x, y in sorted(points)]
        spots = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{spots}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in line]
        parts.append(f'<text x="{right}" y="{20 + 16 * number}" text-anchor="end" fill="{colour}">{html.escape(name)}</text>')
    look = f'width="{WIDE}" font-size="12" font-family="sans-serif" style="overflow:visible"'
    return f'<svg viewBox="0 0 {WIDE} {high}" {look}>{"".join(parts)}</svg>'
