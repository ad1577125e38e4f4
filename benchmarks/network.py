"""Seconds to the same held-out loss between machines on a slow network.

Two machines with one learner each, on links of 1 Gbit/s and 200 Mbit/s: network namespaces of this machine (needs root; all
of them are removed at the end). The target is the loss that `single` reaches with the global batch after half the sample
budget, at the best of three rates. Every competitor uses the best of the same rates. Snapshots of the weights are taken
during a run and evaluated afterwards, so the evaluation does not slow the run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Sequence
from types import FrameType
from typing import Any

from benchmarks import hierarchy
from benchmarks.common import log, parser, run_main
from benchmarks.competitors import OTHERS
from benchmarks.namespaces import BURST, QUEUE, NetnsMachines, check_namespaces
from benchmarks.netns_cluster import NetnsCluster
from benchmarks.time_to_loss import Contest, TimeToLossResult, best_of_rates, target_loss, train
from roundelay.bench.competitors import Competitor
from roundelay.errors import UsageError, did_you_mean

LINKS = {"1gbit": 1000, "200mbit": 200}
"""Mbit/s of every cable, in each direction; the fastest first, because it says how many samples are needed."""
TASK = "roundelay.testing.tasks:SpeechlikeBatches"
CONTEST = Contest(batch=8, samples=1280, rates=(0.8, 1.6, 2.4))
"""80 steps of two learners: within the first half the loss falls from 8 to about 1, and is still falling."""
REPEATS = 2
"""How often the best rate of `ddp` and of the asynchronous ones is run again, turn by turn; the median counts."""
ENTRIES = {
    "ddp": Competitor("ddp"),
    "ddp_fp16": Competitor("ddp_fp16"),
    "ddp_accumulate": Competitor("ddp_accumulate"),
    "kstep": Competitor("kstep", "kstep", (("strategy_options", {"K": 8}),)),
    "delay_by_one": Competitor("delay_by_one", "delay_by_one"),
    "dpsgd": Competitor("dpsgd", "dpsgd"),
    "adpsgd": Competitor("adpsgd", "adpsgd"),
    "adpsgd_half": Competitor("adpsgd_half", "adpsgd", (("steps_per_exchange", 2.0),)),
}
DEFAULT = ("ddp", "ddp_fp16", "ddp_accumulate", "kstep", "adpsgd", "adpsgd_half")


def main(argv: Sequence[str]) -> int:
    p = parser(
        "network", __doc__, "sudo python -m benchmarks.network --quick;  sudo python -m benchmarks.network --hierarchy --json"
    )
    p.add_argument("--quick", action="store_true", help="every contestant at single's best rate, once: a look")
    p.add_argument(
        "--hierarchy", action="store_true", help="hierarchical(adpsgd) against flat adpsgd, several learners a machine"
    )
    p.add_argument("--machines", default=",".join(hierarchy.MACHINES), help="with --hierarchy: 2x2, 3x2, 2+1")
    p.add_argument("--competitors", default=",".join(DEFAULT), help=f"any of {', '.join(ENTRIES)}")
    p.add_argument("--links", default=",".join(LINKS), help="1gbit, 200mbit")
    p.add_argument("--samples", type=int, default=CONTEST.samples, help="the sample budget of a run")
    p.add_argument("--task", default=TASK, help="module:Task to train")
    args = p.parse_args(argv)
    check_namespaces()
    before = signal.signal(signal.SIGTERM, _leave)  # so that everything is removed then, too
    try:
        if args.hierarchy:
            cases = chosen(args.machines, hierarchy.MACHINES, "machines")
            print(hierarchy.printed(hierarchy.compare(cases, log, quick=args.quick), args.json))
            return 0
        entries = [ENTRIES[name] for name in chosen(args.competitors, ENTRIES, "competitors")]
        links = chosen(args.links, LINKS, "links")
        contest = Contest(CONTEST.batch, args.samples, CONTEST.rates)
        report = compare(entries, links, contest, args.task, quick=args.quick)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(report) if args.json else "\n".join([table(report), "", *report["in_words"]]))
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def chosen(text: str, earlier: dict[str, Any], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in earlier:
            raise UsageError(f"'{name}' is not among the {what}", where=f"--{what}", hint=did_you_mean(name, earlier))
    return [name for name in earlier if name in names]


def compare(
    entries: Sequence[Competitor], links: Sequence[str], contest: Contest, task: str, *, quick: bool = False
) -> dict[str, Any]:
    """The whole benchmark."""
    results: list[dict[str, Any]] = []
    words: list[str] = []
    with NetnsMachines(2, LINKS[links[0]]) as machines, NetnsCluster(machines, [1, 1], task, {}) as workers:
        if contest.samples > workers.samples:
            raise UsageError(
                f"the budget of {contest.samples} samples is more than the task's {workers.samples}", where="--samples"
            )
        target, rates = target_loss(workers, contest, log)
        log(f"the target is a held-out loss of {target:.4f}")
        needed: dict[str, TimeToLossResult] = {}
        for link in links:
            machines.set_rate(LINKS[link])
            outcomes = run_link(workers, entries, contest, rates[:1] if quick else rates, target, needed, link, quick)
            needed = {name: runs[0] for name, runs in outcomes.items()}
            results += rows(outcomes, link, contest.batch)
            words.append(winner(outcomes, link))
        parameters = workers.parameters
    return {
        "results": results,
        "in_words": words,
        "target_loss": round(target, 5),
        "samples": contest.samples,
        "rates": list(contest.rates),
        "parameters": parameters,
        "shaping": f"tbf, burst {BURST}, queue {QUEUE}, both directions of every cable",
        "cores": os.cpu_count(),
    }


def run_link(
    workers: NetnsCluster,
    entries: Sequence[Competitor],
    contest: Contest,
    rates: Sequence[float],
    target: float,
    needed: dict[str, TimeToLossResult],
    link: str,
    quick: bool,
) -> dict[str, list[TimeToLossResult]]:
    """Every contestant's runs at its best rate, the one that report it first."""

    def log_case(text: str) -> None:
        log(f"{link:<8} {text}")

    outcomes: dict[str, list[TimeToLossResult]] = {}
    for entry in entries:
        earlier = needed.get(entry.name)
        order = sorted(rates, key=lambda rate: earlier is not None and rate != earlier.rate)
        hint = earlier.samples_to_loss if earlier is not None and not entry.free_running else None
        outcomes[entry.name] = [best_of_rates(workers, entry, contest, order, target, hint, log_case)]
    for _ in range(0 if quick else REPEATS):
        for entry in entries:
            first = outcomes[entry.name][0]
            if first.samples_to_loss is not None and (entry.name == "ddp" or entry.free_running):
                again = train(workers, entry, contest, first.rate, target, first.samples_to_loss, log_case)
                outcomes[entry.name] += [again] if again.reached else []
    return outcomes


