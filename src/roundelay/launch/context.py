"""Where this process stands in the job: its rank, its machine, its store, its backend.

The variables of torchrun decide (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT), or
those of mpirun and srun, translated; without any a process is alone. Before the first step all ranks call the membership: they
agree on versions and settings or stop with a sentence that says who differs in what.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.comm.mpi_backend import MpiCommunicator
from roundelay.comm.mpi_progress import abort_mpi, mpi_runtime
from roundelay.comm.mpi_store import store_by_mpi
from roundelay.comm.threads import ThreadGroup
from roundelay.comm.torch_backend import TorchCommunicator
from roundelay.core.contracts import Communicator, Runtime
from roundelay.errors import Interrupted, PeerLost, RoundelayError, UsageError, did_you_mean
from roundelay.fleet.store import JobStore, connect_store, serve_store
from roundelay.launch.environment import read_launcher_env
from roundelay.launch.runtime import SystemRuntime
from roundelay.version import __version__

BACKENDS = {
    "auto": "shared memory inside a machine, torch.distributed between machines",
    "shm": "shared memory: learners of one machine",
    "torch": "torch.distributed collectives and a connection per edge, one machine or many",
    "mpi": "MPI carries everything; under mpirun or srun",
    "threads": "threads of one process",
}


EXIT_WAIT_S = 5.0
"""How long the server of the store waits for the others to leave."""


@dataclass
class DistributedContext:
    """One learner's context."""

    comm: Communicator
    rank: int
    size: int
    machines: list[str]
    """The machine of every rank."""
    hosts: list[str]
    device: torch.device
    keep_alive: list[Any] = field(default_factory=list)
    """What must live as long as the job: the store's server, if it runs here."""
    runtime: Runtime = field(default_factory=SystemRuntime)
    _closed: bool = False

    def machine_of(self, rank: int) -> list[int]:
        """Ranks on the same machine, in order."""
        return [r for r in range(self.size) if self.machines[r] == self.machines[rank]]

    @property
    def node_leaders(self) -> list[int]:
        """The first rank of every machine."""
        first: dict[str, int] = {}
        for rank, machine in enumerate(self.machines):
            first.setdefault(machine, rank)
        return sorted(first.values())

    def close(self) -> None:
        self.comm.close()
        if not self._closed:
            self._closed = True
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Whoever serves the store goes last, or the others' last words would find nobody."""
        store = self.comm.store
        if not isinstance(store, JobStore) or self.size == 1:
            return
        if not self.keep_alive:
            with suppress(RoundelayError):
                store.add("goodbye", 1)
            return
        deadline = time.monotonic() + EXIT_WAIT_S
        while sys.exc_info()[0] is None and time.monotonic() < deadline:
            if int(store.get("goodbye") or 0) >= self.size - 1 - len(self.comm.membership.failed_ranks()):
                return
            time.sleep(0.01)

    def abort_job(self, error: BaseException) -> None:
        """This learner leaves in the middle of things. Those whom MPI has started are then ended by MPI, with the code of the
        error; the others find out by themselves."""
        if not isinstance(error, Interrupted):
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            abort_mpi(error.exit_code if isinstance(error, RoundelayError) else code)


def choose_device(name: str, local_rank: int) -> torch.device:
    """auto: a GPU of one's own where there is one (untested here), else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'", where="device", hint="use auto, cpu or cuda") from error


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise UsageError(f"there is no backend '{backend}'", where="backend", hint=did_you_mean(backend, BACKENDS))


def fake_machines(machines: list[str], parts: int) -> list[str]:
    """Pretends that one machine is several: contiguous ranks, sizes as equal as can be."""
    if parts <= 0:
        return machines
    if parts > len(machines):
        raise UsageError(f"{len(machines)} learners cannot be split into {parts} machines", where="machines", hint="give fewer")
    return [f"{name}#{rank * parts // len(machines)}" for rank, name in enumerate(machines)]


def single_process_context(
    device: str = "auto", threads: ThreadGroup | None = None, rank: int = 0, simulate_nodes: int = 0
) -> DistributedContext:
    """A place among threads of this process; by default the only one."""
    threads = threads or ThreadGroup(1)
    names = fake_machines(["here"] * threads.size, simulate_nodes)
    return DistributedContext(
        threads.comm(rank), rank, threads.size, names, ["localhost"] * threads.size, choose_device(device, rank)
    )


def under_launcher(env: Mapping[str, str] = os.environ) -> bool:
    return bool(read_launcher_env(env))


def context_from_env(
    *,
    backend: str,
    bind_address: str,
    timeout_s: float,
    device: str,
    simulate_nodes: int,
    digest: Mapping[str, Any],
    env: Mapping[str, str] = os.environ,
) -> DistributedContext:
    """The place that the launcher's variables describe."""
    told = read_launcher_env(env)
    rank, size = _number(told, "RANK"), _number(told, "WORLD_SIZE")
    local_rank = int(told.get("LOCAL_RANK", "0"))
    machine = told.get("GROUP_RANK") or socket.gethostname()
    keep: list[Any] = []
    if backend == "mpi":
        check_world(rank, size)
    # one port that all can work out may be taken; where MPI speaks anyway, it passes on one that is free
    by_mpi = "MASTER_PORT" not in env if backend == "mpi" else "RANK" not in env and "MASTER_PORT" not in told
    if by_mpi:
        store, address, port = store_by_mpi(mpi_runtime(), bind_address, timeout_s, keep)
    else:
        address, port = told.get("MASTER_ADDR", "127.0.0.1"), _number(told, "MASTER_PORT")
        hosted_elsewhere = env.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
        if rank == 0 and not hosted_elsewhere:
            keep.append(serve_store(address, port))
        store = JobStore(connect_store(address, port, timeout_s), f"job/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/")
    address_here = host_towards(address, port) if bind_address == "auto" else bind_address
    try:
        return create_context(
            store,
            rank,
            size,
            machine,
            backend=backend,
            bind_address=address_here,
            timeout_s=timeout_s,
            device=choose_device(device, local_rank),
            simulate_nodes=simulate_nodes,
            digest=digest,
            keep=keep,
        )
    except RoundelayError as error:
        abort_mpi(error.exit_code)
        raise


