"""How many samples each learner takes per step: one number, one per machine, or found by a short probe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roundelay.core.contracts import Task
from roundelay.errors import UsageError
from roundelay.launch.context import DistributedContext

if TYPE_CHECKING:
    from roundelay.engine.learner import Learner

PROBE_BATCH = 64
PROBES = 3


def batch_sizes(batch: int | str | Sequence[int], context: DistributedContext, learner: Learner, task: Task) -> list[int]:
    """Every rank's batch, by rank."""
    if isinstance(batch, str) and batch.isdigit():
        batch = int(batch)
    if not isinstance(batch, int | str):
        return list(batch)
    if isinstance(batch, int):
        if batch < 1:
            raise UsageError(f"a batch of {batch} samples", where="batch", hint="give at least 1")
        return [batch] * context.size
    if batch == "auto":
        return _by_speed(context, learner, task)
    given: dict[str, int] = {}
    for part in batch.split(","):
        host, _, number = part.strip().rpartition(":")
        if not host or not number.isdigit() or int(number) < 1:
            raise UsageError(
                f"'{part}' is not host:batch", where="batch", hint='write batch="hostA:128,hostB:32", a number, or auto'
            )
        given[host] = int(number)
    sizes = []
    for rank in range(context.size):
        names = (context.machines[rank], context.hosts[rank])
        found = [given[name] for name in names if name in given]
        if not found:
            raise UsageError(
                f"batch says nothing about the machine of rank {rank}",
                where=f"batch={batch}",
                hint=f"add {names[1]}:N (machines here: {', '.join(sorted(set(context.hosts) | set(context.machines)))})",
            )
        sizes.append(found[0])
    return sizes


def _by_speed(context: DistributedContext, learner: Learner, task: Task) -> list[int]:
    """A short probe of the gradient on every learner; the same global batch, shared out by speed."""
    count = min(PROBE_BATCH, task.samples)
    batch = task.batch(0, 0, count)
    random = context.runtime.rng_state()
    times = []
    for _ in range(PROBES + 1):
        began = context.runtime.clock()
        learner.flat.clear_gradients()
        learner._checked(lambda: _backward(task, learner, batch), count)()
        times.append(context.runtime.clock() - began)
    learner.flat.clear_gradients()
    context.runtime.set_rng_state(random)
    rate = 1.0 / sorted(times[1:])[PROBES // 2]
    store = learner.job.store
    store.set(f"probe/{context.rank}", json.dumps(rate))
    rates: list[float] = []
    for rank in range(context.size):
        while (note := store.get(f"probe/{rank}")) is None:
            store.pause(0.01, f"probe/{rank}")
        rates.append(json.loads(note))
    return [max(1, round(PROBE_BATCH * context.size * r / sum(rates))) for r in rates]


def _backward(task: Task, learner: Learner, batch: object) -> float:
    loss = task.loss(learner.module, batch)
    loss.backward()
    return float(loss.detach())
