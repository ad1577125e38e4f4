"""The job's store under MPI, if its address is not configured: rank 0 serves it and MPI distributes its address."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
from contextlib import suppress
from typing import Any

import numpy as np

from roundelay.comm.mpi_progress import MpiRuntime, abort_mpi
from roundelay.errors import PeerLost, UsageError
from roundelay.fleet.store import JobStore, connect_store, serve_store

MESSAGE_BYTES = 512
SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"


def store_by_mpi(runtime: MpiRuntime, host: str, timeout_s: float, keep: list[Any]) -> tuple[JobStore, str, int]:
    """Create the store and return it with its address and port. Collective. Rank 0 appends the server to `keep`."""
    messages = _all_gather(runtime, json.dumps([socket.gethostname(), own_addresses()]), timeout_s)
    machines = [json.loads(message) for message in messages]
    remote = [machine for machine in machines if machine[0] != machines[0][0]]
    if not remote:
        host = LOOPBACK if host == "auto" else host
    elif host.startswith("127."):
        raise UsageError(
            f"bind_address must be reachable from {len({machine[0] for machine in machines})} machines (got {host})",
            where="bind_address",
            hint="set bind_address=auto, or the first machine's address in the network of the other machines",
        )
    elif host == "auto" and runtime.rank == 0:
        host = address_towards([address for machine in remote for address in machine[1]])
    own_message = ""
    if runtime.rank == 0:
        try:
            keep.append(serve_store(host))
        except UsageError as error:
            abort_mpi(error.exit_code)  # the other ranks wait for the address
            raise
        own_message = f"{host} {keep[-1].port}"
    address, _, port = _all_gather(runtime, own_message, timeout_s)[0].partition(" ")
    return JobStore(connect_store(address, int(port), timeout_s), "job/0/"), address, int(port)


def _all_gather(runtime: MpiRuntime, message: str, timeout_s: float) -> list[str]:
    """Return the messages of all ranks, by rank. Collective."""
    own = np.zeros(MESSAGE_BYTES, dtype=np.uint8)
    encoded = message.encode()[:MESSAGE_BYTES]
    own[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
    gathered = np.empty((runtime.size, MESSAGE_BYTES), dtype=np.uint8)
    batch = runtime.progress.submit(lambda: [runtime.comm.Iallgather(own, gathered)])
    if not runtime.progress.wait(batch, timeout_s) or batch.error is not None:
        abort_mpi(PeerLost.exit_code)
        raise PeerLost(
            f"not all {runtime.size} ranks joined within {timeout_s:.0f} s",
            where=f"rank {runtime.rank}, {batch.error or 'all-gather'}",
            hint="look at the other ranks' output; raise timeout_s if they start slowly",
        )
    return [row.tobytes().rstrip(b"\0").decode() for row in gathered]


def own_addresses(limit: int = 8) -> list[str]:
    """Return the IPv4 addresses of this machine's interfaces without loopback, at most `limit`."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in addresses if not address.startswith("127.")][:limit]


def address_towards(remote: list[str]) -> str:
    """Return this machine's address on the route to the first reachable address of `remote`."""
    for address in remote:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())
