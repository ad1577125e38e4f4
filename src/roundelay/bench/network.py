"""Measure the links between the ranks and the step time of the task, and predict which strategy is fastest on them.

Started alone, the command measures learners=N processes on this machine. Started under torchrun, it measures the ranks of
that job, pair by pair. The prediction simulates each strategy in virtual time on a cluster with the measured links.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from roundelay.bench import add_common_arguments, load_task
from roundelay.core.contracts import Task
from roundelay.errors import PeerLost, UsageError
from roundelay.launch.context import DistributedContext, context_from_env, fake_machines, local_address_towards, under_launcher
from roundelay.log.output import emit, markdown_table
from roundelay.preflight.links import MeasuredLink, measure_links
from roundelay.simulate.calibrate import gather_json, pair_average_seconds, parameter_count, step_seconds
from roundelay.simulate.cluster import Cluster, ComputeModel, LinkModel, LinkModels, MachineGroup, MemoryModel, StragglerModel
from roundelay.simulate.run import simulate_timing
from roundelay.testing.pools import ProcessPool

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
NOTICEABLE_SLOWDOWN = 1.1
"""Ranks whose steps take at least this multiple of the median step are modeled as stragglers."""
EQUALLY_FAST = 1.05
"""Prefer sync if no other strategy is faster by more than this factor: sync is exactly SGD."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="roundelay bench network",
        description=__doc__.split("\n")[0],
        epilog="examples: roundelay bench network learners=4;  torchrun … -m roundelay bench network blstm",
    )
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    task, settings = load_task(args.inputs)
    batch, seconds = int(str(settings.batch)), 0.5 if args.quick else 5.0
    if under_launcher():
        with context_from_env(
            backend="torch", bind_address=settings.bind_address, timeout_s=TIMEOUT_S, device="cpu", simulate_nodes=0, digest={}
        ) as context:
            address = os.environ.get("MASTER_ADDR", "127.0.0.1")
            host = local_address_towards(address, 0) if settings.bind_address == "auto" else settings.bind_address
            ranks, machines = measure_rank(context, task, batch, seconds, host), context.machines
            is_first = context.rank == 0
        if not is_first:
            return 0
    else:
        if settings.learners < 2:
            raise UsageError(f"learners must be >= 2 (got {settings.learners})", where="learners", hint="set learners=2")
        machines = fake_machines(["here"] * settings.learners, settings.simulate_nodes)
        with ProcessPool(settings.learners, "shm") as pool:
            ranks = pool.run(measure_rank, task, batch, seconds, "127.0.0.1", timeout_s=2 * TIMEOUT_S)[0]
    cluster = cluster_from(ranks, machines, batch, parameter_count(task))
    record = predict(cluster, parameter_count(task), batch)
    record["links"] = ranks[0]["links"]
    emit(json.dumps(record) if args.json else format_prediction(record))
    return 0


def measure_rank(context: DistributedContext, task: Task, batch: int, seconds: float, host: str) -> list[dict[str, Any]]:
    """Measure links and step time; return the measurements of all ranks, by rank. Collective.

    The links are in the entry of rank 0. `host` is the address at which this rank accepts connections.
    """
    torch.set_num_threads(1)
    store: Any = context.comm.store
    links = measure_links(store.under("links/"), context.rank, context.size, host, TIMEOUT_S)
    local = {
        "step_s": step_seconds(context, task, batch, seconds),
        "exchange_s": pair_average_seconds(parameter_count(task)),
        "cores": len(os.sched_getaffinity(0)),
        "links": [asdict(link) for link in links],
    }
    return gather_json(context, "bench", local, TIMEOUT_S)


