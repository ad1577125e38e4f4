"""Jobs that observe how a backend waits and makes progress."""

from __future__ import annotations

import time
from typing import Any

import torch

from roundelay.core.wait import wait_until
from roundelay.launch.context import DistributedContext

TIMEOUT_S = 30.0


def where(context: DistributedContext) -> str:
    """Return the host name of this rank."""
    return context.hosts[context.rank]


def waiting(context: DistributedContext, seconds: float) -> dict[str, float]:
    """Make all ranks wait for rank 0; return the seconds of the wait and its CPU seconds."""
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    began, cpu = time.monotonic(), time.process_time()
    if context.rank == 0:
        time.sleep(seconds)
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    return {"waited": time.monotonic() - began, "cpu": time.process_time() - cpu}


def overlapping(context: DistributedContext, length: int) -> dict[str, Any]:
    """Start a mean and compute without calling the backend; return whether the mean completes meanwhile."""
    a = torch.randn(64, 64)
    work = context.comm.all_reduce_mean(torch.full((length,), float(context.rank)))
    done = wait_until(lambda: work.done, TIMEOUT_S, poll_s=0.0, sleep=lambda seconds: a.mm(a))
    return {"done": done, "mean": float(work.wait().mean())}


def one_sided(context: DistributedContext, length: int, times: int) -> dict[str, Any]:
    """Add ones to the vectors of all ranks, the own one included, and then read them all."""
    comm = context.comm
    comm.publish(torch.zeros(length))
    versions = [comm.remote_add(peer, torch.ones(length)) for _ in range(times) for peer in range(context.size)]
    comm.all_reduce_mean(torch.zeros(1)).wait()
    reads = []
    for peer in range(context.size):
        out = torch.empty(length)
        reads.append((comm.remote_get(peer, out), float(out.min()), float(out.max())))
    comm.all_reduce_mean(torch.zeros(1)).wait()
    return {"versions": versions, "reads": reads}
