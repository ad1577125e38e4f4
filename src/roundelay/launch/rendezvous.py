"""Find the job's store: who serves it, and how its address reaches every rank.

ROUNDELAY_STORE                  the local launcher serves it and says where
TORCHELASTIC_USE_AGENT_STORE     torchrun: rank 0 serves it; torch's own store hands over the address, nothing else
otherwise                        rank 0 serves it at MASTER_ADDR:MASTER_PORT

A process may run several jobs, one after another. They share one store, which lives as long as the process that serves it: a
rank may connect for the next job before rank 0 has left the last one. Each job has a prefix of its own. The ranks count their
jobs independently, so all ranks must start them in the same order.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from roundelay.errors import PeerLost, UsageError
from roundelay.fleet.store import EmbeddedStore, JobStore, StoreClient, connect_store, serve_store
from roundelay.fleet.store_client import parse_address

STORE_VARIABLE = "ROUNDELAY_STORE"

_servers: dict[object, EmbeddedStore] = {}
"""Stores that this process serves, by where they were announced."""
_jobs: Counter[object] = Counter()
"""Number of jobs that this process has connected to, by launcher and rank."""


def store_from_env(
    env: Mapping[str, str], rank: int, address: str, port: int, bind_address: str, timeout_s: float, keep: list[Any]
) -> JobStore:
    """Connect to the job's store. Rank 0 serves it if the launcher does not, and appends the server to `keep`.

    Blocks until the server answers; raises PeerLost after `timeout_s`. `address` and `port` are MASTER_ADDR and MASTER_PORT.
    """
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    client: StoreClient
    if STORE_VARIABLE in env:
        client = connect_store(*parse_address(env[STORE_VARIABLE]), timeout_s)
    elif env.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True":
        host = local_address_towards(address, port) if bind_address == "auto" else bind_address
        served_at = _exchange_address(address, port, f"roundelay/{restart}/store", rank, host, timeout_s, keep)
        _check_reachable(parse_address(served_at)[0], address, env)
        client = connect_store(*parse_address(served_at), timeout_s)
    else:
        if rank == 0:
            if (address, port) not in _servers:
                _servers[address, port] = serve_store(address, port)
            keep.append(_servers[address, port])
        client = connect_store(address, port, timeout_s)
    launcher = (rank, restart, env.get(STORE_VARIABLE, (address, port)))
    number = _jobs[launcher]
    _jobs[launcher] += 1
    return JobStore(client, f"job/{restart}.{number}/" if number else f"job/{restart}/")


def _exchange_address(address: str, port: int, key: str, rank: int, host: str, timeout_s: float, keep: list[Any]) -> str:
    """Serve the store on rank 0, at a free port of `host`, and return its address on all ranks. Uses torch's store."""
    try:
        torch_store = TCPStore(
            address, port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        if rank == 0:
            if (address, port, key) not in _servers:
                server = _servers[address, port, key] = serve_store(host)
                torch_store.set(key, f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}")
            keep.append(_servers[address, port, key])
        return torch_store.get(key).decode()
    except RuntimeError as error:
        raise PeerLost(
            f"torchrun's store at {address}:{port} did not deliver the address of the job's store",
            where=f"MASTER_ADDR, MASTER_PORT: {str(error).splitlines()[0]}",
            hint="check that the process of the first machine runs, and that the address and port are reachable from here",
        ) from error


def _check_reachable(host: str, address: str, env: Mapping[str, str]) -> None:
    """Raise UsageError if the store is on loopback, but the job is on several machines."""
    several = env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE")
    if several and host.startswith("127.") and not socket.gethostbyname(address).startswith("127."):
        raise UsageError(
            f"bind_address must be reachable from the other machines (got {host})",
            where=f"bind_address, MASTER_ADDR={address}",
            hint="set bind_address=auto, and MASTER_ADDR to the first machine's address in the network of the other machines",
        )


def local_address_towards(address: str, port: int) -> str:
    """Return the address of this machine on the route to `address`. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(address), port or 1))
        return str(probe.getsockname()[0])
