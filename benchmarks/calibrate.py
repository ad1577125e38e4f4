"""Measure this machine and emulated links into cluster files, and compare what the files predict with real runs.

The measurement is that of `roundelay calibrate`. --links adds links between two network namespaces (needs root), --check
predicts and measures four strategies on every cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import log, parser, run_main
from benchmarks.namespaces import NetnsMachines, check_namespaces
from benchmarks.netns_cluster import NetnsCluster
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner
from roundelay.engine.trainer import train
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext
from roundelay.log.output import markdown_table
from roundelay.simulate.calibrate import (
    LEARNERS,
    STEP_SECONDS,
    check_arguments,
    cluster_tree,
    link_model,
    measure_machine,
    step_seconds,
    write_cluster_file,
)
from roundelay.simulate.cluster import Cluster, StragglerModel, from_tree
from roundelay.simulate.run import simulate_timing
from roundelay.testing.pools import ProcessPool
from roundelay.testing.tasks import Blstm

STRATEGIES = ("sync", "kstep", "delay_by_one", "adpsgd")
TASK = "roundelay.testing.tasks:Blstm"


def main(argv: Sequence[str]) -> int:
    p = parser("calibrate", __doc__, "sudo python -m benchmarks.calibrate --links 1000,200 --check")
    p.add_argument(
        "--out", default="calibrated.toml", help="the cluster file; links get files of their own (default %(default)s)"
    )
    p.add_argument("--links", default="", metavar="MBIT,MBIT", help="Mbit/s of links between two machines (root)")
    p.add_argument("--batch", type=int, default=8, help="samples per learner and step")
    p.add_argument("--check", action="store_true", help="predict and measure four strategies, print the errors")
    p.add_argument("--seconds", type=float, default=20.0, help="of a measured run (default %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="interleaved repetitions; the median counts")
    args = p.parse_args(argv)
    check_arguments(args)
    links = parse_links(args.links)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    out = Path(args.out)
    report: dict[str, Any] = {"cores": os.cpu_count(), "batch": args.batch, "files": {}, "checks": []}
    with ProcessPool(LEARNERS, "shm") as pool:
        machine = measure_machine(pool, args.batch, args.repeats)
        report["machine"] = machine
        report["files"]["shm"] = str(write_cluster_file(out, cluster_tree(machine)))
        if args.check:
            cluster = from_tree({"name": out.stem, **cluster_tree(machine)})
            halved = replace(cluster, straggler=(StragglerModel(factor=2.0, learner=1),))
            for case, on, straggler in (("equal", cluster, ""), ("one at half speed", halved, "1:2.0")):
                report["checks"] += check_machine(pool, case, on, straggler, machine, args)
    for mbit in links:
        with NetnsMachines(LEARNERS, mbit) as machines, NetnsCluster(machines, [1] * LEARNERS, TASK, {}) as workers:
            link = measure_link(workers, machine, args.repeats, mbit)
            report[f"{mbit}mbit"] = link
            tree = cluster_tree(machine, link)
            path = out.with_name(f"{out.stem}-{mbit}mbit{out.suffix}")
            report["files"][f"{mbit} Mbit/s"] = str(write_cluster_file(path, tree))
            if args.check:
                cluster = from_tree({"name": path.stem, **tree})
                report["checks"] += check_link(workers, f"{mbit} Mbit/s", cluster, machine, args)
    if report["checks"]:
        errors = sorted(abs(row["error"]) for row in report["checks"])
        report["median_error"], report["worst_error"] = statistics.median(errors), errors[-1]
    print(json.dumps(report) if args.json else format_report(report))
    return 0


def parse_links(text: str) -> list[int]:
    """Return the Mbit/s in a comma-separated list. Raises UsageError if they cannot be emulated here."""
    try:
        links = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(f"--links must be numbers (got {text})", where="--links", hint="write --links 1000,200") from error
    if any(mbit < 1 for mbit in links):
        raise UsageError(f"--links must be > 0 (got {text})", where="--links", hint="write --links 1000,200")
    if links:
        check_namespaces()
    return links


def measure_link(workers: NetnsCluster, machine: dict[str, float], repeats: int, mbit: int) -> dict[str, float]:
    """Measure the link between two namespaces."""
    parameters = int(machine["parameters"])
    link = link_model([workers.all("mean", 300.0, parameters=parameters) for _ in range(repeats)], parameters)
    link["mbit"] = float(mbit)
    log(f"{mbit} Mbit/s: a mean takes {1000 * link['mean_s']:.1f} ms")
    return link


# -- checking ----------------------------------------------------------------------------------------------------------


def real_run(context: DistributedContext, strategy: str, straggler: str, batch: int, steps: int) -> dict[str, float]:
    """Train and return the times of the first and the last step. Collective."""
    times: list[float] = []
    done = 0

    def on_step(learner: Learner) -> None:
        nonlocal done
        times.append(time.perf_counter())
        done += learner.worker.step_info.local_samples

    task = Blstm()
    config = TrainConfig(
        strategy=strategy,
        straggler=straggler,
        timeout_s=120.0,
        epochs=steps * batch * context.size / task.samples,
        batch=batch,
        lr=0.01,
        eval_at_checkpoint=False,
        progress="none",
    )
    began = time.perf_counter()
    train(task, context, config, on_step=on_step)
    return {"began": began, "first": times[0], "ended": times[-1], "samples": float(done), "steps": float(len(times))}


def measured_rate(runs: list[dict[str, float]], batch: int) -> float:
    """Return samples/s after the first step of each rank, which includes the start."""
    samples = sum(run["samples"] - batch for run in runs)
    return samples / (max(run["ended"] for run in runs) - min(run["first"] for run in runs))


def predicted_rate(cluster: Cluster, strategy: str, machine: dict[str, float], batch: int, steps: int) -> float:
    """Return the simulated samples/s without the start of the run, as `measured_rate` does."""
    short, long = (
        simulate_timing(cluster, parameters=int(machine["parameters"]), strategy=strategy, batch=batch, steps=n)
        for n in (steps, 3 * steps)
    )
    return (long.samples - short.samples) / (long.busy_s - short.busy_s)


Runs = list[dict[str, float]]


def compare(
    case: str,
    on: Cluster,
    machine: dict[str, float],
    args: argparse.Namespace,
    pace: Callable[[], float],
    run: Callable[[str, int], Runs],
) -> list[dict[str, Any]]:
    """Predict and measure every strategy.

    The speed of a shared machine drifts within minutes. So `pace` measures the step time before every run, and that run is
    predicted at this pace.
    """
    predictions: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    measured: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for _ in range(args.repeats):
        for name in STRATEGIES:
            cluster = at_pace(on, pace() / machine["step_s"])
            steps = max(
                10, round(args.seconds * predicted_rate(cluster, name, machine, args.batch, 40) / (args.batch * LEARNERS))
            )
            predictions[name].append(predicted_rate(cluster, name, machine, args.batch, steps))
            measured[name].append(measured_rate(run(name, steps), args.batch))
    return [_row(case, name, predictions[name], measured[name]) for name in STRATEGIES]


def at_pace(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with steps that take `factor` times as long."""
    learner = cluster.learner
    return replace(
        cluster,
        learner=replace(
            learner,
            seconds_per_sample=factor * learner.seconds_per_sample,
            seconds_per_step=factor * learner.seconds_per_step,
        ),
    )


