"""Where this process stands in the job: its rank, its machine, its store, its wire.

The variables of torchrun decide (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT);
without them a process is alone. Before the first step all ranks call the roll: they agree on versions and settings or
stop with a sentence that says who differs in what.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import roundelay
from roundelay.core.host import Host
from roundelay.core.net import Net
from roundelay.errors import PeerLost, UsageError, nearest
from roundelay.train.host import RealHost
from roundelay.wire.inproc import Threads
from roundelay.wire.store import JobStore, join, serve
from roundelay.wire.torchdist import ProcessNet

WIRES = {
    "auto": "shared memory inside a machine, torch.distributed between machines",
    "shm": "shared memory: learners of one machine",
    "torchdist": "torch.distributed collectives and a connection per edge, one machine or many",
    "inproc": "threads of one process",
}


@dataclass
class Place:
    """One learner's place."""

    net: Net
    rank: int
    size: int
    machines: list[str]
    """The machine of every rank."""
    hosts: list[str]
    device: torch.device
    keep_alive: list[Any] = field(default_factory=list)
    """What must live as long as the job: the store's server, if it runs here."""
    host: Host = field(default_factory=RealHost)

    def machine_of(self, rank: int) -> list[int]:
        """Ranks on the same machine, in order."""
        return [r for r in range(self.size) if self.machines[r] == self.machines[rank]]

    @property
    def leaders(self) -> list[int]:
        """The first rank of every machine."""
        first: dict[str, int] = {}
        for rank, machine in enumerate(self.machines):
            first.setdefault(machine, rank)
        return sorted(first.values())

    def close(self) -> None:
        self.net.close()


def choose_device(name: str, local_rank: int) -> torch.device:
    """auto: a GPU of one's own where there is one (untested here), else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'", where="device", do="use auto, cpu or cuda") from error


def check_wire(wire: str) -> None:
    if wire not in WIRES:
        raise UsageError(f"there is no wire '{wire}'", where="wire", do=nearest(wire, WIRES))


def split(machines: list[str], parts: int) -> list[str]:
    """Pretends that one machine is several: contiguous ranks, sizes as equal as can be."""
    if parts <= 0:
        return machines
    if parts > len(machines):
        raise UsageError(f"{len(machines)} learners cannot be split into {parts} machines", where="machines", do="give fewer")
    return [f"{name}#{rank * parts // len(machines)}" for rank, name in enumerate(machines)]


def alone(device: str = "auto", threads: Threads | None = None, rank: int = 0, machines: int = 0) -> Place:
    """A place among threads of this process; by default the only one."""
    threads = threads or Threads(1)
    names = split(["here"] * threads.size, machines)
    return Place(threads.net(rank), rank, threads.size, names, ["localhost"] * threads.size, choose_device(device, rank))


def under_launcher(env: Mapping[str, str] = os.environ) -> bool:
    return "RANK" in env and "WORLD_SIZE" in env


def from_environment(
    *,
    wire: str,
    host: str,
    timeout_s: float,
    device: str,
    machines: int,
    digest: Mapping[str, Any],
    env: Mapping[str, str] = os.environ,
) -> Place:
    """The place that torchrun's variables describe."""
    values = {}
    for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        try:
            values[key] = int(env.get(key, ""))
        except ValueError as error:
            raise UsageError(
                f"{key} is {env.get(key)!r}, not a number",
                where="environment",
                do="start with torchrun, or with learners=N",
            ) from error
    rank, size = values["RANK"], values["WORLD_SIZE"]
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), values["MASTER_PORT"]
    keep: list[Any] = []
    hosted_elsewhere = env.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    if rank == 0 and not hosted_elsewhere:
        keep.append(serve(address, port))
    store = JobStore(join(address, port, timeout_s), f"job/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/")
    local_rank = int(env.get("LOCAL_RANK", "0"))
    machine = env.get("GROUP_RANK") or socket.gethostname()
    address_here = host_towards(address, port) if host == "auto" else host
    return open_place(
        store,
        rank,
        size,
        machine,
        wire=wire,
        host=address_here,
        timeout_s=timeout_s,
        device=choose_device(device, local_rank),
        machines=machines,
        digest=digest,
        keep=keep,
    )


def host_towards(address: str, port: int) -> str:
    """This machine's address on the route to the first machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(address), port or 1))
        return str(probe.getsockname()[0])


def open_place(
    store: JobStore,
    rank: int,
    size: int,
    machine: str,
    *,
    wire: str,
    host: str,
    timeout_s: float,
    device: torch.device,
    machines: int,
    digest: Mapping[str, Any],
    keep: list[Any] | None = None,
) -> Place:
    """Calls the roll and opens the wire."""
    cards = call_the_roll(store, rank, size, machine, timeout_s, digest)
    names = split([card["machine"] for card in cards], machines)
    if wire == "shm" and len({card["machine"] for card in cards}) > 1:
        raise UsageError("wire=shm cannot reach other machines", where=f"rank {rank}", do="use wire=auto")
    # A machine that is split for a test behaves like several: shared memory only inside each part.
    share = wire == "shm" or wire == "auto"
    places = names if wire == "auto" else [card["machine"] for card in cards]
    net = ProcessNet(store, range(size), rank, places, host=host, share_memory=share, timeout_s=timeout_s, device=device)
    return Place(net, rank, size, names, [card["host"] for card in cards], device, keep or [])


def call_the_roll(
    store: JobStore, rank: int, size: int, machine: str, timeout_s: float, digest: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every rank shows its card; all leave with all cards, or with the reason why not."""
    mine = {
        "size": size,
        "machine": machine,
        "host": socket.gethostname(),
        "versions": {
            "roundelay": roundelay.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "settings": {key: json.dumps(value, sort_keys=True, default=str) for key, value in digest.items()},
        "pid": os.getpid(),
    }
    taken = store.add(f"card-taken/{rank}", 1)
    if taken > 1:
        raise UsageError(f"two processes say they are rank {rank}", where="RANK", do="give every process its own rank")
    store.set(f"card/{rank}", json.dumps(mine))
    deadline = time.monotonic() + timeout_s
    cards: dict[int, dict[str, Any]] = {}
    while len(cards) < size:
        for other in range(size):
            if other not in cards and (card := store.get(f"card/{other}")) is not None:
                cards[other] = json.loads(card)
                _compare(mine, cards[other], rank, other)
        if len(cards) < size:
            if time.monotonic() > deadline:
                absent = ", ".join(str(r) for r in range(size) if r not in cards)
                raise PeerLost(
                    f"rank {absent} did not answer the roll in {timeout_s:.0f} s",
                    where=f"rank {rank}",
                    do="check that it was started with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; see its log",
                )
            time.sleep(0.01)
    return [cards[r] for r in range(size)]


def _compare(mine: dict[str, Any], theirs: dict[str, Any], rank: int, other: int) -> None:
    if mine["size"] != theirs["size"]:
        raise UsageError(
            f"rank {rank} was told of {mine['size']} learners, rank {other} of {theirs['size']}",
            where="WORLD_SIZE",
            do="start all ranks with the same world size",
        )
    for what in ("versions", "settings"):
        for key in sorted(set(mine[what]) | set(theirs[what])):
            a, b = mine[what].get(key), theirs[what].get(key)
            if a != b:
                raise UsageError(
                    f"rank {rank} has {key} {a}, rank {other} has {b}",
                    where=f"{what}, {key}",
                    do="install the same versions everywhere" if what == "versions" else "give all ranks the same settings",
                )


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
