"""Building blocks of the page: cards, tables, legends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from roundelay.report.run_reader import RunView
from roundelay.report.svg import document, element, mark

COLORS = 8


def color(n: int) -> int:
    """Return the number of the color of the n-th run."""
    return n % COLORS


def card(content: str, hint: str = "", heading: str = "", figure: str = "") -> str:
    """Return a figure with a heading and a hint on how to read it. `figure` names it for tests and scripts."""
    title = f"<h3>{escape(heading)}</h3>" if heading else ""
    name = f' data-figure="{escape(figure)}"' if figure else ""
    caption = f'<p class="look"><b>What to look for:</b> {hint}</p>' if hint else ""
    return f'<figure class="card"{name}>{title}{content}{caption}</figure>'


def attribute(markup: str) -> str:
    """Return text that is already escaped as the value of an attribute."""
    return markup.replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def legend(runs: Sequence[RunView]) -> str:
    """Return the names of the runs with the colors and marks of their lines, or "" for one run."""
    if len(runs) < 2:
        return ""
    keys = []
    for n, run in enumerate(runs):
        line = element("path", cls=f"line c{color(n)}", d="M1 7H25")
        key = document([line, mark(color(n), 13, 7, run.name)], run.name, 26, 14)
        keys.append(f"<span>{key}{escape(run.name)}</span>")
    return f'<div class="legend">{"".join(keys)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1, *, stacks: bool = False) -> str:
    """Return a table. Cells are HTML; columns from `numbers_from` on hold numbers; `stacks` stacks the cells on a phone."""
    kinds = ["" if n < numbers_from else ' class="n"' for n in range(max(len(head), *map(len, rows), 0))]
    top = "".join(f'<th scope="col"{k}>{h}</th>' for h, k in zip(head, kinds, strict=False))
    body = []
    for row in rows:
        names = [f' data-name="{attribute(h)}"' for h in head] if stacks else [""] * len(row)
        body.append("<tr>" + "".join(f"<td{k}{n}>{c}</td>" for c, k, n in zip(row, kinds, names, strict=False)) + "</tr>")
    kind = ' class="stacks"' if stacks else ""
    start = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table{kind}>{start}<tbody>{"".join(body)}</tbody></table></div>'


def signed(x: float) -> str:
    return f"{x:+.2f}".replace("-", "−")


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the keys of tables written as table.key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{k}": v for k, v in value.items()}
        else:
            flat[key] = value if not isinstance(value, bool) else str(value).lower()
    return flat