def check_world(rank: int, size: int) -> None:
    """Whether MPI sees the job as the launcher does."""
    if (mpi_runtime().rank, mpi_runtime().size) != (rank, size):
        raise UsageError(
            f"MPI says rank {mpi_runtime().rank} of {mpi_runtime().size}, the launcher says rank {rank} of {size}",
            where="backend=mpi",
            hint=f"start with 'mpirun -n {size} roundelay train …', the mpirun of the MPI library that mpi4py uses",
        )


def _number(told: Mapping[str, str], key: str) -> int:
    try:
        return int(told.get(key, ""))
    except ValueError as error:
        raise UsageError(
            f"{key} is {told.get(key)!r}, not a number", where="environment", hint="start with torchrun, or with learners=N"
        ) from error


def host_towards(address: str, port: int) -> str:
    """This machine's address on the route to the first machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(address), port or 1))
        return str(probe.getsockname()[0])


def create_context(
    store: JobStore,
    rank: int,
    size: int,
    machine: str,
    *,
    backend: str,
    bind_address: str,
    timeout_s: float,
    device: torch.device,
    simulate_nodes: int,
    digest: Mapping[str, Any],
    keep: list[Any] | None = None,
) -> DistributedContext:
    """Calls the membership and opens the backend."""
    cards = exchange_rank_info(store, rank, size, machine, timeout_s, digest)
    names = fake_machines([card["machine"] for card in cards], simulate_nodes)
    if backend == "shm" and len({card["machine"] for card in cards}) > 1:
        raise UsageError("backend=shm cannot reach other machines", where=f"rank {rank}", hint="use backend=auto")
    if backend == "mpi":
        return DistributedContext(
            MpiCommunicator(mpi_runtime(), store, range(size), rank, timeout_s=timeout_s),
            rank,
            size,
            names,
            [card["host"] for card in cards],
            device,
            keep or [],
        )
    # A machine that is split for a test behaves like several: shared memory only inside each part.
    share = backend == "shm" or backend == "auto"
    places = names if backend == "auto" else [card["machine"] for card in cards]
    comm = TorchCommunicator(
        store, range(size), rank, places, bind_address=bind_address, share_memory=share, timeout_s=timeout_s, device=device
    )
    return DistributedContext(comm, rank, size, names, [card["host"] for card in cards], device, keep or [])


def exchange_rank_info(
    store: JobStore, rank: int, size: int, machine: str, timeout_s: float, digest: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every rank shows its card; all leave with all cards, or with the reason why not."""
    mine = {
        "size": size,
        "machine": machine,
        "host": socket.gethostname(),
        "versions": {
            "roundelay": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "settings": {key: json.dumps(value, sort_keys=True, default=str) for key, value in digest.items()},
        "pid": os.getpid(),
    }
    taken = store.add(f"card-taken/{rank}", 1)
    if taken > 1:
        raise UsageError(f"two processes say they are rank {rank}", where="RANK", hint="give every process its own rank")
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
                    f"rank {absent} did not answer the membership in {timeout_s:.0f} s",
                    where=f"rank {rank}",
                    hint="check that it was started with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; see its log",
                )
            time.sleep(0.01)
    return [cards[r] for r in range(size)]


def _compare(mine: dict[str, Any], theirs: dict[str, Any], rank: int, other: int) -> None:
    if mine["size"] != theirs["size"]:
        raise UsageError(
            f"rank {rank} was told of {mine['size']} learners, rank {other} of {theirs['size']}",
            where="WORLD_SIZE",
            hint="start all ranks with the same world size",
        )
    for what in ("versions", "settings"):
        for key in sorted(set(mine[what]) | set(theirs[what])):
            a, b = mine[what].get(key), theirs[what].get(key)
            if a != b:
                raise UsageError(
                    f"rank {rank} has {key} {a}, rank {other} has {b}",
                    where=f"{what}, {key}",
                    hint="install the same versions everywhere" if what == "versions" else "give all ranks the same settings",
                )


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
