"""A page with curves: plain SVG in plain HTML, nothing to load."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#7d3c98", "#b9770e", "#566573")
WIDE, HIGH, LEFT, BOTTOM = 640, 320, 70, 50


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
    xs = [math.log10(x) for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points] + ([0.0] if from_zero else [])
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    room = (high_y - low_y or abs(high_y) or 1.0) * 0.08
    low_y, high_y = (0.0 if from_zero and low_y >= 0 else low_y - room), high_y + room

    def place(x: float, y: float) -> tuple[float, float]:
        share_x = (math.log10(x) - low_x) / ((high_x - low_x) or 1.0)
        return LEFT + share_x * (WIDE - LEFT - 20), HIGH - BOTTOM - (y - low_y) / (high_y - low_y) * (HIGH - BOTTOM - 40)

    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{html.escape(title)}</text>']
    for n in range(5):
        y = low_y + (high_y - low_y) * n / 4
        at = place(10**low_x, y)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDE - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    for x in sorted({x for points in kept.values() for x, _ in points}):
        at = place(x, low_y)[0]
        parts.append(f'<text x="{at:.1f}" y="{HIGH - BOTTOM + 18}" text-anchor="middle">{x:,.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDE) / 2}" y="{HIGH - 10}" text-anchor="middle">{html.escape(across)}</text>')
    parts.append(
        f'<text x="14" y="{HIGH / 2}" text-anchor="middle" transform="rotate(-90 14 {HIGH / 2})">{html.escape(unit)}</text>'
    )
    for number, (name, points) in enumerate(kept.items()):
        colour, line = COLOURS[number % len(COLOURS)], sorted(points)
        spots = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line))
        parts.append(f'<polyline points="{spots}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in (place(*p) for p in line)]
        parts.append(
            f'<text x="{WIDE - 20}" y="{20 + 16 * number}" text-anchor="end" fill="{colour}">{html.escape(name)}</text>'
        )
    look = f'width="{WIDE}" font-size="12" font-family="sans-serif" style="overflow:visible"'
    return f'<svg viewBox="0 0 {WIDE} {HIGH}" {look}>{"".join(parts)}</svg>'
