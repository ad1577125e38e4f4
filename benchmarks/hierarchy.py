"""What machines with several learners send, and how soon they reach a loss: `network --hierarchy`.

hierarchical   hierarchical(adpsgd): a machine is one worker; one model per machine and exchange crosses the network
flat           adpsgd on one ring of all learners, in the order of their machines

Both use the same task, global batch, sample budget and rates, on links of 200 Mbit/s. Sending the model takes longer than
computing a step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.namespaces import NetnsMachines
from benchmarks.netns_cluster import NetnsCluster
from benchmarks.time_to_loss import Contest, Log, TimeToLossResult, best_of_rates, target_loss, train
from roundelay.bench.competitors import Competitor
from roundelay.topology.resolver import SeededTopologies

TASK = "roundelay.testing.tasks:SpeechlikeBatches"
MBIT = 200
MACHINES = {"2x2": (2, 2), "3x2": (2, 2, 2), "2+1": (2, 1)}
"""Learners of every machine."""
STEPS = 96
"""The sample budget of a run, in steps per learner."""
BATCH = 8
RATES = (0.8, 1.6, 2.4)
REPEATS = 2
"""How often each is run again at its best rate, turn by turn; the median counts."""
MARGIN = 1.3
"""Later runs get this multiple of the samples of the first, because runs differ."""
ENTRIES = (Competitor("hierarchical", "hierarchical(adpsgd)"), Competitor("flat", "adpsgd", (("topology", "ring"),)))


def compare(cases: Sequence[str], log: Log, *, quick: bool = False) -> dict[str, Any]:
    """All cases."""
    results: list[dict[str, Any]] = []
    words: list[str] = []
    for case in cases:
        rows = measure(case, log, quick)
        results += rows
        words.append(verdict(rows))
    return {
        "results": results,
        "in_words": words,
        "mbit": MBIT,
        "steps": STEPS,
        "rates": list(RATES),
        "cores": os.cpu_count(),
    }


def measure(case: str, log: Log, quick: bool) -> list[dict[str, Any]]:
    learners = MACHINES[case]
    contest = Contest(BATCH, STEPS * BATCH * sum(learners), RATES)
    with NetnsMachines(len(learners), MBIT) as machines, NetnsCluster(machines, learners, TASK, {}) as workers:
        target, rates = target_loss(workers, contest, log)
        log(f"{case}: the target is a held-out loss of {target:.4f}")
        runs: dict[str, list[TimeToLossResult]] = {}

        def log_case(text: str) -> None:
            log(f"{case}: {text}")

        for entry in ENTRIES:
            runs[entry.name] = [best_of_rates(workers, entry, contest, rates[:1] if quick else rates, target, None, log_case)]
        for _ in range(0 if quick else REPEATS):
            for entry in ENTRIES:
                first = runs[entry.name][0]
                if first.samples_to_loss is not None:
                    enough = MARGIN * first.samples_to_loss
                    again = train(workers, entry, contest, first.rate, target, enough, log_case)
                    runs[entry.name] += [again] if again.reached else []
        return [row(workers, entry, case, runs[entry.name], target) for entry in ENTRIES]


def row(workers: NetnsCluster, entry: Competitor, case: str, runs: Sequence[TimeToLossResult], target: float) -> dict[str, Any]:
    """The metrics of a contestant at its best rate: the run of median seconds."""
    best = sorted(runs, key=lambda run: run.seconds_to_loss or float("inf"))[(len(runs) - 1) // 2]
    report: dict[str, Any] = {"contestant": entry.name, "case": case, "batch": BATCH, "rate": best.rate}
    if best.failure:
        return report
    model = 4 * workers.parameters
    steps = best.samples / BATCH
    crossings = [crossing_rounds(workers.homes, home, entry, best) for home in range(workers.machines.count)]
    report |= {
        "target_loss": round(target, 5),
        "samples_per_s": round(best.samples / best.seconds, 2),
        "sent_bytes": best.sent_bytes,
        "bytes_per_gradient": round(sum(best.sent_bytes) / steps),
        "bytes_to_loss": round(sum(best.sent_bytes) * (best.samples_to_loss or best.samples) / best.samples),
        "exchanges_of_a_machine": crossings,
        "models_per_machine_and_exchange": [
            round(sent / model / exchanges, 3) for sent, exchanges in zip(best.sent_bytes, crossings, strict=True) if exchanges
        ],
        "cpu_s_per_gradient": round(best.cpu_s / steps, 5),
    }
    if best.seconds_to_loss is not None and best.cpu_to_loss is not None:
        report["seconds_to_loss"] = round(best.seconds_to_loss, 3)
        all_seconds = [run.seconds_to_loss for run in runs if run.seconds_to_loss is not None]
        report["runs"], report["range"] = len(all_seconds), [round(min(all_seconds), 3), round(max(all_seconds), 3)]
        report["samples_to_loss"] = round(best.samples_to_loss or 0)
        report["cpu_s_to_loss"] = round(best.cpu_to_loss, 2)
    return report


def crossing_rounds(homes: Sequence[int], machine: int, entry: Competitor, run: TimeToLossResult) -> int:
    """Return the rounds with an exchange between this machine and another, if ranks exchange in the order of their rounds."""
    members = list(range(len(homes)))
    if entry.name == "hierarchical":
        members = [rank for rank in members if rank == homes.index(homes[rank])]  # first ranks only
    matching = SeededTopologies(0).matching("ring", len(members))
    rounds = round(sum(run.members[rank]["exchanges"] for rank in members) / len(members))  # without skipped ones
    where = [homes[rank] for rank in members]
    return sum(any(where[a] == machine != where[b] for a, b in enumerate(matching(number))) for number in range(rounds))


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    ours, flat = rows
    text = f"{ours['case']}: "
    if "seconds_to_loss" not in ours or "seconds_to_loss" not in flat:
        late = [r["contestant"] for r in rows if "seconds_to_loss" not in r]
        return text + f"not at the target within the budget: {', '.join(late)}."
    ratio = ours["seconds_to_loss"] / flat["seconds_to_loss"]
    bytes_ratio = ours["bytes_per_gradient"] / max(flat["bytes_per_gradient"], 1)
    cpu_ratio = ours["cpu_s_per_gradient"] / flat["cpu_s_per_gradient"]
    return (
        f"{text}hierarchical takes {ratio:.2f} of the flat ring's time to the loss "
        f"({ours['seconds_to_loss']:.1f} s against {flat['seconds_to_loss']:.1f} s), "
        f"{bytes_ratio:.2f} of its bytes and {cpu_ratio:.2f} of its CPU per gradient."
    )


def table(report: dict[str, Any]) -> str:
    lines = [
        "| machines | contestant | rate | seconds to the loss | models per machine and exchange | MB per gradient "
        "| CPU s per gradient | CPU s to the loss | samples/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        models = "/".join(f"{m:.2f}" for m in r.get("models_per_machine_and_exchange", []))
        lines.append(
            f"| {r['case']} | {r['contestant']} | {r['rate']:g} | {r.get('seconds_to_loss', 'not reached')} | {models} "
            f"| {r.get('bytes_per_gradient', 0) / 1e6:.2f} | {r.get('cpu_s_per_gradient', '')} "
            f"| {r.get('cpu_s_to_loss', '')} | {r.get('samples_per_s', '')} |"
        )
    return "\n".join(lines)


def printed(report: dict[str, Any], as_json: bool) -> str:
    return json.dumps(report) if as_json else "\n".join([table(report), "", *report["in_words"]])
