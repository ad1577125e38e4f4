"""Insert measured metrics into the pages of the strategies, between two markers. `make docs` runs this; a test compares the output.

The metrics come from benchmarks/results/*.json and, for learning, from the table in docs/benchmarks.md.

python docs/_make/measured.py          rewrite docs/strategies/*.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN, END = "<!-- measured: made by docs/_make/measured.py -->", "<!-- end of measured -->"
ELSEWHERE = {
    "adaptive_kstep": "[K-step averaging](../simulated.md#k-step-averaging) compares it with fixed K in virtual time.",
    "kaldi_averaging": "[The benchmark of averaging](../averaging.md#the-benchmark) compares persistent learners with jobs as Kaldi starts them.",
}
"""Strategy -> where its own benchmark is described."""
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
    text = ", ".join(f"{r} with {n} learners" for r, n in zip(ratios, sizes, strict=True))
    return [("validation loss relative to `single`, equal samples", text, "[learning](../benchmarks.md#learning)")]


def throughput(name: str) -> list[tuple[str, str, str]]:
    metrics = []
    for file in ("throughput-even.json", "throughput-slow.json"):
        for r in (r for r in rows(file) if r["contestant"] == name):
            case = "one of two learners at half speed" if r["case"] == "slow" else "two equal learners"
            text = f"{r['ratio']:.2f} ({r['range'][0]:.2f} to {r['range'][1]:.2f}), CPU per batch {r['cpu_ratio']:.2f}"
            metrics.append(
                (
                    f"samples/s relative to plain torch without communication, batch {r['batch']}, {case}",
                    text,
                    "[throughput](../benchmarks.md#throughput)",
                )
            )
    return metrics


def network(name: str) -> list[tuple[str, str, str]]:
    metrics = []
    for r in (r for r in rows("network.json") if r["contestant"] == name and "ratio_to_ddp" in r):
        text = f"{r['ratio_to_ddp']:.2f} ({r['seconds_to_loss']:.1f} s)"
        metrics.append(
            (
                f"seconds to the same loss relative to DDP, link of {LINKS.get(r['case'], r['case'])}",
                text,
                "[network](../benchmarks.md#network)",
            )
        )
    return metrics


def hierarchy(name: str) -> list[tuple[str, str, str]]:
    if name != "hierarchical":
        return []
    flat = {r["case"]: r for r in rows("hierarchy.json") if r["contestant"] == "flat"}
    ratios = []
    for r in rows("hierarchy.json"):
        if r["contestant"] == name and "seconds_to_loss" in r:
            ratios.append(f"{r['seconds_to_loss'] / flat[r['case']]['seconds_to_loss']:.2f} with {r['case']}")
    return [
        (
            "seconds to the same loss relative to a flat ring, 200 Mbit/s",
            ", ".join(ratios),
            "[network](../benchmarks.md#network)",
        )
    ]


def buffers(name: str) -> list[tuple[str, str, str]]:
    match = re.search(
        rf"\b{name} ([\d.]+)[,.]", (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition("Model-sized buffers")[2]
    )
    return (
        [
            (
                "model-sized buffers beyond weights, gradients and optimizer state",
                match[1].rstrip("."),
                "[overhead](../benchmarks.md#overhead)",
            )
        ]
        if match
        else []
    )


def block(name: str) -> str:
    metrics = [*throughput(name), *network(name), *hierarchy(name), *learning(name), *buffers(name)]
    if not metrics:
        text = ELSEWHERE.get(name, "All other strategies are compared with this one.")
        return f"{BEGIN}\n\n{text}\n\n{END}"
    lines = [
        "| metric | value | section |",
        "|---|---|---|",
        *(f"| {name} | {value} | {link} |" for name, value, link in metrics),
    ]
    return "\n".join(
        [
            BEGIN + "\n",
            "Measured on two shared cores without a GPU. The linked sections list conditions, ranges and commands.\n",
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
