"""Strips on lanes, drawn alike: what the pictures of strategies and of measured runs are made of.

A picture follows the reader's system into light or dark by itself, and has its own background, so that it can be read on any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LEFT, RIGHT, TOP = 760, 116, 14, 40
BAR, SUB, GAP = 20, 9, 13

LIGHT = {
    "back": "#fbfbf9", "line": "#c9c9c2", "text": "#22302f", "faint": "#6a7573",
    "on": "#ffffff", "gradient": "#3f9c90", "move": "#1d5c54", "wait": "#dedfd8", "comm": "#e0873a", "meet": "#7a55b5",
}  # fmt: skip
DARK = {
    "back": "#1e2427", "line": "#49535a", "text": "#e6ecea", "faint": "#a3aeb0",
    "on": "#0e1f1d", "gradient": "#4fb3a6", "move": "#bfe6e0", "wait": "#3a4348", "comm": "#f0a05a", "meet": "#b79cf0",
}  # fmt: skip
NAMES = {"gradient": "gradient", "move": "update", "wait": "waiting", "comm": "vectors travel", "meet": "exchange of two"}


@dataclass
class Picture:
    """Lanes of strips; time runs to the right in units of its own."""

    title: str
    span: float
    """Units from the left edge to the right one."""
    lanes: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Drawn last, so that no line crosses them."""
    used: set[str] = field(default_factory=set)
    ticks: Sequence[tuple[float, str]] = ()

    def x(self, t: float) -> float:
        return LEFT + t / self.span * (WIDTH - LEFT - RIGHT)

    def y(self, lane: int) -> float:
        return TOP + lane * (BAR + SUB + GAP)

    def lane(self, name: str) -> int:
        self.lanes.append(name)
        return len(self.lanes) - 1

    def bar(self, lane: int, begin: float, end: float, kind: str, text: str = "", *, below: bool = False) -> float:
        """A strip on a lane (or on the thin track below it); returns its end."""
        last = min(end, self.span)
        if begin >= last:
            return end
        self.used.add(kind)
        x, y = self.x(begin), self.y(lane) + (BAR + 1 if below else 0)
        wide, high = self.x(last) - x, SUB if below else BAR
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(wide - 0.8, 0.4):.1f}" height="{high}" rx="2"/>'
        )
        if text and wide > 6.2 * len(text) + 4:
            faint = "on-wait" if kind == "wait" else "on-dark" if kind == "move" else "on"
            self.words.append(
                f'<text class="{faint}" x="{x + wide / 2:.1f}" y="{y + 14:.1f}" text-anchor="middle">{escape(text)}</text>'
            )
        return end

    def link(
        self, a: int, b: int, t: float, kind: str, *, arrow: bool = False, end: float | None = None, below: bool = False
    ) -> None:
        """A line from lane to lane, between their thin tracks if `below`; one dot where something is sent one way."""
        if max(t, end or t) > self.span:
            return
        self.used.add(kind)
        middle = BAR + 1 + SUB / 2 if below else BAR / 2
        y1, y2 = self.y(a) + middle, self.y(b) + middle
        x1, x2 = self.x(t), self.x(min(t if end is None else end, self.span))
        self.parts.append(f'<line class="{kind}-line" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        ends = ((x2, y2),) if arrow else ((x1, y1), (x2, y2))
        for x, y in ends:
            self.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')

    def note(self, lane: int, t: float, text: str) -> None:
        """Words on a lane."""
        self.words.append(f'<text class="small" x="{self.x(t):.1f}" y="{self.y(lane) + 14:.1f}">{escape(text)}</text>')

    def svg(self) -> str:
        height = self.y(len(self.lanes)) + 30
        legend, x = [], float(LEFT)
        base = self.y(len(self.lanes)) + 12
        for kind in (k for k in NAMES if k in self.used):
            legend.append(f'<rect class="{kind}" x="{x:.0f}" y="{base - 9:.0f}" width="11" height="11" rx="2"/>')
            legend.append(f'<text class="small" x="{x + 16:.0f}" y="{base:.0f}">{NAMES[kind]}</text>')
            x += 34 + 6.4 * len(NAMES[kind])
        if not self.ticks:
            legend.append(f'<text class="small" x="{WIDTH - RIGHT}" y="{base:.0f}" text-anchor="end">time →</text>')
        names = [
            f'<text class="name" x="12" y="{self.y(n) + 14:.0f}">{escape(name)}</text>' for n, name in enumerate(self.lanes)
        ]
        rules = [
            f'<line class="rule" x1="{LEFT}" y1="{self.y(n) + BAR:.0f}" x2="{WIDTH - RIGHT}" y2="{self.y(n) + BAR:.0f}"/>'
            for n, name in enumerate(self.lanes)
            if name
        ]
        marks = [
            f'<text class="small" x="{self.x(t):.1f}" y="{TOP - 6}" text-anchor="middle">{escape(text)}</text>'
            for t, text in self.ticks
        ]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style()}</style>",
                f'<rect class="back" width="{WIDTH}" height="{height:.0f}" rx="6"/>',
                f'<text class="title" x="12" y="19">{escape(self.title)}</text>',
                *names, *rules, *self.parts, *self.words, *marks, *legend,
                "</svg>\n",
            ]
        )  # fmt: skip


def style() -> str:
    def colours(of: dict[str, str]) -> str:
        fills = "".join(f".{k}{{fill:{of[k]}}}" for k in ("back", *NAMES))
        lines = f".meet-line{{stroke:{of['meet']};stroke-width:2}}.comm-line{{stroke:{of['comm']};stroke-width:2}}"
        texts = f".title,.name{{fill:{of['text']}}}.small,.on-wait{{fill:{of['faint']}}}.on{{fill:{of['on']}}}.on-dark{{fill:{of['back']}}}"
        return f"{fills}{lines}{texts}.rule{{stroke:{of['line']};stroke-width:1}}"

    fonts = "text{font:11px system-ui,sans-serif}.title{font-weight:600;font-size:12.5px}.name{font-size:12px}.small{font-size:10.5px}"
    return f"{fonts}{colours(LIGHT)}@media(prefers-color-scheme:dark){{{colours(DARK)}}}"
