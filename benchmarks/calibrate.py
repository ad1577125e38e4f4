"""roundelay bench calibrate: measures this machine into a cluster file, and checks what the file predicts.

compute     seconds per sample and per step, two learners side by side, from two batch sizes
exchange     one pair average in shared memory;   mean   one global mean: what the inside link carries
link        the same between two network namespaces on a cable (needs root), for every rate given
Where there are no more cores than learners, what travels while a learner computes is carried by its own core: the CPU seconds
per byte are measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import overhead
from benchmarks.namespaces import NetnsMachines, check
from benchmarks.netns_cluster import NetnsCluster
from roundelay.engine.config import TrainConfig
from roundelay.engine.learner import Learner
from roundelay.engine.trainer import train
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext
from roundelay.launch.runtime import cpu_seconds
from roundelay.simulate.cluster import Cluster, StragglerModel, from_tree
from roundelay.simulate.run import simulate_timing
from roundelay.testing.pools import ProcessPool
from roundelay.testing.tasks import Blstm

STRATEGIES = ("sync", "kstep", "delay_by_one", "adpsgd")
TASK = "roundelay.testing.tasks:Blstm"
LEARNERS = 2


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(
        prog="roundelay bench calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples: roundelay bench calibrate --out here.toml;  sudo roundelay bench calibrate --links 1000,200 --check",
    )
    p.add_argument(
        "--out", default="calibrated.toml", help="the cluster file; links go to files beside it (default %(default)s)"
    )
    p.add_argument(
        "--links", default="", metavar="MBIT,MBIT", help="also cables of so many Mbit/s, between two machines (root)"
    )
    p.add_argument("--batch", type=int, default=8, help="samples per learner and step")
    p.add_argument("--check", action="store_true", help="predict and measure four strategies, print the errors")
    p.add_argument("--seconds", type=float, default=20.0, help="of a measured run (default %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="runs of everything, turn by turn; the median counts")
    p.add_argument("--json", action="store_true", help="print JSON")
    args = p.parse_args(argv)
    links = _links(args.links)
    if args.batch < 1 or args.seconds <= 0 or args.repeats < 1:
        raise UsageError("--batch, --seconds and --repeats must be above 0", where="bench calibrate", hint="see --help")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    out = Path(args.out)
    found: dict[str, Any] = {"cores": os.cpu_count(), "batch": args.batch, "files": {}, "checks": []}
    with ProcessPool(LEARNERS, "shm") as pool:
        here = measure_here(pool, args.batch, args.repeats)
        found["here"] = here
        _write(out, cluster_tree(here), found, "shm")
        if args.check:
            cluster = from_tree({"name": out.stem, **cluster_tree(here)})
            halved = replace(cluster, straggler=(StragglerModel(factor=2.0, learner=1),))
            for case, on, slow in (("equal", cluster, ""), ("one at half speed", halved, "1:2.0")):
                found["checks"] += check_here(pool, case, on, slow, here, args)
    for mbit in links:
        with NetnsMachines(LEARNERS, mbit) as machines, NetnsCluster(machines, [1] * LEARNERS, TASK, {}) as crew:
            link = measure_link(crew, here, args.repeats, mbit)
            found[f"{mbit}mbit"] = link
            tree = cluster_tree(here, link)
            _write(out.with_name(f"{out.stem}-{mbit}mbit{out.suffix}"), tree, found, f"{mbit} Mbit/s")
            if args.check:
                cluster = from_tree({"name": f"{out.stem}-{mbit}mbit", **tree})
                found["checks"] += check_link(crew, f"{mbit} Mbit/s", cluster, here, args)
    if found["checks"]:
        errors = sorted(abs(row["error"]) for row in found["checks"])
        found["median_error"], found["worst_error"] = statistics.median(errors), errors[-1]
    print(json.dumps(found) if args.json else printed(found))
    return 0


def _links(text: str) -> list[int]:
    try:
        links = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(
            f"--links {text}", where="bench calibrate", hint="give Mbit/s, for example --links 1000,200"
        ) from error
    if any(mbit < 1 for mbit in links):
        raise UsageError(f"--links {text}: nothing would ever arrive", where="bench calibrate", hint="give Mbit/s above 0")
    if links:
        check()
    return links


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_here(pool: ProcessPool, batch: int, repeats: int) -> dict[str, float]:
    """Compute, shared memory and the loopback."""
    parameters = sum(p.numel() for p in Blstm().build().parameters())
    small, large = max(1, batch // 2), 2 * batch
    steps: dict[int, list[float]] = {small: [], batch: [], large: []}
    for _ in range(repeats):  # turn by turn: the machine's speed drifts
        for size, seen in steps.items():
            seen.append(max(pool.run(free_steps, size, size=LEARNERS, timeout_s=300)))
    step = {size: statistics.median(seen) for size, seen in steps.items()}
    per_sample = (step[large] - step[small]) / (large - small)
    # the line goes through the batch that will be used
    found = {"parameters": float(parameters), "seconds_per_sample": per_sample, "step_s": step[batch]}
    found["seconds_per_step"] = max(step[batch] - batch * per_sample, 0.0)
    if found["seconds_per_step"] == 0.0:
        found["seconds_per_sample"] = step[batch] / batch
    say(f"a step of {batch} samples takes {1000 * step[batch]:.1f} ms")
    costs = [pool.run(overhead.costs, parameters, 5, size=LEARNERS, timeout_s=300)[0] for _ in range(repeats)]
    found["meet_s"] = statistics.median(c["meet_s"] for c in costs)
    carried = [pool.run(carry, parameters, size=LEARNERS, timeout_s=300) for _ in range(repeats)]
    found |= _carried(carried, parameters)
    say(f"a exchange takes {1000 * found['meet_s']:.2f} ms, a mean {1000 * found['mean_s']:.2f} ms")
    return found


def measure_link(crew: NetnsCluster, here: dict[str, float], repeats: int, mbit: int) -> dict[str, float]:
    parameters = int(here["parameters"])
    carried = [crew.all("carry", 300.0, parameters=parameters) for _ in range(repeats)]
    found = _carried(carried, parameters)
    found["mbit"] = float(mbit)
    say(f"{mbit} Mbit/s: a mean takes {1000 * found['mean_s']:.1f} ms")
    return found


def _carried(runs: list[list[dict[str, float]]], parameters: int) -> dict[str, float]:
    def median(key: str) -> float:
        return statistics.median(max(member[key] for member in run) for run in runs)

    mean, tiny, size = median("mean_s"), median("tiny_s"), 4.0 * parameters
    # of two learners each sends the vector once: half for the sum, half for handing it out
    return {
        "mean_s": mean,
        "tiny_s": tiny,
        "gbit_per_s": 8e-9 * size / max(mean - tiny, 1e-9),
        "latency_us": 1e6 * tiny / 2,
        "cpu_s_per_gb": 1e9 * median("cpu_s") / size,
    }


def carry(context: DistributedContext, parameters: int, repeats: int = 5) -> dict[str, float]:
    """Seconds of a mean of a model and of a single number, and the CPU seconds of the former."""
    comm, x, one = context.comm, torch.randn(parameters), torch.zeros(1)
    means, tinies, cpu = [], [], []
    for number in range(repeats + 1):
        comm.all_reduce_mean(one).wait()
        began = time.perf_counter()
        comm.all_reduce_mean(one).wait()
        tiny = time.perf_counter() - began
        began, used = time.perf_counter(), cpu_seconds()
        comm.all_reduce_mean(x).wait()
        took, used = time.perf_counter() - began, cpu_seconds() - used
        if number:
            means.append(took)
            tinies.append(tiny)
            cpu.append(used)
    return {"mean_s": statistics.median(means), "tiny_s": statistics.median(tinies), "cpu_s": statistics.median(cpu)}


def free_steps(context: DistributedContext, batch: int, seconds: float = 3.0) -> float:
    """Seconds of a step of plain SGD while the other learner does the same, without a word between them."""
    task = Blstm()
    module = task.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    took: list[float] = []
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end or len(took) < 4:
        data = task.batch(0, (len(took) * batch) % (task.samples - batch), (len(took) * batch) % (task.samples - batch) + batch)
        optimizer.zero_grad(set_to_none=True)
        task.loss(module, data).backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    return statistics.fmean(took[1:])


# -- writing -----------------------------------------------------------------------------------------------------------


def cluster_tree(here: dict[str, float], link: dict[str, float] | None = None) -> dict[str, Any]:
    """What a cluster file says: two learners on this machine, or one on each of two machines."""
    crowded = (os.cpu_count() or 1) <= LEARNERS
    size = 4 * here["parameters"]
    source = "measured here by roundelay bench calibrate"
    tree: dict[str, Any] = {
        "about": source,
        "machines": [{"count": 1, "learners": LEARNERS}] if link is None else [{"count": LEARNERS, "learners": 1}],
        "learner": {"seconds_per_sample": here["seconds_per_sample"], "seconds_per_step": here["seconds_per_step"]},
        "memory": {"exchange_gb_per_s": 2e-9 * size / here["meet_s"], "contention": 0.5 if crowded else 0.0},
        "link": {"inside": {**_link(here, crowded), "shared": False}},
        "sources": {"learner": source, "link": source, "memory": source},
    }
    if link is not None:
        tree["link"]["between"] = _link(link, crowded)
    return tree


def _link(found: dict[str, float], crowded: bool) -> dict[str, Any]:
    names = ("gbit_per_s", "latency_us") + (("cpu_s_per_gb",) if crowded else ())
    return {name: found[name] for name in names}


def _write(path: Path, tree: dict[str, Any], found: dict[str, Any], what: str) -> None:
    lines = [f"about = {json.dumps(tree['about'])}"]
    for machine in tree["machines"]:
        lines += ["", "[[machines]]", *(f"{key} = {value}" for key, value in machine.items())]
    tables = {"learner": tree["learner"], "memory": tree["memory"], "sources": tree["sources"]}
    tables |= {f"link.{name}": link for name, link in tree["link"].items()}
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [
            f"{key} = {json.dumps(value) if isinstance(value, str | bool) else f'{value:.6g}'}" for key, value in table.items()
        ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where="--out", hint="choose another file") from error
    found["files"][what] = str(path)
    say(f"written: {path}")


# -- checking ----------------------------------------------------------------------------------------------------------


def real_run(context: DistributedContext, strategy: str, slow: str, batch: int, steps: int) -> dict[str, float]:
    """A run of the ordinary loop; when its first step began and its last ended."""
    times: list[float] = []
    done = 0

    def on_step(learner: Learner) -> None:
        nonlocal done
        times.append(time.perf_counter())
        done += learner.worker.step_info.local_samples

    task = Blstm()
    config = TrainConfig(
        strategy=strategy,
        straggler=slow,
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


def rate_of(runs: list[dict[str, float]], batch: int) -> float:
    """Samples per second from the end of the first steps on, which still pay for the start."""
    samples = sum(run["samples"] - batch for run in runs)
    return samples / (max(run["ended"] for run in runs) - min(run["first"] for run in runs))


def predicted(cluster: Cluster, strategy: str, here: dict[str, float], batch: int, steps: int) -> float:
    """Samples per second of a run under way: its beginning is in neither figure, as in `rate_of`."""
    short, long = (
        simulate_timing(cluster, parameters=int(here["parameters"]), strategy=strategy, batch=batch, steps=n)
        for n in (steps, 3 * steps)
    )
    return (long.samples - short.samples) / (long.busy_s - short.busy_s)


Runs = list[dict[str, float]]


def compare(
    case: str,
    on: Cluster,
    here: dict[str, float],
    args: argparse.Namespace,
    pace: Callable[[], float],
    run: Callable[[str, int], Runs],
) -> list[dict[str, Any]]:
    """Predicts and measures every strategy. A shared machine's speed drifts within minutes, so before every turn the learners
    compute by themselves for a moment, and that turn is predicted at the `pace` they had."""
    guesses: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    measured: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for _ in range(args.repeats):
        for name in STRATEGIES:
            cluster = at_pace(on, pace() / here["step_s"])
            steps = max(10, round(args.seconds * predicted(cluster, name, here, args.batch, 40) / (args.batch * LEARNERS)))
            guesses[name].append(predicted(cluster, name, here, args.batch, steps))
            measured[name].append(rate_of(run(name, steps), args.batch))
    return [_row(case, name, guesses[name], measured[name]) for name in STRATEGIES]


def at_pace(cluster: Cluster, longer: float) -> Cluster:
    """The same cluster, its steps so many times as long."""
    learner = cluster.learner
    return replace(
        cluster,
        learner=replace(
            learner,
            seconds_per_sample=longer * learner.seconds_per_sample,
            seconds_per_step=longer * learner.seconds_per_step,
        ),
    )


def check_here(
    pool: ProcessPool, case: str, on: Cluster, slow: str, here: dict[str, float], args: argparse.Namespace
) -> list[dict[str, Any]]:
    def run(name: str, steps: int) -> Runs:
        return pool.run(real_run, name, slow, args.batch, steps, size=LEARNERS, timeout_s=60 + 10 * args.seconds)

    return compare(case, on, here, args, lambda: max(pool.run(free_steps, args.batch, size=LEARNERS, timeout_s=300)), run)


def check_link(
    crew: NetnsCluster, case: str, on: Cluster, here: dict[str, float], args: argparse.Namespace
) -> list[dict[str, Any]]:
    def run(name: str, steps: int) -> Runs:
        return crew.all("timed", 120 + 10 * args.seconds, strategy=name, batch=args.batch, steps=steps)

    return compare(case, on, here, args, lambda: max(m["step_s"] for m in crew.all("pace", 300.0, batch=args.batch)), run)


def _row(case: str, name: str, guesses: list[float], seen: list[float]) -> dict[str, Any]:
    errors = [guess / real - 1 for guess, real in zip(guesses, seen, strict=True)]
    guess, real, error = statistics.median(guesses), statistics.median(seen), statistics.median(errors)
    row = {"case": case, "strategy": name, "predicted": round(guess, 2), "measured": round(real, 2), "error": round(error, 4)}
    row |= {"range": [round(min(seen), 2), round(max(seen), 2)], "errors": [round(e, 4) for e in errors]}
    say(f"{case:<18} {name:<13} predicted {guess:8.1f}  measured {real:8.1f} samples/s  error {100 * error:+.1f} %")
    return row


def printed(found: dict[str, Any]) -> str:
    lines = [f"{what}: {path}" for what, path in found["files"].items()]
    if found["checks"]:
        lines += [
            "",
            "| case | strategy | predicted samples/s | measured (range) | error (of each turn) |",
            "|---|---|---|---|---|",
        ]
        for r in found["checks"]:
            low, high = r["range"]
            lines.append(
                f"| {r['case']} | {r['strategy']} | {r['predicted']} | {r['measured']} ({low}-{high}) "
                f"| {100 * r['error']:+.1f} % ({', '.join(f'{100 * e:+.1f}' for e in r['errors'])}) |"
            )
        lines += ["", f"median error {100 * found['median_error']:.1f} %, worst {100 * found['worst_error']:.1f} %"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
