"""roundelay demo: the example task on two learners, one of them slowed, by several strategies."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from roundelay.bench.tasks import Frames
from roundelay.train.loop import Plan, train
from roundelay.train.options import Options
from roundelay.train.place import Place
from roundelay.train.pool import Pool

STRATEGIES = ("single", "sync", "kstep", "delay_by_one", "adpsgd")
SLOW = "1:2.0"


def demo(as_json: bool = False) -> int:
    """Trains with each strategy and prints one table."""
    print(
        "Two learners share a small task; learner 1 is made to take twice its time for every gradient.\n"
        "Each strategy sees the same 24,576 samples. Synchronous ones go at the slow learner's pace.\n",
        file=sys.stderr,
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    with Pool(2, "shm") as pool:
        for name in STRATEGIES:
            rows.append({"strategy": name, **run(pool, name)})
            print(line(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}) if as_json else table(rows))
    return 0


def run(pool: Pool, name: str) -> dict[str, Any]:
    size = 1 if name == "single" else 2
    began = time.perf_counter()
    results = pool.run(learn, name, size=size, timeout_s=300)
    seconds = max(r["elapsed_s"] for r in results)
    samples = sum(r["samples"] for r in results)
    figures = results[0]["figures"]
    return {
        "learners": size,
        "seconds": round(seconds, 2),
        "samples_per_s": round(samples / seconds, 1),
        "loss": round(figures["loss"], 4),
        "accuracy": round(figures["accuracy"], 4),
        "samples_by_learner": [r["samples"] for r in results],
        "waiting_s": round(results[0]["waiting_s"], 2),
        "total_s": round(time.perf_counter() - began, 2),
    }


def learn(place: Place, name: str) -> dict[str, Any]:
    options = Options(strategy=name, schedule="cosine", warmup_epochs=0.4, slow=SLOW if place.size > 1 else "")
    return train(Frames(), place, options, Plan(epochs=8, batch=64 // place.size, lr=1.0, momentum=0.9, progress="none"))


def line(row: dict[str, Any]) -> str:
    return f"{row['strategy']:<14} {row['seconds']:6.1f} s  held-out loss {row['loss']:.4f}"


def table(rows: list[dict[str, Any]]) -> str:
    names = (
        ("learners", 9),
        ("seconds", 9),
        ("samples/s", 11),
        ("held-out loss", 15),
        ("accuracy", 10),
        ("samples by learner", 22),
    )
    lines = [f"{'strategy':<14}" + "".join(f"{name:>{width}}" for name, width in names)]
    for r in rows:
        shares = " + ".join(f"{n:,}" for n in r["samples_by_learner"])
        lines.append(
            f"{r['strategy']:<14}{r['learners']:>9}{r['seconds']:>9.1f}{r['samples_per_s']:>11.0f}"
            f"{r['loss']:>15.4f}{r['accuracy']:>10.3f}{shares:>22}"
        )
    return "\n".join(lines)
