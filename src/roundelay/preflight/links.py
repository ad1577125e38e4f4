"""What lies between the ranks of a job: bandwidth, round trips and clocks, pair by pair over plain sockets.

One pair at a time, so that no pair takes bandwidth from another. The lower rank of a pair connects to the higher one at the
address that a run would use. The offset of two clocks is estimated as time protocols do it: of several exchanges the one with
the shortest round trip, its answer taken to be read in the middle.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import asdict, dataclass
from itertools import combinations

from roundelay.fleet.store import JobStore

ALL_PAIRS_UP_TO = 6
"""Ranks; with more only neighbours on the ring, and everybody with rank 0 for the clocks."""
EXCHANGES = 15
PAYLOAD = 16 << 20
CHUNK = 1 << 20
ONE_PAIR_S = 20.0


@dataclass(frozen=True)
class MeasuredLink:
    a: int
    b: int
    megabytes_per_s: float = 0.0
    round_trip_ms: float = 0.0
    skew_s: float = 0.0
    """The clock of b minus that of a."""
    error: str = ""


def pairs(size: int) -> list[tuple[int, int]]:
    if size <= ALL_PAIRS_UP_TO:
        return list(combinations(range(size), 2))
    ring = {(min(r, (r + 1) % size), max(r, (r + 1) % size)) for r in range(size)}
    return sorted(ring | {(0, r) for r in range(1, size)})


def measure(store: JobStore, rank: int, size: int, host: str, timeout_s: float) -> list[MeasuredLink]:
    """All ranks call this; rank 0 gets all links, the others none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as door:
        door.settimeout(ONE_PAIR_S)
        store.set(f"door/{rank}", json.dumps([host, door.getsockname()[1]]))
        found = []
        for a, b in pairs(size):
            key = f"link/{a}-{b}"
            if rank == a:
                door_of_b = _wait(store, f"door/{b}", timeout_s)
                link = _ask(a, b, *json.loads(door_of_b)) if door_of_b else MeasuredLink(a, b, error=f"rank {b} opened no door")
                store.set(key, json.dumps(asdict(link)))
            elif rank == b:
                _answer(store, door, key)
            # everybody waits for every pair: nobody else uses the network meanwhile
            said = _wait(store, key, timeout_s + ONE_PAIR_S)
            found.append(
                MeasuredLink(**json.loads(said)) if said else MeasuredLink(a, b, error=f"rank {a} has said nothing about it")
            )
        return found if rank == 0 else []


def _wait(store: JobStore, key: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while (value := store.get(key)) is None:
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.005)
    return value


def _ask(a: int, b: int, host: str, port: int) -> MeasuredLink:
    try:
        with socket.create_connection((host, port), timeout=ONE_PAIR_S / 2) as to:
            to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(EXCHANGES):
                sent, began = time.time(), time.perf_counter()
                to.sendall(b"?")
                (theirs,) = struct.unpack("d", _read(to, 8))
                trip = time.perf_counter() - began
                trips.append((trip, theirs - sent - trip / 2))
            shortest, skew = min(trips)
            piece = bytes(CHUNK)
            began = time.perf_counter()
            for _ in range(PAYLOAD // CHUNK):
                to.sendall(piece)
            _read(to, 1)
            took = time.perf_counter() - began
    except OSError as error:
        return MeasuredLink(a, b, error=f"rank {a} cannot reach rank {b} at {host}:{port}: {error.strerror or error}")
    return MeasuredLink(a, b, round(PAYLOAD / 1e6 / took, 1), round(1000 * shortest, 3), round(skew, 6))


def _answer(store: JobStore, door: socket.socket, key: str) -> None:
    """The other side; gives up when the asker has."""
    door.settimeout(0.1)
    while store.get(key) is None:
        try:
            to, _ = door.accept()
        except TimeoutError:
            continue
        with to:
            try:
                to.settimeout(ONE_PAIR_S)
                to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(EXCHANGES):
                    _read(to, 1)
                    to.sendall(struct.pack("d", time.time()))
                _read(to, PAYLOAD)
                to.sendall(b"!")
            except OSError:
                continue
        return


def _read(to: socket.socket, count: int) -> bytes:
    """Exactly so many bytes; of long ones only the last chunk is kept."""
    last = b""
    while count:
        piece = to.recv(min(count, CHUNK))
        if not piece:
            raise ConnectionResetError("the other side has hung up")
        count -= len(piece)
        last = last + piece if len(last) < 8 else piece
    return last