def median(runs: Sequence[TimeToLossResult], what: str) -> float | None:
    values = [getattr(run, what) for run in runs if getattr(run, what) is not None]
    return statistics.median(values) if values else None


def rows(outcomes: dict[str, list[TimeToLossResult]], link: str, batch: int) -> list[dict[str, Any]]:
    ddp = outcomes.get("ddp", [])
    ddp_seconds, ddp_cpu = median(ddp, "seconds_to_loss"), median(ddp, "cpu_to_loss")
    report = []
    for name, runs in outcomes.items():
        first = runs[0]
        row: dict[str, Any] = {"contestant": name, "case": link, "batch": batch, "rate": first.rate, "runs": len(runs)}
        seconds, cpu = median(runs, "seconds_to_loss"), median(runs, "cpu_to_loss")
        if first.samples:
            row["samples_per_s"] = round(statistics.median(run.samples / run.seconds for run in runs), 2)
            row["sent_bytes_per_step"] = round(first.sent_bytes[0] / (first.samples / batch / len(first.members)))
        if seconds is not None and cpu is not None:
            row["seconds_to_loss"] = round(seconds, 3)
            row["samples_to_loss"] = round(median(runs, "samples_to_loss") or 0.0)
            all_seconds = [run.seconds_to_loss for run in runs if run.seconds_to_loss is not None]
            row["range"] = [round(min(all_seconds), 3), round(max(all_seconds), 3)]
            if ddp_seconds is not None and ddp_cpu is not None:
                row["ratio_to_ddp"] = round(seconds / ddp_seconds, 4)
                row["cpu_ratio"] = round(cpu / ddp_cpu, 4)
        report.append(row)
    return report


def winner(outcomes: dict[str, list[TimeToLossResult]], link: str) -> str:
    """Who wins, in plain words."""
    times = {name: s for name, runs in outcomes.items() if (s := median(runs, "seconds_to_loss")) is not None}
    if not times:
        return f"{link}: no competitor reached the target."
    order = sorted(times, key=lambda name: times[name])
    text = f"{link}: {order[0]} wins with {times[order[0]]:.1f} s"
    if len(order) > 1:
        text += f", before {order[1]} with {times[order[1]]:.1f} s"
    if "ddp" in times and order[0] != "ddp":
        text += f"; it takes {times[order[0]] / times['ddp']:.2f} of ddp's {times['ddp']:.1f} s"
    torchs = [name for name in order if name in OTHERS]
    if torchs and order[0] not in OTHERS and torchs[0] != "ddp":
        text += f" and {times[order[0]] / times[torchs[0]]:.2f} of {torchs[0]}'s, the fastest of torch's own"
    late = [name for name in outcomes if name not in times]
    return text + "." + (f" Not at the target within the budget: {', '.join(late)}." if late else "")


def table(report: dict[str, Any]) -> str:
    lines = [
        f"seconds to a held-out loss of {report['target_loss']} ({report['parameters']:,} parameters)",
        "",
        "| contestant | link | rate | seconds (range) | ÷ ddp | samples | samples/s | CPU ÷ ddp |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        seconds = f"{r['seconds_to_loss']:.1f} ({r['range'][0]:.1f}-{r['range'][1]:.1f})" if "range" in r else "not reached"
        lines.append(
            f"| {r['contestant']} | {r['case']} | {r['rate']:g} | {seconds} | {r.get('ratio_to_ddp', '')} "
            f"| {r.get('samples_to_loss', '')} | {r.get('samples_per_s', '')} | {r.get('cpu_ratio', '')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
