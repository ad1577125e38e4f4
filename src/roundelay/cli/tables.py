"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table as Markdown."""

    def cell(x: Any) -> str:
        return "-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows])
