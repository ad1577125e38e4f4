"""Jobs that look at how a wire waits and moves on."""

from __future__ import annotations

import time
from typing import Any

import torch

from roundelay.launch.context import DistributedContext

PATIENCE_S = 30.0


def where(place: DistributedContext) -> str:
    """The name of this learner's machine."""
    return place.hosts[place.rank]


def waiting(place: DistributedContext, seconds: float) -> dict[str, float]:
    """Everybody waits for rank 0; the seconds of it, and the CPU seconds it took."""
    place.net.start_mean(torch.zeros(1)).wait()
    began, cpu = time.monotonic(), time.process_time()
    if place.rank == 0:
        time.sleep(seconds)
    place.net.start_mean(torch.zeros(1)).wait()
    return {"waited": time.monotonic() - began, "cpu": time.process_time() - cpu}


def overlapping(place: DistributedContext, length: int) -> dict[str, Any]:
    """A mean is started, then nobody calls the wire again: does it arrive while everybody computes?"""
    a = torch.randn(64, 64)
    pending = place.net.start_mean(torch.full((length,), float(place.rank)))
    deadline = time.monotonic() + PATIENCE_S
    while not pending.done and time.monotonic() < deadline:
        a.mm(a)
    arrived = pending.done
    return {"arrived": arrived, "mean": float(pending.wait().mean())}


def one_sided(place: DistributedContext, length: int, times: int) -> dict[str, Any]:
    """Everybody adds ones to everybody's vector, its own among them, and then reads them all."""
    net = place.net
    net.publish(torch.zeros(length))
    versions = [net.add(peer, torch.ones(length)) for _ in range(times) for peer in range(place.size)]
    net.start_mean(torch.zeros(1)).wait()
    seen = []
    for peer in range(place.size):
        out = torch.empty(length)
        seen.append((net.get(peer, out), float(out.min()), float(out.max())))
    net.start_mean(torch.zeros(1)).wait()
    return {"versions": versions, "seen": seen}