def cluster_from(ranks: Sequence[Mapping[str, Any]], machines: Sequence[str], batch: int, parameters: int) -> Cluster:
    """Build the cluster that the measurements describe. Raises PeerLost if two ranks cannot reach each other."""
    links = [MeasuredLink(**link) for link in ranks[0]["links"]]
    for link in links:
        if link.error:
            raise PeerLost(link.error, where=f"ranks {link.a} and {link.b}", hint="run roundelay check under the same launcher")
    step_s = statistics.median(rank["step_s"] for rank in ranks)
    exchange_s = statistics.median(rank["exchange_s"] for rank in ranks)
    learners = [machines.count(name) for name in dict.fromkeys(machines)]
    crowded = any(rank["cores"] <= machines.count(machines[number]) for number, rank in enumerate(ranks))
    return Cluster(
        name="measured",
        about="measured by roundelay bench network",
        machines=tuple(MachineGroup(1, count) for count in learners),
        learner=ComputeModel(seconds_per_sample=step_s / batch),
        link=LinkModels(
            inside=link_model([link for link in links if machines[link.a] == machines[link.b]], shared=False),
            between=link_model([link for link in links if machines[link.a] != machines[link.b]], shared=True),
        ),
        memory=MemoryModel(exchange_gb_per_s=8e-9 * parameters / exchange_s, contention=0.5 if crowded else 0.0),
        straggler=tuple(
            StragglerModel(rank["step_s"] / step_s, learner=number)
            for number, rank in enumerate(ranks)
            if rank["step_s"] >= NOTICEABLE_SLOWDOWN * step_s
        ),
    )


def link_model(links: Sequence[MeasuredLink], shared: bool) -> LinkModel:
    """Return the median of the measured links; a link without limits if there are none."""
    if not links:
        return LinkModel(shared=shared)
    rate = statistics.median(link.megabytes_per_s for link in links)
    round_trip = statistics.median(link.round_trip_ms for link in links)
    return LinkModel(gbit_per_s=max(8e-3 * rate, 1e-6), latency_us=500 * round_trip, shared=shared)


def predict(cluster: Cluster, parameters: int, batch: int, steps: int = 100) -> dict[str, Any]:
    """Simulate the strategies on `cluster` and recommend one."""
    names = ["sync", "adpsgd"]
    machines = len(set(cluster.machine_names()))
    if 1 < machines < cluster.learners:
        names.append("hierarchical(adpsgd)")
    rows: list[dict[str, Any]] = []
    for name in names:
        outcome = simulate_timing(cluster, parameters=parameters, strategy=name, batch=batch, steps=steps)
        rows.append({"strategy": name, "samples_per_s": outcome.samples_per_s, "efficiency": outcome.efficiency})
    rate: dict[str, float] = {row["strategy"]: row["samples_per_s"] for row in rows}
    best = max(rate, key=lambda name: rate[name])
    if rate[best] <= EQUALLY_FAST * rate["sync"]:
        best, reason = "sync", f"no strategy is faster by more than {100 * (EQUALLY_FAST - 1):.0f} %, and sync is exactly SGD"
    else:
        reason = f"it processes {rate[best] / rate['sync']:.2f} times as many samples per second as sync"
    link = cluster.link.between if machines > 1 else cluster.link.inside
    return {
        "learners": cluster.learners,
        "machines": machines,
        "parameters": parameters,
        "batch": batch,
        "step_s": batch * cluster.learner.seconds_per_sample,
        "gbit_per_s": link.gbit_per_s,
        "round_trip_ms": 2e-3 * link.latency_us,
        "stragglers": {str(s.learner): s.factor for s in cluster.straggler},
        "strategies": rows,
        "recommendation": best,
        "reason": reason,
    }


def format_prediction(record: Mapping[str, Any]) -> str:
    """Format the measurement, the prediction as a table, and the recommendation."""
    measured = (
        f"{record['learners']} learners on {record['machines']} machine(s), {record['parameters']:,} parameters: a step of "
        f"{record['batch']} samples takes {1000 * record['step_s']:.1f} ms, the link carries {record['gbit_per_s']:.3g} Gbit/s "
        f"with a round trip of {record['round_trip_ms']:.3g} ms"
    )
    slow = "".join(f"\nrank {rank} takes {factor:.2f} times the median step" for rank, factor in record["stragglers"].items())
    rows = [(r["strategy"], round(r["samples_per_s"], 1), f"{100 * r['efficiency']:.0f} %") for r in record["strategies"]]
    table = markdown_table(("strategy", "predicted samples/s", "of learners without communication"), rows)
    return f"{measured}{slow}\n\n{table}\n\nUse {record['recommendation']} here: {record['reason']}."
