"""Charts as SVG text: lines, bars, intervals. Colours and fonts come from the page's style sheet: light or dark.

The width of the drawing is that of a phone's screen in the units of its letters: it is scaled up on wide screens, hardly
down on narrow ones. Every mark carries its number as a title, which browsers show when it is pointed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from roundelay.report.series import Points
from roundelay.report.svg_axes import Axis, axis, number, short

WIDE, HIGH = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 38
LOG_FROM = 3.0
"""Losses whose largest is so many times their smallest are drawn on a logarithmic axis."""
SHAPES = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Series:
    """One line: its name, the number of its colour, its points; with marks where each point is a measurement of its own."""

    name: str
    colour: int
    points: Points
    marks: bool = False
    dashed: bool = False


def svg(inside: Sequence[str], title: str, wide: float = WIDE, high: float = HIGH) -> str:
    head = f'<svg viewBox="0 0 {wide:g} {high:g}" role="img" aria-label="{escape(title)}">'
    return "".join([head, *inside, "</svg>"])


def place(x: float) -> str:
    """A coordinate, short."""
    return f"{x:.1f}".removesuffix(".0")


def lines(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, zero: bool = False, log: bool | None = None
) -> str:
    """Curves over a common pair of axes; an empty string where there is nothing to draw."""
    shown = [s for s in series if s.points]
    values = [y for s in shown for _, y in s.points]
    if not values:
        return ""
    if log is None:
        log = min(values) > 0 and max(values) / min(values) > LOG_FROM
    if log:  # what is 0 has no place on such an axis; the caller says so
        shown = [Series(s.name, s.colour, [p for p in s.points if p[1] > 0], s.marks, s.dashed) for s in shown]
        values = [y for y in values if y > 0]
        if not values:
            return ""
    across = axis([x for s in shown for x, _ in s.points], LEFT, WIDE - RIGHT, zero=True)
    across = Axis(across.low, max(x for s in shown for x, _ in s.points) * 1.015 or 1.0, LEFT, WIDE - RIGHT)
    up = axis(values, HIGH - BOTTOM, TOP, log=log, zero=zero)
    drawn = frame(across, up, x_label, y_label)
    for s in shown:
        if len(s.points) > 1:
            path = "M" + "L".join(f"{place(across(x))} {place(up(y))}" for x, y in s.points)
            dashed = " dashed" if s.dashed else ""
            drawn.append(f'<path class="line c{s.colour}{dashed}" d="{path}"/>')
        small = 3.0 if len(s.points) > 25 else 4.0
        for x, y in s.points:
            at, text = (across(x), up(y)), f"{s.name}: {number(y)} at {number(x, 3)} {x_label}"
            drawn.append(mark(s.colour, *at, text, small) if s.marks or len(s.points) == 1 else touch(*at, text))
    return svg(drawn, title)


def frame(across: Axis, up: Axis, x_label: str, y_label: str) -> list[str]:
    """Grid, ticks and names of the axes."""
    ticks = [
        f'<text class="tick" x="{place(across(tick))}" y="{HIGH - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        for tick in across.ticks()
    ]
    return [*levels(up), *ticks, *names_of_axes(x_label, y_label)]


def levels(up: Axis) -> list[str]:
    """Lines across at the round values."""
    drawn = []
    for tick in up.ticks():
        y = place(up(tick))
        drawn.append(f'<path class="grid" d="M{LEFT} {y}H{WIDE - RIGHT}"/>')
        drawn.append(f'<text class="tick" x="{LEFT - 6}" y="{y}" dy=".35em" text-anchor="end">{short(tick)}</text>')
    return drawn


def names_of_axes(x_label: str, y_label: str) -> list[str]:
    across, up = (LEFT + WIDE - RIGHT) / 2, (TOP + HIGH - BOTTOM) / 2
    return [
        f'<path class="axis" d="M{LEFT} {HIGH - BOTTOM}H{WIDE - RIGHT}"/>',
        f'<text class="label" x="{across:g}" y="{HIGH - 5}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text class="label" transform="translate(11 {up:g}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]


def mark(colour: int, x: float, y: float, text: str, size: float = 4.0) -> str:
    """A mark of the colour's own shape, so that colours need not be told apart."""
    title = f"<title>{escape(text)}</title>"
    shape, at = SHAPES[colour % len(SHAPES)], f"{place(x)} {place(y)}"
    if shape == "circle":
        return f'<circle class="mark c{colour}" cx="{place(x)}" cy="{place(y)}" r="{size - 0.5:g}">{title}</circle>'
    outline = {
        "square": f"m{-size + 1:g} {-size + 1:g}h{2 * size - 2:g}v{2 * size - 2:g}h{-2 * size + 2:g}z",
        "diamond": f"m0 {-size:g}l{size:g} {size:g}l{-size:g} {size:g}l{-size:g} {-size:g}z",
        "triangle": f"m0 {-size:g}l{size:g} {1.8 * size:g}h{-2 * size:g}z",
    }[shape]
    return f'<path class="mark c{colour}" d="M{at}{outline}">{title}</path>'


