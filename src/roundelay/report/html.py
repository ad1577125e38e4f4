"""What all sections of the page are put together from: cards, tables, legends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from roundelay.report.run_reader import RunView
from roundelay.report.svg_charts import mark, svg

COLOURS = 8


def colour(n: int) -> int:
    return n % COLOURS


def card(inside: str, look: str = "", heading: str = "", figure: str = "") -> str:
    title = f"<h3>{escape(heading)}</h3>" if heading else ""
    name = f' data-figure="{figure}"' if figure else ""
    said = f'<p class="look"><b>What to look for:</b> {look}</p>' if look else ""
    return f'<figure class="card"{name}>{title}{inside}{said}</figure>'


def legend(runs: Sequence[RunView]) -> str:
    """Names with the colours and marks of their lines; one run needs none."""
    if len(runs) < 2:
        return ""
    keys = []
    for n, run in enumerate(runs):
        c = colour(n)
        key = svg([f'<path class="line c{c}" d="M1 7H25"/>', mark(c, 13, 7, run.name)], run.name, 26, 14)
        keys.append(f"<span>{key}{escape(run.name)}</span>")
    return f'<div class="legend">{"".join(keys)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1, *, stacks: bool = False) -> str:
    """Cells are HTML already. Columns from `numbers_from` on hold numbers. A wide one `stacks` its cells on a phone."""
    kinds = ["" if n < numbers_from else ' class="n"' for n in range(max(len(head), *map(len, rows), 0))]
    top = "".join(f'<th scope="col"{k}>{h}</th>' for h, k in zip(head, kinds, strict=False))
    body = []
    for row in rows:
        named = [f' data-name="{h}"' for h in head] if stacks else [""] * len(row)
        body.append("<tr>" + "".join(f"<td{k}{n}>{c}</td>" for c, k, n in zip(row, kinds, named, strict=False)) + "</tr>")
    kind = ' class="stacks"' if stacks else ""
    start = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table{kind}>{start}<tbody>{"".join(body)}</tbody></table></div>'


def signed(x: float) -> str:
    return f"{x:+.2f}".replace("-", "−")


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tables as key.inner."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{k}": v for k, v in value.items()}
        else:
            flat[key] = value if not isinstance(value, bool) else str(value).lower()
    return flat
