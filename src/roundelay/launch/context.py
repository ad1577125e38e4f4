"""Distributed context of a process: rank, size, machines, device, store and communicator.

It is read from the environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
MASTER_PORT), mpirun or srun. Without them the process is the only rank. Before the first step all ranks compare versions and
settings and test their connections; if one of them finds an error, all stop with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from roundelay.comm.mpi_backend import MpiCommunicator
from roundelay.comm.mpi_progress import abort_mpi, mpi_runtime
from roundelay.comm.mpi_store import store_by_mpi
from roundelay.comm.threads import ThreadGroup
from roundelay.comm.torch_backend import TorchCommunicator
from roundelay.core.contracts import Communicator, Runtime
from roundelay.core.wait import wait_until
from roundelay.errors import Interrupted, RoundelayError, UsageError, did_you_mean
from roundelay.fleet.heartbeat import FAILURE_S, HEARTBEAT_S, Heartbeats
from roundelay.fleet.store import JobStore
from roundelay.launch.environment import read_launcher_env
from roundelay.launch.rendezvous import local_address_towards, store_from_env
from roundelay.launch.runtime import SystemRuntime
from roundelay.launch.startup import agree_to_start

BACKENDS = {
    "auto": "shared memory inside a machine, torch.distributed and TCP between machines",
    "shm": "shared memory, for learners on one machine",
    "torch": "torch.distributed collectives and one TCP connection per edge, on one machine or several",
    "mpi": "MPI for all communication, under mpirun or srun",
    "threads": "learners as threads of one process",
}


EXIT_WAIT_S = 5.0
"""Seconds the rank that serves the store waits for the other ranks to leave."""


@dataclass
class DistributedContext:
    """One rank's view of the job. Close it on all ranks when the job ends; as a context manager it closes itself."""

    comm: Communicator
    rank: int
    size: int
    machines: list[str]
    """Machine of every rank; ranks with equal names share memory and form a node."""
    hosts: list[str]
    """Host name of every rank."""
    device: torch.device
    keep_alive: list[Any] = field(default_factory=list)
    """Objects that must live as long as the job, such as the server of the store."""
    runtime: Runtime = field(default_factory=SystemRuntime)
    heartbeats: Heartbeats | None = None
    """Heartbeats that are published from the start of the process on; the learner's monitor continues them."""
    stop_heartbeats: Callable[[], None] = lambda: None
    """Stop the thread that publishes heartbeats during start-up."""
    _closed: bool = False

    def machine_of(self, rank: int) -> list[int]:
        """Return the ranks on the same machine, in order."""
        return [r for r in range(self.size) if self.machines[r] == self.machines[rank]]

    @property
    def node_leaders(self) -> list[int]:
        """Lowest rank of every machine."""
        first: dict[str, int] = {}
        for rank, machine in enumerate(self.machines):
            first.setdefault(machine, rank)
        return sorted(first.values())

    def __enter__(self) -> DistributedContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Close the communicator and leave the job, after `error` as a failed rank. A second call does nothing."""
        self.comm.close()
        if not self._closed:
            self._closed = True
            self.stop_heartbeats()
            if self.heartbeats is not None:
                self.heartbeats.leave(error)
            self._leave_store(error)

    def _leave_store(self, error: BaseException | None) -> None:
        """The rank that serves the store leaves last, so that the other ranks can still write to it."""
        store = self.comm.store
        if not isinstance(store, JobStore) or self.size == 1:
            return
        if not self.keep_alive:
            with suppress(RoundelayError):
                store.add("left", 1)
            return
        if error is None:
            with suppress(RoundelayError):
                wait_until(
                    lambda: int(store.get("left") or 0) >= self.size - 1 - len(self.comm.membership.failed_ranks()),
                    EXIT_WAIT_S,
                    poll_s=0.01,
                )

    def abort_job(self, error: BaseException) -> None:
        """Abort after an error: under MPI call MPI_Abort with the error's exit code. Otherwise peers see closed connections."""
        if not isinstance(error, Interrupted):
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            abort_mpi(error.exit_code if isinstance(error, RoundelayError) else code)


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device; auto selects a GPU by local rank if there is one (untested), else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"device type {device.type}")
        return device
    except RuntimeError as error:
        raise UsageError(f"device must be auto, cpu or cuda (got '{name}')", where="device", hint="use device=auto") from error


def check_backend(backend: str) -> None:
    """Raise UsageError if there is no such backend."""
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend '{backend}'", where="backend", hint=did_you_mean(backend, BACKENDS))


def fake_machines(machines: list[str], parts: int) -> list[str]:
    """Divide the ranks into `parts` machines of contiguous ranks and nearly equal size; 0 changes nothing."""
    if parts <= 0:
        return machines
    if parts > len(machines):
        raise UsageError(
            f"simulate_nodes must be at most the number of learners, {len(machines)} (got {parts})",
            where="simulate_nodes",
            hint="lower simulate_nodes or raise learners",
        )
    return [f"{name}#{rank * parts // len(machines)}" for rank, name in enumerate(machines)]


def single_process_context(
    device: str = "auto", threads: ThreadGroup | None = None, rank: int = 0, simulate_nodes: int = 0
) -> DistributedContext:
    """Return the context of one rank among threads of this process; by default the only rank."""
    threads = threads or ThreadGroup(1)
    names = fake_machines(["here"] * threads.size, simulate_nodes)
    return DistributedContext(
        threads.comm(rank), rank, threads.size, names, ["localhost"] * threads.size, choose_device(device, rank)
    )


