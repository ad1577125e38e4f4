"""Output of commands that live outside `roundelay.cli`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def emit(text: str) -> None:
    """Print the result of a command: one table, or one JSON document."""
    print(text, flush=True)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as a Markdown table. Floats get 4 significant digits, None becomes a dash."""

    def cell(x: Any) -> str:
        return "-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows])
