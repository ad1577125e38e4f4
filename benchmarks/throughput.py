"""Compare samples/s of all strategies and of torch's own methods with learners that do not communicate.

All competitors are ready in the same two processes and take turns of a few seconds, in alternating order. Ratios are taken
within a round against `compute`, and the median over the rounds is reported, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.common import log, parser, run_main, select_names
from benchmarks.competitors import OTHERS, FullRunner
from roundelay.bench.competitors import Competitor, run_contest
from roundelay.log.output import markdown_table
from roundelay.simulate.calibrate import parameter_count
from roundelay.strategies import STRATEGIES
from roundelay.testing.pools import ProcessPool
from roundelay.testing.tasks import Blstm

CASES = {"even": "", "slow": "1:2.0"}
"""Injected slowdown: none, or rank 1 at half speed."""
ENTRIES: dict[str, Competitor] = {name: Competitor(name) for name in ("compute", "ddp", "periodic")} | {
    name: Competitor(name, "hierarchical(adpsgd)" if name == "hierarchical" else name)
    for name in STRATEGIES
    if name != "single"
}
ENTRIES["alone"] = Competitor("alone", "single")
ENTRIES["adpsgd_half"] = Competitor("adpsgd_half", "adpsgd", (("steps_per_exchange", 2.0),))


def main(argv: Sequence[str]) -> int:
    p = parser("throughput", __doc__, "python -m benchmarks.throughput --competitors ddp,sync,adpsgd --batches 8,64 --rounds 5")
    p.add_argument("--quick", action="store_true", help="3 rounds of 5 s; the result is less certain")
    p.add_argument("--competitors", default=",".join(n for n in ENTRIES if n != "compute"), help="default: all")
    p.add_argument("--batches", default="8,64", help="samples per learner and step (default %(default)s)")
    p.add_argument("--cases", default="even,slow", help="even, slow: rank 1 at half speed")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=20.0, help="per competitor and round")
    p.add_argument("--backend", default="shm", choices=["shm", "torch"])
    args = p.parse_args(argv)
    rounds, seconds = (3, 5.0) if args.quick else (args.rounds, args.seconds)
    names = ["compute", *(n for n in select_names(args.competitors, ENTRIES, "competitors") if n != "compute")]
    batches = [int(b) for b in args.batches.split(",")]
    cases = select_names(args.cases, CASES, "cases")
    results = []
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPool(2, args.backend) as pool:
        for batch in batches:
            for case in cases:
                results += measure(pool, args.backend, names, batch, case, rounds, seconds)
    report = {
        "results": results,
        "rounds": rounds,
        "seconds": seconds,
        "backend": args.backend,
        "parameters": parameter_count(Blstm()),
        "cores": os.cpu_count(),
    }
    print(json.dumps(report) if args.json else table(results))
    return 0


def measure(
    pool: ProcessPool, backend: str, names: list[str], batch: int, case: str, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Run all competitors in interleaved rounds and return one summary per competitor."""
    by_name: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    entries = [ENTRIES[name] for name in names]
    contest = partial(run_contest, runner=FullRunner)
    for number in range(rounds):
        limit_s = 120 + 3 * seconds * len(names)
        ranks = pool.run(contest, entries, Blstm(), batch, seconds, backend, CASES[case], size=2, timeout_s=limit_s)
        for name in names:
            own = [metrics[name] for metrics in ranks]
            rate, steps = sum(x["samples_per_s"] for x in own), sum(x["steps"] for x in own)
            row = {"rate": rate, "cpu": sum(x["cpu_s"] for x in own) / steps, "slow": own[1]["samples_per_s"]}
            if "exchanges_per_step" in own[0]:
                row["exchanges_per_step"] = min(x["exchanges_per_step"] for x in own)
            by_name[name].append(row)
            bound = by_name["compute"][number]
            log(
                f"batch {batch:>3} {case:<5} round {number + 1}/{rounds}  {name:<14} {rate:8.1f} samples/s, "
                f"{rate / bound['rate']:.3f} of compute, CPU {row['cpu'] / bound['cpu']:.3f}"
            )
    return [summary(name, by_name, batch, case) for name in names]


def summary(name: str, by_name: dict[str, list[dict[str, float]]], batch: int, case: str) -> dict[str, Any]:
    own, bound = by_name[name], by_name["compute"]

    def ratios(key: str, base: list[dict[str, float]]) -> list[float]:
        return [a[key] / b[key] for a, b in zip(own, base, strict=True)]

    rate, cpu = ratios("rate", bound), ratios("cpu", bound)
    row: dict[str, Any] = {
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
        row["slow_share"] = round(statistics.median(ratios("slow", bound)), 4)
    if "exchanges_per_step" in own[0] and "adpsgd" in name:
        row["exchanges_per_step"] = round(min(x["exchanges_per_step"] for x in own), 4)
    if "ddp" in by_name and name not in OTHERS:
        row["ratio_to_ddp"] = round(statistics.median(ratios("rate", by_name["ddp"])), 4)
    return row


def table(results: list[dict[str, Any]]) -> str:
    head = ("competitor", "batch", "case", "÷ compute (range)", "CPU ÷ compute", "exchanges per step", "slow learner's share")
    rows = [
        (
            r["contestant"],
            r["batch"],
            r["case"],
            f"{r['ratio']:.3f} ({r['range'][0]:.3f}-{r['range'][1]:.3f})",
            r["cpu_ratio"],
            r.get("exchanges_per_step"),
            r.get("slow_share"),
        )
        for r in results
    ]
    return markdown_table(head, rows)


if __name__ == "__main__":
    run_main(main)
