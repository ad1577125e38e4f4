"""The job's store where nobody has said where it is: rank 0 serves it, and MPI tells the others."""

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

CARD_BYTES = 512
SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"


def store_by_mpi(world: MpiRuntime, host: str, timeout_s: float, keep: list[Any]) -> tuple[JobStore, str, int]:
    """The store and its address. Rendezvous of all ranks that MPI has started. The server goes into `keep`."""
    cards = _told_to_all(world, json.dumps([socket.gethostname(), own_addresses()]), timeout_s)
    seen = [json.loads(card) for card in cards]
    elsewhere = [card for card in seen if card[0] != seen[0][0]]
    if not elsewhere:
        host = LOOPBACK if host == "auto" else host
    elif host.startswith("127."):
        raise UsageError(
            f"the learners are on {len({card[0] for card in seen})} machines, and sockets would bind {host}",
            where="host",
            hint="set host=auto, or host=ADDRESS for the first machine's address in the network of the others",
        )
    elif host == "auto" and world.rank == 0:
        host = address_towards([address for card in elsewhere for address in card[1]])
    word = ""
    if world.rank == 0:
        try:
            keep.append(serve_store(host))
        except UsageError as error:
            abort_mpi(error.exit_code)  # the others wait for a word that will not come
            raise
        word = f"{host} {keep[-1].port}"
    address, _, port = _told_to_all(world, word, timeout_s)[0].partition(" ")
    return JobStore(connect_store(address, int(port), timeout_s), "job/0/"), address, int(port)


def _told_to_all(world: MpiRuntime, word: str, timeout_s: float) -> list[str]:
    """What every rank says, by rank."""
    mine = np.zeros(CARD_BYTES, dtype=np.uint8)
    written = word.encode()[:CARD_BYTES]
    mine[: len(written)] = np.frombuffer(written, dtype=np.uint8)
    everybody = np.empty((world.size, CARD_BYTES), dtype=np.uint8)
    errand = world.porter.send_out(lambda: [world.comm.Iallgather(mine, everybody)])
    if not world.porter.wait(errand, timeout_s) or errand.error is not None:
        abort_mpi(PeerLost.exit_code)
        raise PeerLost(
            f"not all of the {world.size} ranks have come in {timeout_s:.0f} s",
            where=f"rank {world.rank}, {errand.error or 'all-gather'}",
            hint="look at the other ranks' output; raise timeout_s if they start slowly",
        )
    return [row.tobytes().rstrip(b"\0").decode() for row in everybody]


def own_addresses(most: int = 8) -> list[str]:
    """The IPv4 addresses of this machine's interfaces, loopback apart."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")][:most]


def address_towards(others: list[str]) -> str:
    """This machine's address on the route to the first of these that there is a route to."""
    for other in others:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 1))
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())
