"""Run learners as threads of this process."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from roundelay.comm.threads import ThreadGroup
from roundelay.errors import PeerLost, RoundelayError
from roundelay.launch.context import single_process_context


def run_threads(job: Callable[..., Any], *args: Any, size: int, simulate_nodes: int = 0, timeout_s: float = 60.0) -> list[Any]:
    """Call job(context, *args) on `size` threads, each with the context of one rank; return the results by rank.

    Raises the first error of a rank. PeerLost of other ranks counts as its consequence. A job that exceeds `timeout_s` is
    abandoned.
    """
    threads = ThreadGroup(size, timeout_s=timeout_s)
    results: list[Any] = [None] * size
    tracebacks: list[str] = []
    causes: list[RoundelayError] = []

    def learner(rank: int) -> None:
        try:
            with single_process_context("cpu", threads, rank, simulate_nodes) as context:
                results[rank] = job(context, *args)
        except BaseException as error:
            tracebacks.append(f"rank {rank}: {traceback.format_exc()}")
            if isinstance(error, RoundelayError) and not isinstance(error, PeerLost):
                causes.append(error)
            threads.fail(rank, str(error))

    running = [threading.Thread(target=learner, args=(rank,), daemon=True) for rank in range(size)]
    for thread in running:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in running) and not tracebacks:
        tracebacks.append(f"not finished within {timeout_s:.0f} s")
    if causes:
        raise causes[0]
    if tracebacks:
        raise PeerLost(f"a thread failed: {tracebacks[0]}", where="backend threads")
    return results
