"""Script for torchrun or mpirun: train with every deterministic strategy; rank 0 prints a hash of each result."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from roundelay.fleet.store import JobStore
from roundelay.launch.context import context_from_env, create_context
from roundelay.strategies import STRATEGIES, build
from roundelay.testing.check_jobs import RunSpec, run_toy_task


def main(backend: str) -> None:
    torch.set_num_threads(1)
    context = context_from_env(
        backend=backend, bind_address="127.0.0.1", timeout_s=60.0, device="cpu", simulate_nodes=0, digest={}
    )
    store: Any = context.comm.store
    assert isinstance(store, JobStore)
    hashes = {}
    for name in [*STRATEGIES, "hierarchical(kstep)"]:
        if name == "single" or not build(name).traits.deterministic:
            continue
        simulate_nodes = 2 if "hierarchical" in name else 0
        own_context = create_context(
            store.under(f"{name}/"), context.rank, context.size, context.machines[context.rank], backend=backend,
            bind_address="127.0.0.1", timeout_s=60.0, device=context.device, simulate_nodes=simulate_nodes, digest={},
        )  # fmt: skip
        w = run_toy_task(own_context, RunSpec(name, simulate_nodes=simulate_nodes))["w"]
        hashes[name] = hashlib.sha256(w.tobytes()).hexdigest()
    if context.rank == 0:
        print(json.dumps(hashes), flush=True)
    context.close()


if __name__ == "__main__":
    main(sys.argv[1])