def touch(x: float, y: float, text: str) -> str:
    """An invisible spot that shows its number when pointed at."""
    return f'<circle class="touch" cx="{place(x)}" cy="{place(y)}" r="5"><title>{escape(text)}</title></circle>'


def bars(groups: Sequence[tuple[str, int, list[tuple[str, float]]]], title: str, x_label: str, y_label: str) -> str:
    """Bars side by side; each group is (name, colour, [(label, value)]) and the labels are those of the longest."""
    labels = max(([label for label, _ in rows] for _, _, rows in groups), key=len, default=[])
    if not labels:
        return ""
    tallest = max(value for _, _, rows in groups for _, value in rows)
    up = Axis(0.0, (tallest or 1.0) * 1.12, HIGH - BOTTOM, TOP)
    wide = (WIDE - RIGHT - LEFT) / len(labels)
    drawn = levels(up)
    thick = 0.8 * wide / len(groups)
    for at, label in enumerate(labels):
        left = LEFT + at * wide
        drawn.append(
            f'<text class="tick" x="{place(left + wide / 2)}" y="{HIGH - BOTTOM + 16}" text-anchor="middle">{label}</text>'
        )
        for n, (name, colour, rows) in enumerate(groups):
            if at >= len(rows) or not rows[at][1]:
                continue
            x, y, value = left + 0.1 * wide + n * thick, up(rows[at][1]), rows[at][1]
            text = f"{name}: {number(value, 3)} % have staleness {label}"
            drawn.append(
                f'<rect class="bar c{colour}" x="{place(x)}" y="{place(y)}" width="{place(thick)}" '
                f'height="{place(max(HIGH - BOTTOM - y, 0.7))}"><title>{escape(text)}</title></rect>'
            )
            if len(groups) == 1:
                drawn.append(
                    f'<text class="value" x="{place(x + thick / 2)}" y="{place(y - 4)}" text-anchor="middle">'
                    f"{number(value, 2 if value < 10 else 3)}</text>"
                )
    drawn += names_of_axes(x_label, y_label)
    return svg(drawn, title)


def intervals(rows: Sequence[tuple[str, int, float, float, float]], title: str, x_label: str) -> str:
    """One line per row (label, colour, value, low, high): a mark with its interval."""
    if not rows:
        return ""
    left = min(200, 16 + 7.2 * max(len(label) for label, *_ in rows))
    high = 26 * len(rows) + 44
    across = axis([x for _, _, *three in rows for x in three], left, WIDE - 50, zero=True)
    drawn = []
    for tick in across.ticks():
        x = place(across(tick))
        drawn.append(f'<path class="grid" d="M{x} 6V{high - 34}"/>')
        drawn.append(f'<text class="tick" x="{x}" y="{high - 20}" text-anchor="middle">{short(tick)}</text>')
    for n, (label, colour, value, low, top) in enumerate(rows):
        y = 18 + 26 * n
        short_label = label if len(label) <= 26 else label[:25] + "…"
        drawn.append(f'<text class="name" x="{left - 8:g}" y="{y}" dy=".35em" text-anchor="end">{escape(short_label)}</text>')
        drawn.append(f'<path class="whisker c{colour}" d="M{place(across(low))} {y}H{place(across(top))}"/>')
        drawn.append(mark(colour, across(value), y, f"{label}: {value:.2f} ({low:.2f} to {top:.2f})", 5))
        drawn.append(f'<text class="value" x="{WIDE - 4}" y="{y}" dy=".35em" text-anchor="end">{value:.2f}</text>')
    drawn.append(
        f'<text class="label" x="{(left + WIDE - 50) / 2:g}" y="{high - 4}" text-anchor="middle">{escape(x_label)}</text>'
    )
    return svg(drawn, title, WIDE, high)
