"""Functions that the benchmarks share: command lines, progress lines, charts."""

from __future__ import annotations

import argparse
import html
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from roundelay.core import interrupts
from roundelay.errors import UsageError, did_you_mean
from roundelay.log import configure
from roundelay.report.svg import Series, line_chart

Points = Sequence[tuple[float, float]]
COLORS = ("#c0392b", "#2471a3", "#1e8449", "#7d3c98", "#b9770e", "#566573")
STYLE = "".join(f".line.c{n}{{stroke:{c}}}.mark.c{n}{{fill:{c}}}.name.c{n}{{fill:{c}}}" for n, c in enumerate(COLORS)) + (
    ".line{fill:none;stroke-width:1.5}.grid{stroke:#ddd}.axis{stroke:#888}.touch{fill:none}text{font:10px sans-serif;fill:#333}"
)


def parser(name: str, doc: str | None, example: str, *, raw: bool = True) -> argparse.ArgumentParser:
    """Create the parser of a benchmark with the option --json."""
    command = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter if raw else argparse.HelpFormatter,
        epilog=f"example: {example}",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def log(text: str) -> None:
    """Print a progress line to standard error."""
    print(text, file=sys.stderr, flush=True)


def select_names(text: str, table: Mapping[str, object], option: str) -> list[str]:
    """Return the names in a comma-separated list. Raises UsageError for a name that is not in `table`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in table:
            raise UsageError(f"unknown name '{name}'", where=f"--{option}", hint=did_you_mean(name, table))
    return names


def run_main(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a benchmark as a program: errors and signals become messages and exit codes."""
    configure()  # stages of recipes report their progress by logging
    with interrupts.install_handlers():
        code = interrupts.exit_code_of(lambda: main(sys.argv[1:]))
    sys.exit(code)


# -- charts ------------------------------------------------------------------------------------------------------------


def chart(title: str, x_label: str, y_label: str, curves: Mapping[str, Points], *, zero: bool = False) -> str:
    """Return an SVG chart with a legend; an empty string if there is no finite point."""
    finite = {name: sorted(p for p in points if math.isfinite(p[1])) for name, points in curves.items()}
    series = [Series(name, n % len(COLORS), points, True) for n, (name, points) in enumerate(finite.items()) if points]
    drawing = line_chart(series, title, x_label, y_label, zero=zero, log=False)
    if not drawing:
        return ""
    names = "".join(
        f'<text class="name c{s[1]}" x="400" y="{14 + 12 * n}" text-anchor="end">{html.escape(s[0])}</text>'
        for n, s in enumerate((one.name, index % len(COLORS)) for index, one in enumerate(series))
    )
    return drawing.replace(">", f"><style>{STYLE}</style>", 1).replace("</svg>", f"{names}</svg>")


def write_page(path: Path, title: str, text: str, charts: Iterable[str]) -> None:
    """Write an HTML page that needs no other file."""
    figures = "".join(charts)
    body = f"<h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>{figures}"
    style = "body{font:15px sans-serif;max-width:700px;margin:2em auto}svg{display:block;margin:1em 0 2em}"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>{body}")
