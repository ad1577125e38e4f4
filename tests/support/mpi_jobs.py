"""Jobs that look at how a backend waits and moves on."""

from __future__ import annotations

import time
from typing import Any

import torch

from roundelay.launch.context import DistributedContext

PATIENCE_S = 30.0


def where(context: DistributedContext) -> str:
    """The name of this learner's machine."""
    return context.hosts[context.rank]


def waiting(context: DistributedContext, seconds: float) -> dict[str, float]:
    """Everybody waits for rank 0; the seconds of it, and the CPU seconds it took."""
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    began, cpu = time.monotonic(), time.process_time()
    if context.rank == 0:
        time.sleep(seconds)
    context.comm.all_reduce_mean(torch.zeros(1)).wait()
    return {"waited": time.monotonic() - began, "cpu": time.process_time() - cpu}


def overlapping(context: DistributedContext, length: int) -> dict[str, Any]:
    """A mean is started, then nobody calls the backend again: does it arrive while everybody computes?"""
    a = torch.randn(64, 64)
    pending = context.comm.all_reduce_mean(torch.full((length,), float(context.rank)))
    deadline = time.monotonic() + PATIENCE_S
    while not pending.done and time.monotonic() < deadline:
        a.mm(a)
    arrived = pending.done
    return {"arrived": arrived, "mean": float(pending.wait().mean())}


def one_sided(context: DistributedContext, length: int, times: int) -> dict[str, Any]:
    """Everybody adds ones to everybody's vector, its own among them, and then reads them all."""
    comm = context.comm
    comm.publish(torch.zeros(length))
    versions = [comm.remote_add(peer, torch.ones(length)) for _ in range(times) for peer in range(context.size)]
    comm.all_reduce_mean(torch.zeros(1)).wait()
    seen = []
    for peer in range(context.size):
        out = torch.empty(length)
        seen.append((comm.remote_get(peer, out), float(out.min()), float(out.max())))
    comm.all_reduce_mean(torch.zeros(1)).wait()
    return {"versions": versions, "seen": seen}
