"""SVG as text: elements, axes, and charts of lines, bars and intervals.

Colors and fonts come from the style sheet of the page, in light or dark. A chart is as wide as a phone screen at the size of
its labels, so it is scaled up on wide screens and hardly down on narrow ones. Marks carry their value as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

Points = list[tuple[float, float]]
WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 38
LOG_RATIO = 3.0
"""Use a logarithmic axis if the largest value is more than LOG_RATIO times the smallest."""
SHAPES = ("circle", "square", "diamond", "triangle")
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


# -- elements --------------------------------------------------------------------------------------------------------------


def coordinate(x: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{x:.1f}".removesuffix(".0")


def element(tag: str, content: str = "", **attributes: float | str) -> str:
    """Return one SVG element.

    content      markup inside the element; escape text before
    attributes   `cls` becomes class, `title` a tooltip, `_` in names `-`; numbers are formatted as coordinates
    """
    parts, title = [tag], str(attributes.pop("title", ""))
    for name, value in attributes.items():
        text = escape(value) if isinstance(value, str) else coordinate(value)
        parts.append(f'{"class" if name == "cls" else name.replace("_", "-")}="{text}"')
    inside = (f"<title>{escape(title)}</title>" if title else "") + content
    return f"<{' '.join(parts)}>{inside}</{tag}>" if inside else f"<{' '.join(parts)}/>"


def label(text: str, x: float, y: float, **attributes: float | str) -> str:
    """Return a text element; `text` is escaped."""
    return element("text", escape(text), x=x, y=y, **attributes)


def document(content: Sequence[str], title: str, width: float = WIDTH, height: float = HEIGHT, /, **attributes: str) -> str:
    """Return an SVG document. Pass xmlns for a file of its own; inside HTML it is not needed."""
    names = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"{names}>'
    return "".join([head, *content, "</svg>"])


# -- numbers ---------------------------------------------------------------------------------------------------------------


def number(x: float | None, digits: int = 4) -> str:
    """Format with `digits` significant digits: 0.1403, 7,426."""
    if x is None or math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == int(x) and abs(x) < 1e15:
        return f"{int(x):,}".replace("-", "−")
    if x and (abs(x) < 1e-3 or abs(x) >= 1e9):
        return f"{x:.{digits - 2}e}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    return f"{x:,.{decimals}f}".replace("-", "−")


def short(x: float) -> str:
    """Format a tick: 24k, 0.25, 1e−4."""
    for size, letter in PREFIXES:
        if abs(x) >= size:
            return f"{x / size:.4g}{letter}".replace("-", "−")
    if x and abs(x) < 1e-3:
        mantissa, exponent = f"{x:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    return f"{x:.6g}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Format a time: 9.5 s, 2 min 05 s, 1 h 10 min."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


# -- axes ------------------------------------------------------------------------------------------------------------------


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten between low and high."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return powers of ten between low and high, with multiples of 2, 3 or 5 if there are few of them."""
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in range(first, last + 1) for m in parts]
        inside = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
        if len(inside) <= count + 2:
            return inside if len(inside) > 2 else round_ticks(low, high, count)
    return inside[:: math.ceil(len(inside) / count)]


@dataclass(frozen=True)
class Axis:
    """Maps values in [low, high] to coordinates in [begin, end]."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, x: float) -> float:
        if self.log:
            share = math.log(x / self.low) / math.log(self.high / self.low)
        else:
            share = (x - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, count: int = 5) -> list[float]:
        return log_ticks(self.low, self.high, count) if self.log else round_ticks(self.low, self.high, count)


def axis(values: Sequence[float], begin: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """Return an axis that spans all values with a margin of 5 %. `zero` includes 0."""
    low, high = min(values), max(values)
    if log:
        if high / low < 1.5:
            low, high = low / 1.3, high * 1.3
        margin = (high / low) ** 0.04
        return Axis(low / margin, high * margin, begin, end, True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    margin = 0.05 * (high - low)
    return Axis(low if zero and low == 0 else low - margin, high if zero and high == 0 else high + margin, begin, end)


# -- charts ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One line. `color` is the number of its color; `marks` draws every point as a measurement."""

    name: str
    color: int
    points: Points
    marks: bool = False
    dashed: bool = False


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, zero: bool = False, log: bool | None = None
) -> str:
    """Return lines over common axes, or "" if there are no points.

    log    logarithmic values; points at or below 0 are left out. None: if the values span more than LOG_RATIO
    zero   include 0 in the range of values
    """
    shown = [s for s in series if s.points]
    values = [y for s in shown for _, y in s.points]
    if not values:
        return ""
    if log is None:
        log = min(values) > 0 and max(values) / min(values) > LOG_RATIO
    if log:
        shown = [replace(s, points=[p for p in s.points if p[1] > 0]) for s in shown]
        values = [y for y in values if y > 0]
        if not values:
            return ""
    xs = [x for s in shown for x, _ in s.points]
    across = Axis(axis(xs, LEFT, WIDTH - RIGHT, zero=True).low, max(xs) * 1.015 or 1.0, LEFT, WIDTH - RIGHT)
    up = axis(values, HEIGHT - BOTTOM, TOP, log=log, zero=zero)
    parts = [*grid(up), *(x_tick(short(tick), across(tick)) for tick in across.ticks()), *axis_labels(x_label, y_label)]
    for s in shown:
        if len(s.points) > 1:
            path = "M" + "L".join(f"{coordinate(across(x))} {coordinate(up(y))}" for x, y in s.points)
            parts.append(element("path", cls=f"line c{s.color}" + " dashed" * s.dashed, d=path))
        size = 3.0 if len(s.points) > 25 else 4.0
        for x, y in s.points:
            text = f"{s.name}: {number(y)} at {number(x, 3)} {x_label}"
            if s.marks or len(s.points) == 1:
                parts.append(mark(s.color, across(x), up(y), text, size))
            else:  # invisible, for the tooltip
                parts.append(element("circle", title=text, cls="touch", cx=across(x), cy=up(y), r=5))
    return document(parts, title)


