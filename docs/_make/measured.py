"""Puts the recorded metrics into the pages of the strategies, between two marks: `make docs` runs this, a test compares.

The metrics are those of benchmarks/results/*.json and, for learning, of the table in docs/benchmarks.md.

python docs/_make/measured.py          rewrites docs/strategies/*.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN, END = "<!-- measured: made by docs/_make/measured.py -->", "<!-- end of measured -->"
LINKS = {"1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}


def rows(file: str) -> list[dict[str, Any]]:
    path = RESULTS / file
    return json.loads(path.read_text())["results"] if path.exists() else []


def learning(name: str) -> list[tuple[str, str, str]]:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    heads = re.search(r"^\| contestant \|((?: \d+ learners \|)+)$", text, re.MULTILINE)
    cells = re.search(rf"^\| {name} \|(.*)\|$", text[heads.end() :], re.MULTILINE) if heads else None
    if not heads or not cells or name == "single":
        return []
    sizes = re.findall(r"(\d+) learners", heads[1])
    ratios = re.findall(r"\(([\d.]+)\)", cells[1])
    told = ", ".join(f"{r} with {n} learners" for r, n in zip(ratios, sizes, strict=True))
    return [("held-out loss over `single`'s, equal samples", told, "[learning](../benchmarks.md#learning)")]


def throughput(name: str) -> list[tuple[str, str, str]]:
    found = []
    for file in ("throughput-even.json", "throughput-slow.json"):
        for r in (r for r in rows(file) if r["contestant"] == name):
            case = "one of two learners at half speed" if r["case"] == "slow" else "two equal learners"
            told = f"{r['ratio']:.2f} ({r['range'][0]:.2f} to {r['range'][1]:.2f}), CPU per batch {r['cpu_ratio']:.2f}"
            found.append(
                (
                    f"samples/s over plain torch without communication, batch {r['batch']}, {case}",
                    told,
                    "[throughput](../benchmarks.md#throughput)",
                )
            )
    return found


def network(name: str) -> list[tuple[str, str, str]]:
    found = []
    for r in (r for r in rows("network.json") if r["contestant"] == name and "ratio_to_ddp" in r):
        told = f"{r['ratio_to_ddp']:.2f} ({r['seconds_to_loss']:.1f} s)"
        found.append(
            (
                f"seconds to the same loss over DDP's, link of {LINKS.get(r['case'], r['case'])}",
                told,
                "[network](../benchmarks.md#network)",
            )
        )
    return found


def hierarchy(name: str) -> list[tuple[str, str, str]]:
    if name != "hierarchical":
        return []
    flat = {r["case"]: r for r in rows("hierarchy.json") if r["contestant"] == "flat"}
    told = []
    for r in rows("hierarchy.json"):
        if r["contestant"] == name and "seconds_to_loss" in r:
            told.append(f"{r['seconds_to_loss'] / flat[r['case']]['seconds_to_loss']:.2f} with {r['case']}")
    return [("seconds to the same loss over a flat ring's, 200 Mbit/s", ", ".join(told), "[network](../benchmarks.md#network)")]


def buffers(name: str) -> list[tuple[str, str, str]]:
    found = re.search(
        rf"\b{name} ([\d.]+)[,.]", (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition("Model-sized buffers")[2]
    )
    return (
        [
            (
                "model-sized buffers beyond weights, gradients and optimizer state",
                found[1].rstrip("."),
                "[overhead](../benchmarks.md#overhead)",
            )
        ]
        if found
        else []
    )


def block(name: str) -> str:
    found = [*throughput(name), *network(name), *hierarchy(name), *learning(name), *buffers(name)]
    if not found:
        return f"{BEGIN}\n\nIt is what the others are measured against.\n\n{END}"
    lines = ["| what | figure | how |", "|---|---|---|", *(f"| {what} | {told} | {how} |" for what, told, how in found)]
    return "\n".join(
        [
            BEGIN + "\n",
            "Two shared cores, no GPU; the linked sections have conditions, ranges and commands.\n",
            *lines,
            "\n" + END,
        ]
    )


def rewritten(name: str) -> str:
    text = (DOCS / "strategies" / f"{name}.md").read_text(encoding="utf-8")
    return re.sub(rf"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block(name), text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in sorted((DOCS / "strategies").glob("*.md")):
        page.write_text(rewritten(page.stem), encoding="utf-8")
