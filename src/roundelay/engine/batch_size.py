"""Batch size of every learner: one number for all, one per host, or proportional to speed as measured by a short probe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roundelay.core.contracts import Task
from roundelay.core.wait import store_sleep, wait_until
from roundelay.errors import PeerLost, UsageError
from roundelay.fleet.membership import FAILURES
from roundelay.launch.context import DistributedContext

if TYPE_CHECKING:
    from roundelay.engine.learner import Learner

PROBE_BATCH = 64
PROBES = 3


def batch_sizes(batch: int | str | Sequence[int], context: DistributedContext, learner: Learner, task: Task) -> list[int]:
    """Return the batch size of every rank.

    An integer or a sequence is used as it is, "hostA:128,hostB:32" sets one per host, and "auto" measures the ranks
    (collective).
    """
    if isinstance(batch, str) and batch.isdigit():
        batch = int(batch)
    if not isinstance(batch, int | str):
        return list(batch)
    if isinstance(batch, int):
        if batch < 1:
            raise UsageError(f"batch must be >= 1 (got {batch})", where="batch", hint="set batch to at least 1")
        return [batch] * context.size
    if batch == "auto":
        return _proportional_to_speed(context, learner, task)
    by_host: dict[str, int] = {}
    for part in batch.split(","):
        host, _, number = part.strip().rpartition(":")
        if not host or not number.isdigit() or int(number) < 1:
            raise UsageError(
                f"batch must be a number, auto, or a list of host:number (got '{part}')",
                where="batch",
                hint='write batch="hostA:128,hostB:32"',
            )
        by_host[host] = int(number)
    sizes = []
    for rank in range(context.size):
        names = (context.machines[rank], context.hosts[rank])
        matches = [by_host[name] for name in names if name in by_host]
        if not matches:
            raise UsageError(
                f"batch must list the host of every rank (rank {rank} is missing)",
                where=f"batch={batch}",
                hint=f"add {names[1]}:N (hosts of this job: {', '.join(sorted(set(context.hosts) | set(context.machines)))})",
            )
        sizes.append(matches[0])
    return sizes


def _proportional_to_speed(context: DistributedContext, learner: Learner, task: Task) -> list[int]:
    """Time a few gradients on every rank and divide a global batch of PROBE_BATCH per rank by speed. Collective."""
    count = min(PROBE_BATCH, task.samples)
    batch = task.batch(0, 0, count)
    random = context.runtime.rng_state()
    times = []
    for _ in range(PROBES + 1):
        began = context.runtime.clock()
        learner.flat.clear_gradients()
        learner.timed(lambda: _backward(task, learner, batch), count)()
        times.append(context.runtime.clock() - began)
    learner.flat.clear_gradients()
    context.runtime.set_rng_state(random)
    rate = 1.0 / sorted(times[1:])[PROBES // 2]
    store = learner.job.store
    store.set(f"probe/{context.rank}", json.dumps(rate))
    rates: list[float] = []
    for rank in range(context.size):
        key = f"probe/{rank}"
        text = wait_until(
            lambda key=key: store.get(key),  # type: ignore[misc]
            learner.options.timeout_s,
            lambda rank=rank: PeerLost(  # type: ignore[misc]
                f"rank {rank} failed or did not measure its speed in time",
                where=f"rank {context.rank}, batch=auto",
                hint="look at its log; raise timeout_s, or set batch to a number",
            ),
            failures=learner.job.membership.failed_ranks,
            awaited=[rank],
            poll_s=0.01,
            clock=context.runtime.clock,
            sleep=store_sleep(store, key, FAILURES),
        )
        rates.append(json.loads(text or "0"))
    return [max(1, round(PROBE_BATCH * context.size * r / sum(rates))) for r in rates]


def _backward(task: Task, learner: Learner, batch: object) -> float:
    loss = task.loss(learner.module, batch)
    loss.backward()
    return float(loss.detach())