def grid(up: Axis) -> list[str]:
    """Return horizontal lines and labels at the ticks of the vertical axis."""
    parts = []
    for tick in up.ticks():
        y = up(tick)
        parts.append(element("path", cls="grid", d=f"M{LEFT} {coordinate(y)}H{WIDTH - RIGHT}"))
        parts.append(label(short(tick), LEFT - 6, y, cls="tick", dy=".35em", text_anchor="end"))
    return parts


def x_tick(text: str, x: float) -> str:
    return label(text, x, HEIGHT - BOTTOM + 16, cls="tick", text_anchor="middle")


def axis_labels(x_label: str, y_label: str) -> list[str]:
    """Return the horizontal axis and the names of both axes."""
    across, up = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    turned = {"transform": f"translate(11 {up:g}) rotate(-90)", "text_anchor": "middle"}
    return [
        element("path", cls="axis", d=f"M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"),
        label(x_label, across, HEIGHT - 5, cls="label", text_anchor="middle"),
        element("text", escape(y_label), cls="label", **turned),
    ]


def mark(color: int, x: float, y: float, text: str, size: float = 4.0) -> str:
    """Return a mark whose shape depends on the color, so that colors are not needed to distinguish series."""
    shape, at = SHAPES[color % len(SHAPES)], f"{coordinate(x)} {coordinate(y)}"
    if shape == "circle":
        return element("circle", title=text, cls=f"mark c{color}", cx=x, cy=y, r=size - 0.5)
    outline = {
        "square": f"m{-size + 1:g} {-size + 1:g}h{2 * size - 2:g}v{2 * size - 2:g}h{-2 * size + 2:g}z",
        "diamond": f"m0 {-size:g}l{size:g} {size:g}l{-size:g} {size:g}l{-size:g} {-size:g}z",
        "triangle": f"m0 {-size:g}l{size:g} {1.8 * size:g}h{-2 * size:g}z",
    }[shape]
    return element("path", title=text, cls=f"mark c{color}", d=f"M{at}{outline}")


def bar_chart(groups: Sequence[tuple[str, int, list[tuple[str, float]]]], title: str, x_label: str, y_label: str) -> str:
    """Return grouped bars in percent. A group is (name, color, [(label, value)]); the longest group names the bars."""
    names = max(([name for name, _ in rows] for _, _, rows in groups), key=len, default=[])
    if not names:
        return ""
    tallest = max(value for _, _, rows in groups for _, value in rows)
    up = Axis(0.0, (tallest or 1.0) * 1.12, HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - RIGHT - LEFT) / len(names)
    parts, thick = grid(up), 0.8 * slot / len(groups)
    for at, name in enumerate(names):
        left = LEFT + at * slot
        parts.append(x_tick(name, left + slot / 2))
        for n, (group, color, rows) in enumerate(groups):
            if at >= len(rows) or not rows[at][1]:
                continue
            x, y, value = left + 0.1 * slot + n * thick, up(rows[at][1]), rows[at][1]
            tooltip = f"{group}: {number(value, 3)} % have {x_label.partition(' ')[0]} {name}"
            height = max(HEIGHT - BOTTOM - y, 0.7)
            parts.append(element("rect", title=tooltip, cls=f"bar c{color}", x=x, y=y, width=thick, height=height))
            if len(groups) == 1:
                text = number(value, 2 if value < 10 else 3)
                parts.append(label(text, x + thick / 2, y - 4, cls="value", text_anchor="middle"))
    return document([*parts, *axis_labels(x_label, y_label)], title)


def interval_chart(rows: Sequence[tuple[str, int, float, float, float]], title: str, x_label: str) -> str:
    """Return one line per row (name, color, value, low, high): a mark with its confidence interval."""
    if not rows:
        return ""
    left = min(200, 16 + 7.2 * max(len(name) for name, *_ in rows))
    height = 26 * len(rows) + 44
    across = axis([x for _, _, *three in rows for x in three], left, WIDTH - 50, zero=True)
    parts = []
    for tick in across.ticks():
        parts.append(element("path", cls="grid", d=f"M{coordinate(across(tick))} 6V{height - 34}"))
        parts.append(label(short(tick), across(tick), height - 20, cls="tick", text_anchor="middle"))
    for n, (name, color, value, low, high) in enumerate(rows):
        y = 18 + 26 * n
        cut = name if len(name) <= 26 else name[:25] + "…"
        parts.append(label(cut, left - 8, y, cls="name", dy=".35em", text_anchor="end"))
        parts.append(element("path", cls=f"whisker c{color}", d=f"M{coordinate(across(low))} {y}H{coordinate(across(high))}"))
        parts.append(mark(color, across(value), y, f"{name}: {value:.2f} ({low:.2f} to {high:.2f})", 5))
        parts.append(label(f"{value:.2f}", WIDTH - 4, y, cls="value", dy=".35em", text_anchor="end"))
    parts.append(label(x_label, (left + WIDTH - 50) / 2, height - 4, cls="label", text_anchor="middle"))
    return document(parts, title, WIDTH, height)
