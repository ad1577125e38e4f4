"""Run under torchrun or mpirun: trains every deterministic strategy one after another; rank 0 prints what came out of each."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from roundelay.strategy import STRATEGIES, build
from roundelay.train.battery import Case, run_lesson
from roundelay.train.place import from_environment, open_place
from roundelay.wire.store import JobStore


def main(wire: str) -> None:
    torch.set_num_threads(1)
    place = from_environment(wire=wire, host="127.0.0.1", timeout_s=60.0, device="cpu", machines=0, digest={})
    store: Any = place.net.store
    assert isinstance(store, JobStore)
    found = {}
    for name in [*STRATEGIES, "hierarchical(kstep)"]:
        if name == "single" or not build(name).traits.deterministic:
            continue
        machines = 2 if "hierarchical" in name else 0
        apart = open_place(
            store.under(f"{name}/"), place.rank, place.size, place.machines[place.rank],
            wire=wire, host="127.0.0.1", timeout_s=60.0, device=place.device, machines=machines, digest={},
        )  # fmt: skip
        w = run_lesson(apart, Case(name, machines=machines))["w"]
        found[name] = hashlib.sha256(w.tobytes()).hexdigest()
    if place.rank == 0:
        print(json.dumps(found), flush=True)
    place.close()


if __name__ == "__main__":
    main(sys.argv[1])
