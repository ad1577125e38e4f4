"""Draws what was learned in virtual time, from benchmarks/results: docs/pictures/stragglers.svg and batches.svg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import chart

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"


def stragglers(found: dict[str, Any]) -> str:
    """Held-out loss against virtual time with one learner of 16 ten times slower."""
    rows = [r for r in found["results"] if r["slowdown"] == 10]
    curves = {r["contestant"]: [(look["time_s"], look["loss"]) for look in r["looks"]] for r in rows}
    return chart("one of 16 learners ten times slower", "virtual seconds", "held-out loss", curves)


def batches(found: dict[str, Any]) -> str:
    """Held-out loss against the batch, each contestant at its best rate."""
    rows = [r for r in found["results"] if r["loss"] is not None and "warm-up" not in r["contestant"]]
    names = [n for n in dict.fromkeys(r["contestant"] for r in rows) if n != "single"]
    size = found["learners"]
    curves = {name: [(size * r["batch"], r["loss"]) for r in rows if r["contestant"] == name] for name in names}
    return chart("after equal samples, each at its best rate", "samples per step of all learners", "held-out loss", curves)


PICTURES = {"stragglers": stragglers, "batches": batches}


def drawn(name: str) -> str:
    """As a file, on paper of its own: the page around it may be dark."""
    picture = PICTURES[name](json.loads((RESULTS / f"{name}.json").read_text()))
    alone = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return alone.replace(">", '><rect width="100%" height="100%" fill="#fbfbf9"/>', 1) + "\n"


if __name__ == "__main__":
    for name in PICTURES:
        (DOCS / "pictures" / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
