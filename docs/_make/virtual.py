"""Draw results of simulated training from benchmarks/results: docs/pictures/stragglers.svg and batches.svg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.curves import chart

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"


def stragglers(result: dict[str, Any]) -> str:
    """Return the validation loss against virtual time, with one of 16 learners slowed down by 10."""
    rows = [r for r in result["results"] if r["slowdown"] == 10]
    curves = {r["contestant"]: [(look["time_s"], look["loss"]) for look in r["looks"]] for r in rows}
    return chart("one of 16 learners ten times slower", "validation loss", curves, across="virtual seconds")


def batches(result: dict[str, Any]) -> str:
    """Return the validation loss against the global batch, each strategy at its best learning rate."""
    rows = [r for r in result["results"] if r["loss"] is not None and "warm-up" not in r["contestant"]]
    names = [n for n in dict.fromkeys(r["contestant"] for r in rows) if n != "single"]
    size = result["learners"]
    curves = {name: [(size * r["batch"], r["loss"]) for r in rows if r["contestant"] == name] for name in names}
    return chart(
        "after equal samples, each at its best learning rate",
        "validation loss",
        curves,
        across="samples per step of all learners",
    )


PICTURES = {"stragglers": stragglers, "batches": batches}


def picture_file(name: str) -> str:
    """Return the SVG file of a picture, with a background of its own: the page may be dark."""
    picture = PICTURES[name](json.loads((RESULTS / f"{name}.json").read_text()))
    alone = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return alone.replace(">", '><rect width="100%" height="100%" fill="#fbfbf9"/>', 1) + "\n"


if __name__ == "__main__":
    for name in PICTURES:
        (DOCS / "pictures" / f"{name}.svg").write_text(picture_file(name), encoding="utf-8")