def check_machine(
    pool: ProcessPool, case: str, on: Cluster, straggler: str, machine: dict[str, float], args: argparse.Namespace
) -> list[dict[str, Any]]:
    def run(name: str, steps: int) -> Runs:
        return pool.run(real_run, name, straggler, args.batch, steps, size=LEARNERS, timeout_s=60 + 10 * args.seconds)

    return compare(
        case,
        on,
        machine,
        args,
        lambda: max(pool.run(step_seconds, Blstm(), args.batch, STEP_SECONDS, size=LEARNERS, timeout_s=300)),
        run,
    )


def check_link(
    workers: NetnsCluster, case: str, on: Cluster, machine: dict[str, float], args: argparse.Namespace
) -> list[dict[str, Any]]:
    def run(name: str, steps: int) -> Runs:
        return workers.all("timed", 120 + 10 * args.seconds, strategy=name, batch=args.batch, steps=steps)

    return compare(case, on, machine, args, lambda: max(m["step_s"] for m in workers.all("pace", 300.0, batch=args.batch)), run)


def _row(case: str, name: str, predictions: list[float], rates: list[float]) -> dict[str, Any]:
    errors = [prediction / real - 1 for prediction, real in zip(predictions, rates, strict=True)]
    prediction, real, error = statistics.median(predictions), statistics.median(rates), statistics.median(errors)
    row = {
        "case": case,
        "strategy": name,
        "predicted": round(prediction, 2),
        "measured": round(real, 2),
        "error": round(error, 4),
    }
    row |= {"range": [round(min(rates), 2), round(max(rates), 2)], "errors": [round(e, 4) for e in errors]}
    log(f"{case:<18} {name:<13} predicted {prediction:8.1f}  measured {real:8.1f} samples/s  error {100 * error:+.1f} %")
    return row


def format_report(report: dict[str, Any]) -> str:
    lines = [f"{name}: {path}" for name, path in report["files"].items()]
    if report["checks"]:
        head = ("case", "strategy", "predicted samples/s", "measured (range)", "error (of each run)")
        rows = [
            (
                r["case"],
                r["strategy"],
                r["predicted"],
                f"{r['measured']} ({r['range'][0]}-{r['range'][1]})",
                f"{100 * r['error']:+.1f} % ({', '.join(f'{100 * e:+.1f}' for e in r['errors'])})",
            )
            for r in report["checks"]
        ]
        lines += ["", markdown_table(head, rows), ""]
        lines.append(f"median error {100 * report['median_error']:.1f} %, worst {100 * report['worst_error']:.1f} %")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
