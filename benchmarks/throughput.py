"""roundelay bench throughput: samples per second against learners that do not communicate at all.

All contestants stand ready in the same two processes and take turns of a few seconds, forwards and backwards; a round's
ratios are taken against that round's ceiling, and the median over rounds counts, because machines are noisy and noise drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.competitors import OTHERS, Competitor, contest
from roundelay.errors import UsageError, did_you_mean
from roundelay.strategies import STRATEGIES
from roundelay.testing.pools import ProcessPool
from roundelay.testing.tasks import Blstm

CASES = {"even": "", "slow": "1:2.0"}
"""Equal speeds; one learner at half speed."""
ENTRIES: dict[str, Competitor] = {name: Competitor(name) for name in ("ceiling", "ddp", "periodic")} | {
    name: Competitor(name, "hierarchical(adpsgd)" if name == "hierarchical" else name)
    for name in STRATEGIES
    if name != "single"
}
ENTRIES["alone"] = Competitor("alone", "single")
ENTRIES["adpsgd_half"] = Competitor("adpsgd_half", "adpsgd", (("steps_per_exchange", 2.0),))


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(
        prog="roundelay bench throughput",
        description=__doc__.split("\n")[0],
        epilog=("example: roundelay bench throughput --contestants ddp,sync,adpsgd --batches 8,64 --rounds 5 --json"),
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--quick", action="store_true", help="3 rounds of 5 s: a look, not a measurement")
    p.add_argument("--contestants", default=",".join(n for n in ENTRIES if n != "ceiling"), help="default: all")
    p.add_argument("--batches", default="8,64")
    p.add_argument("--cases", default="even,slow")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=20.0, help="per contestant and round")
    p.add_argument("--backend", default="shm", choices=["shm", "torch"])
    args = p.parse_args(argv)
    rounds, seconds = (3, 5.0) if args.quick else (args.rounds, args.seconds)
    names = ["ceiling", *chosen(args.contestants, ENTRIES, "contestants")]
    batches = [int(b) for b in args.batches.split(",")]
    cases = chosen(args.cases, CASES, "cases")
    results = []
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPool(2, args.wire) as pool:
        for batch in batches:
            for case in cases:
                results += measure(pool, names, batch, case, rounds, seconds)
    about = {"rounds": rounds, "seconds": seconds, "backend": args.wire, "parameters": parameters(), "cores": os.cpu_count()}
    print(json.dumps({"results": results, **about}) if args.json else table(results))
    return 0


def chosen(text: str, known: dict[str, Any], what: str) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip() and n.strip() != "ceiling"]
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' is not among the {what}", where=f"--{what}", hint=did_you_mean(name, known))
    return names


def parameters() -> int:
    return sum(p.numel() for p in Blstm().build().parameters())


def measure(pool: ProcessPool, names: list[str], batch: int, case: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """All contestants, interleaved; ratios within each round."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    entries = [ENTRIES[name] for name in names]
    for number in range(rounds):
        limit = 120 + 3 * seconds * len(names)
        learners = pool.run(contest, entries, Blstm(), batch, CASES[case], seconds, pool.backend, size=2, timeout_s=limit)
        for name in names:
            own = [metrics[name] for metrics in learners]
            rate, steps = sum(x["samples_per_s"] for x in own), sum(x["steps"] for x in own)
            found = {"rate": rate, "cpu": sum(x["cpu_s"] for x in own) / steps, "slow": own[1]["samples_per_s"]}
            if "exchanges" in own[0]:
                found["met"] = min(x["meetings_per_gradient"] for x in own)
            seen[name].append(found)
            ceiling = seen["ceiling"][number]
            print(
                f"batch {batch:>3} {case:<5} round {number + 1}/{rounds}  {name:<14} {rate:8.1f} samples/s  "
                f"{rate / ceiling['rate']:.3f} of the ceiling, CPU {found['cpu'] / ceiling['cpu']:.3f}",
                file=sys.stderr,
                flush=True,
            )
    return [summary(name, seen, batch, case) for name in names]


def summary(name: str, seen: dict[str, list[dict[str, float]]], batch: int, case: str) -> dict[str, Any]:
    own, ceiling = seen[name], seen["ceiling"]

    def ratios(key: str, base: list[dict[str, float]]) -> list[float]:
        return [a[key] / b[key] for a, b in zip(own, base, strict=True)]

    rate, cpu = ratios("rate", ceiling), ratios("cpu", ceiling)
    found: dict[str, Any] = {
        "contestant": name,
        "batch": batch,
        "case": case,
        "samples_per_s": round(statistics.median(x["rate"] for x in own), 2),
        "ratio": round(statistics.median(rate), 4),
        "range": [round(min(rate), 4), round(max(rate), 4)],
        "cpu_ratio": round(statistics.median(cpu), 4),
        "cpu_range": [round(min(cpu), 4), round(max(cpu), 4)],
    }
    if case == "slow":
        found["slow_share"] = round(statistics.median(ratios("slow", ceiling)), 4)
    if "met" in own[0] and "adpsgd" in name:
        found["meetings_per_gradient"] = round(min(x["met"] for x in own), 4)
    if "ddp" in seen and name not in OTHERS:
        found["ratio_to_ddp"] = round(statistics.median(ratios("rate", seen["ddp"])), 4)
    return found


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| contestant | batch | case | ÷ ceiling (range) | CPU ÷ ceiling | exchanges per gradient | slow learner's share |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for r in results:
        lines.append(
            f"| {r['contestant']} | {r['batch']} | {r['case']} | {r['ratio']:.3f} ({r['range'][0]:.3f}-{r['range'][1]:.3f}) "
            f"| {r['cpu_ratio']:.3f} | {r.get('meetings_per_gradient', '')} | {r.get('slow_share', '')} |"
        )
    return "\n".join(lines)
