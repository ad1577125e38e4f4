"""Compare samples/s of sync, adpsgd and torch DDP with learners that do not communicate.

All competitors are ready in the same processes and take turns of a few seconds. Ratios are taken within a round, and the
median over the rounds is reported, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from roundelay.bench import add_common_arguments, load_task
from roundelay.bench.competitors import Competitor, run_contest
from roundelay.core.contracts import Task
from roundelay.errors import UsageError
from roundelay.log.output import emit, markdown_table
from roundelay.testing.pools import ProcessPool

logger = logging.getLogger(__name__)

ENTRIES = (Competitor("compute"), Competitor("ddp"), Competitor("sync", "sync"), Competitor("adpsgd", "adpsgd"))


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="roundelay bench throughput",
        description=__doc__.split("\n")[0],
        epilog="examples: roundelay bench throughput --quick;  roundelay bench throughput frames learners=4",
    )
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="per competitor and round (default %(default)s)")
    args = parser.parse_args(argv)
    rounds, seconds = (2, 2.0) if args.quick else (args.rounds, args.seconds)
    if rounds < 1 or not seconds > 0:
        raise UsageError("--rounds and --seconds must be > 0", where="bench throughput", hint="see --help")
    task, settings = load_task(args.inputs)
    if settings.learners < 2:
        raise UsageError(f"learners must be >= 2 (got {settings.learners})", where="learners", hint="set learners=2")
    os.environ["OMP_NUM_THREADS"] = "1"
    batch = int(str(settings.batch))
    with ProcessPool(settings.learners, "shm") as pool:
        results = measure(pool, task, batch, rounds, seconds, settings.lr, settings.momentum)
    record = {
        "learners": settings.learners,
        "cores": os.cpu_count(),
        "batch": batch,
        "rounds": rounds,
        "seconds": seconds,
        "results": results,
    }
    emit(json.dumps(record) if args.json else format_results(results))
    return 0


def measure(
    pool: ProcessPool, task: Task, batch: int, rounds: int, seconds: float, lr: float, momentum: float
) -> list[dict[str, Any]]:
    """Run all competitors in interleaved rounds and return one summary per competitor."""
    rates: dict[str, list[float]] = {entry.name: [] for entry in ENTRIES}
    cpu_s: dict[str, list[float]] = {entry.name: [] for entry in ENTRIES}
    contest = partial(run_contest, lr=lr, momentum=momentum)
    for number in range(rounds):
        limit_s = 120 + 4 * seconds * len(ENTRIES)
        ranks = pool.run(contest, ENTRIES, task, batch, seconds, "shm", timeout_s=limit_s)
        for name in rates:
            rates[name].append(sum(metrics[name]["samples_per_s"] for metrics in ranks))
            cpu_s[name].append(sum(m[name]["cpu_s"] for m in ranks) / sum(m[name]["steps"] for m in ranks))
            logger.info("round %d/%d %s: %.1f samples/s", number + 1, rounds, name, rates[name][-1])
    summaries = []
    for name in rates:
        ratios = [rate / bound for rate, bound in zip(rates[name], rates["compute"], strict=True)]
        cpu = [own / bound for own, bound in zip(cpu_s[name], cpu_s["compute"], strict=True)]
        summaries.append(
            {
                "competitor": name,
                "samples_per_s": round(statistics.median(rates[name]), 2),
                "ratio": round(statistics.median(ratios), 4),
                "range": [round(min(ratios), 4), round(max(ratios), 4)],
                "cpu_ratio": round(statistics.median(cpu), 4),
            }
        )
    return summaries


def format_results(results: Sequence[dict[str, Any]]) -> str:
    """Format the summaries as a table with one sentence below it."""
    head = ("competitor", "samples/s", "÷ no communication (range)", "CPU ÷ no communication")
    rows = [
        (r["competitor"], r["samples_per_s"], f"{r['ratio']:.3f} ({r['range'][0]:.3f}-{r['range'][1]:.3f})", r["cpu_ratio"])
        for r in results
    ]
    rate = {r["competitor"]: r["samples_per_s"] for r in results}
    sentence = f"adpsgd processes {rate['adpsgd'] / rate['ddp']:.2f} times as many samples per second as torch DDP here."
    return f"{markdown_table(head, rows)}\n\n{sentence}"
