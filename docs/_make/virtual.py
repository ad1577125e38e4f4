"""Draw the results of simulated training, from benchmarks/results: docs/pictures/stragglers.svg and batches.svg.

python docs/_make/virtual.py          write both pictures
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import chart

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"


def stragglers(record: dict[str, Any]) -> str:
    """Validation loss over virtual time with one learner of 16 ten times slower."""
    rows = [r for r in record["results"] if r["slowdown"] == 10]
    curves = {r["contestant"]: [(look["time_s"], look["loss"]) for look in r["looks"]] for r in rows}
    return chart("one of 16 learners ten times slower", "virtual seconds", "validation loss", curves)


def batches(record: dict[str, Any]) -> str:
    """Validation loss over the batch size, each strategy at its best learning rate."""
    rows = [r for r in record["results"] if r["loss"] is not None and "warm-up" not in r["contestant"]]
    names = [n for n in dict.fromkeys(r["contestant"] for r in rows) if n != "single"]
    size = record["learners"]
    curves = {name: [(size * r["batch"], r["loss"]) for r in rows if r["contestant"] == name] for name in names}
    return chart("after equal samples, each at its best rate", "samples per step of all learners", "validation loss", curves)


PICTURES = {"stragglers": stragglers, "batches": batches}


def picture_file(name: str) -> str:
    """Return a picture as a file with its own background: the page around it may be dark."""
    picture = PICTURES[name](json.loads((RESULTS / f"{name}.json").read_text()))
    alone = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return alone.replace(">", '><rect width="100%" height="100%" fill="#fbfbf9"/>', 1) + "\n"


if __name__ == "__main__":
    for name in PICTURES:
        (DOCS / "pictures" / f"{name}.svg").write_text(picture_file(name), encoding="utf-8")
