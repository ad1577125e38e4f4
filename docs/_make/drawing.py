"""Timelines as SVG: bars on lanes, one lane per learner, for the pictures of strategies and of measured runs.

A picture follows the color scheme of the reader's system and has its own background, so that it is legible on any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from roundelay.report.svg import element, label

WIDTH, LEFT, RIGHT, TOP = 760, 116, 14, 40
BAR, SUB, GAP = 20, 9, 13

LIGHT = {
    "back": "#fbfbf9", "line": "#c9c9c2", "text": "#22302f", "faint": "#6a7573",
    "on": "#ffffff", "gradient": "#3f9c90", "update": "#1d5c54", "wait": "#dedfd8", "comm": "#e0873a", "exchange": "#7a55b5",
}  # fmt: skip
DARK = {
    "back": "#1e2427", "line": "#49535a", "text": "#e6ecea", "faint": "#a3aeb0",
    "on": "#0e1f1d", "gradient": "#4fb3a6", "update": "#bfe6e0", "wait": "#3a4348", "comm": "#f0a05a", "exchange": "#b79cf0",
}  # fmt: skip
NAMES = {
    "gradient": "gradient", "update": "update", "wait": "waiting", "comm": "communication", "exchange": "exchange of two learners",
}  # fmt: skip


@dataclass
class Timeline:
    """Lanes of bars. Time runs to the right, in arbitrary units."""

    title: str
    span: float
    """Units from the left edge to the right edge."""
    lanes: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Drawn last, above all lines."""
    used: set[str] = field(default_factory=set)
    ticks: Sequence[tuple[float, str]] = ()

    def x(self, t: float) -> float:
        return LEFT + t / self.span * (WIDTH - LEFT - RIGHT)

    def y(self, lane: int) -> float:
        return TOP + lane * (BAR + SUB + GAP)

    def lane(self, name: str) -> int:
        """Add a lane and return its number."""
        self.lanes.append(name)
        return len(self.lanes) - 1

    def bar(self, lane: int, begin: float, end: float, kind: str, text: str = "", *, below: bool = False) -> float:
        """Draw a bar on a lane, or on the thin track below it. Return its end."""
        last = min(end, self.span)
        if begin >= last:
            return end
        self.used.add(kind)
        x, y = self.x(begin), self.y(lane) + (BAR + 1 if below else 0)
        width, height = self.x(last) - x, SUB if below else BAR
        self.parts.append(element("rect", cls=kind, x=x, y=y, width=max(width - 0.8, 0.4), height=height, rx=2))
        if text and width > 6.2 * len(text) + 4:
            style = "on-wait" if kind == "wait" else "on-dark" if kind == "update" else "on"
            self.texts.append(label(text, x + width / 2, y + 14, cls=style, text_anchor="middle"))
        return end

    def link(
        self, a: int, b: int, t: float, kind: str, *, arrow: bool = False, end: float | None = None, below: bool = False
    ) -> None:
        """Draw a line from lane to lane, between their thin tracks if `below`. `arrow` marks only the receiving end."""
        if max(t, end or t) > self.span:
            return
        self.used.add(kind)
        middle = BAR + 1 + SUB / 2 if below else BAR / 2
        y1, y2 = self.y(a) + middle, self.y(b) + middle
        x1, x2 = self.x(t), self.x(min(t if end is None else end, self.span))
        self.parts.append(element("line", cls=f"{kind}-line", x1=x1, y1=y1, x2=x2, y2=y2))
        ends = ((x2, y2),) if arrow else ((x1, y1), (x2, y2))
        self.parts += [element("circle", cls=kind, cx=x, cy=y, r=4) for x, y in ends]

    def note(self, lane: int, t: float, text: str) -> None:
        """Write text on a lane."""
        self.texts.append(label(text, self.x(t), self.y(lane) + 14, cls="small"))

    def svg(self) -> str:
        """Return the SVG file."""
        bottom = self.y(len(self.lanes))
        height, base, x = bottom + 30, bottom + 12, float(LEFT)
        legend = []
        for kind in (k for k in NAMES if k in self.used):
            legend.append(element("rect", cls=kind, x=x, y=base - 9, width=11, height=11, rx=2))
            legend.append(label(NAMES[kind], x + 16, base, cls="small"))
            x += 34 + 6.4 * len(NAMES[kind])
        if not self.ticks:
            legend.append(label("time →", WIDTH - RIGHT, base, cls="small", text_anchor="end"))
        names = [label(name, 12, self.y(n) + 14, cls="name") for n, name in enumerate(self.lanes)]
        rules = [
            element("line", cls="rule", x1=LEFT, y1=self.y(n) + BAR, x2=WIDTH - RIGHT, y2=self.y(n) + BAR)
            for n, name in enumerate(self.lanes)
            if name
        ]
        marks = [label(text, self.x(t), TOP - 6, cls="small", text_anchor="middle") for t, text in self.ticks]
        size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style_sheet()}</style>",
                element("rect", cls="back", width=WIDTH, height=height, rx=6),
                label(self.title, 12, 19, cls="title"),
                *names, *rules, *self.parts, *self.texts, *marks, *legend,
                "</svg>\n",
            ]
        )  # fmt: skip


def style_sheet() -> str:
    """Return the style sheet for light and dark."""

    def rules(colors: dict[str, str]) -> str:
        fills = "".join(f".{k}{{fill:{colors[k]}}}" for k in ("back", *NAMES))
        lines = "".join(f".{k}-line{{stroke:{colors[k]};stroke-width:2}}" for k in ("exchange", "comm"))
        texts = f".title,.name{{fill:{colors['text']}}}.small,.on-wait{{fill:{colors['faint']}}}"
        texts += f".on{{fill:{colors['on']}}}.on-dark{{fill:{colors['back']}}}"
        return f"{fills}{lines}{texts}.rule{{stroke:{colors['line']};stroke-width:1}}"

    fonts = "text{font:11px system-ui,sans-serif}.title{font-weight:600;font-size:12.5px}.name{font-size:12px}.small{font-size:10.5px}"
    return f"{fonts}{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}"