def under_launcher(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, mpirun or srun has started this process."""
    return bool(read_launcher_env(env))


def context_from_env(
    *,
    backend: str,
    bind_address: str,
    timeout_s: float,
    device: str,
    simulate_nodes: int,
    digest: Mapping[str, Any],
    failure_s: float = FAILURE_S,
    env: Mapping[str, str] = os.environ,
) -> DistributedContext:
    """Connect to the job that the launcher's environment variables describe. Collective: blocks until all ranks have called it.

    `digest`: settings that must be equal on all ranks.
    """
    variables = read_launcher_env(env)
    rank, size = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    local_rank = int(variables.get("LOCAL_RANK", "0"))
    machine = variables.get("GROUP_RANK") or socket.gethostname()
    keep: list[Any] = []
    if backend == "mpi":
        check_mpi_world(rank, size)
    # a port derived from the job may be in use; where MPI is available, it broadcasts a free one
    by_mpi = "MASTER_PORT" not in env if backend == "mpi" else "RANK" not in env and "MASTER_PORT" not in variables
    if by_mpi:
        store, address, port = store_by_mpi(mpi_runtime(), bind_address, timeout_s, keep)
    else:
        address, port = variables.get("MASTER_ADDR", "127.0.0.1"), _integer(variables, "MASTER_PORT")
        store = store_from_env(env, rank, address, port, bind_address, timeout_s, keep)
    own_address = local_address_towards(address, port) if bind_address == "auto" else bind_address
    try:
        return create_context(
            store,
            rank,
            size,
            machine,
            backend=backend,
            bind_address=own_address,
            timeout_s=timeout_s,
            device=choose_device(device, local_rank),
            simulate_nodes=simulate_nodes,
            digest=digest,
            failure_s=failure_s,
            keep=keep,
        )
    except RoundelayError as error:
        abort_mpi(error.exit_code)
        raise


def check_mpi_world(rank: int, size: int) -> None:
    """Raise UsageError if MPI and the launcher disagree on rank or size."""
    if (mpi_runtime().rank, mpi_runtime().size) != (rank, size):
        raise UsageError(
            f"MPI and the launcher must agree on the rank (MPI: {mpi_runtime().rank} of {mpi_runtime().size}, "
            f"launcher: {rank} of {size})",
            where="backend=mpi",
            hint=f"run 'mpirun -n {size} roundelay train …' with the mpirun of the MPI library that mpi4py uses",
        )


def _integer(variables: Mapping[str, str], key: str) -> int:
    try:
        return int(variables.get(key, ""))
    except ValueError as error:
        raise UsageError(
            f"{key} must be an integer (got {variables.get(key)!r})",
            where="environment",
            hint="start with torchrun, or with learners=N",
        ) from error


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
    failure_s: float = FAILURE_S,
    keep: list[Any] | None = None,
) -> DistributedContext:
    """Agree with all ranks to start, and create the communicator. Collective. Heartbeats are published from here on."""
    if size == 1:
        heartbeats, stop_heartbeats = None, _no_heartbeats
    else:
        heartbeats = Heartbeats(store, rank, size, failure_s)
        stop_heartbeats = publish_heartbeats(heartbeats)
    try:
        ranks = agree_to_start(
            store,
            rank,
            size,
            machine,
            timeout_s,
            digest,
            bind_address=bind_address,
            test_links=backend != "mpi",
            error=lambda ranks: _wrong_backend(backend, ranks),
        )
        names = fake_machines([info["machine"] for info in ranks], simulate_nodes)
        comm = _create_communicator(backend, store, rank, size, ranks, names, bind_address, timeout_s, device)
    except BaseException as error:
        stop_heartbeats()
        if heartbeats is not None:
            heartbeats.leave(error)
        if isinstance(error, UsageError):
            let_other_ranks_read(store, size, serves=bool(keep))
        raise
    hosts = [info["host"] for info in ranks]
    return DistributedContext(
        comm, rank, size, names, hosts, device, keep or [], heartbeats=heartbeats, stop_heartbeats=stop_heartbeats
    )


def let_other_ranks_read(store: JobStore, size: int, serves: bool) -> None:
    """Before an exit: the rank that serves the store stays until the other ranks need it no more, at most EXIT_WAIT_S."""
    with suppress(RoundelayError):
        left = store.add("left", int(not serves))
        if serves and left < size - 1:
            wait_until(lambda: int(store.get("left") or 0) >= size - 1, EXIT_WAIT_S, poll_s=0.01)


def _no_heartbeats() -> None: ...


def publish_heartbeats(heartbeats: Heartbeats) -> Callable[[], None]:
    """Publish one heartbeat at once and the next ones in a thread; return a function that stops it."""
    message = {"phase": "start"}
    heartbeats.beat(message)
    return SystemRuntime().start_periodic(lambda: heartbeats.beat(message), _no_heartbeats, HEARTBEAT_S)


def _wrong_backend(backend: str, ranks: Sequence[Mapping[str, Any]]) -> UsageError | None:
    machines = sorted({info["machine"] for info in ranks})
    if backend != "shm" or len(machines) == 1:
        return None
    return UsageError(
        "backend=shm needs all ranks on one machine", where=f"machines {', '.join(machines)}", hint="use backend=auto"
    )


def _create_communicator(
    backend: str,
    store: JobStore,
    rank: int,
    size: int,
    ranks: Sequence[Mapping[str, Any]],
    names: list[str],
    bind_address: str,
    timeout_s: float,
    device: torch.device,
) -> Communicator:
    if backend == "mpi":
        return MpiCommunicator(mpi_runtime(), store, range(size), rank, timeout_s=timeout_s)
    # with simulate_nodes, shared memory is used inside a simulated node only
    share = backend == "shm" or backend == "auto"
    nodes = names if backend == "auto" else [info["machine"] for info in ranks]
    return TorchCommunicator(
        store, range(size), rank, nodes, bind_address=bind_address, share_memory=share, timeout_s=timeout_s, device=device
    )
