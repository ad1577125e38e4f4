"""Measure bandwidth, round-trip time and clock offset between pairs of ranks over plain TCP sockets.

Pairs are measured one after another, so that they do not share bandwidth. The lower rank of a pair connects to the higher
rank at the address that a run would use. The clock offset is estimated as in NTP: the exchange with the shortest round trip
counts, and the remote clock is assumed to be read in the middle of it.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from roundelay.core.contracts import Store
from roundelay.launch.startup import agree_to_start

ALL_PAIRS_UP_TO = 6
"""With more ranks, only neighbors on the ring are measured, and rank 0 with all ranks for the clocks."""
ROUND_TRIPS = 15
PAYLOAD = 16 << 20
CHUNK = 1 << 20
PAIR_TIMEOUT_S = 20.0
POLL_S = 0.005
ACCEPT_POLL_S = 0.1


@dataclass(frozen=True)
class MeasuredLink:
    """The link between ranks `a` and `b`; `error` says why it could not be measured."""

    a: int
    b: int
    megabytes_per_s: float = 0.0
    round_trip_ms: float = 0.0
    skew_s: float = 0.0
    """The clock of b minus the clock of a."""
    error: str = ""


def pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure, in the order in which they are measured."""
    if size <= ALL_PAIRS_UP_TO:
        return list(combinations(range(size), 2))
    ring = {(min(r, (r + 1) % size), max(r, (r + 1) % size)) for r in range(size)}
    return sorted(ring | {(0, r) for r in range(1, size)})


def agree_and_measure(
    store: Store, rank: int, size: int, machine: str, host: str, timeout_s: float
) -> tuple[list[dict[str, Any]], list[MeasuredLink]]:
    """Run the start-up checks of a run, then measure the links. Collective; returns the entries of all ranks and the links.

    The links are returned on rank 0 only. Pairs that cannot connect, in either direction, are links with an error. All other
    errors of the start-up checks are raised, the same one on all ranks.
    """
    ranks = agree_to_start(store, rank, size, machine, timeout_s, {}, bind_address=host, report_links=True)
    broken: dict[tuple[int, int], str] = {}
    for r, info in enumerate(ranks):
        for peer, reason in info.get("unreachable", {}).items():
            pair = min(r, peer), max(r, peer)
            broken[pair] = "; ".join(filter(None, (broken.get(pair), reason)))
    return ranks, measure_links(store, rank, size, host, timeout_s, broken)


def measure_links(
    store: Store, rank: int, size: int, host: str, timeout_s: float, broken: Mapping[tuple[int, int], str] | None = None
) -> list[MeasuredLink]:
    """Measure all pairs but the `broken` ones. Collective and blocking; returns the links on rank 0, an empty list elsewhere.

    `host` is the address at which this rank accepts connections. A pair that fails is reported in `MeasuredLink.error`.
    """
    broken = broken or {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        store.set(f"listener/{rank}", json.dumps([host, listener.getsockname()[1]]))
        links = [MeasuredLink(a, b, error=reason) for (a, b), reason in sorted(broken.items())]
        for a, b in (pair for pair in pairs(size) if pair not in broken):
            key = f"link/{a}-{b}"
            if rank == a:
                address = _wait_for_key(store, f"listener/{b}", timeout_s)
                link = _measure_as_client(a, b, *json.loads(address)) if address else MeasuredLink(a, b, error=_silent(b))
                store.set(key, json.dumps(asdict(link)))
            elif rank == b:
                _serve_measurement(store, listener, key)
            # all ranks wait for every pair, so that no other rank uses the network meanwhile
            text = _wait_for_key(store, key, timeout_s + PAIR_TIMEOUT_S)
            links.append(MeasuredLink(**json.loads(text)) if text else MeasuredLink(a, b, error=_silent(a)))
        return links if rank == 0 else []


def _silent(rank: int) -> str:
    return f"rank {rank} did not answer in time"


def _wait_for_key(store: Store, key: str, timeout_s: float) -> str:
    """Return the value of a key, or an empty string after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (value := store.get(key)) is None:
        if time.monotonic() > deadline:
            return ""
        time.sleep(POLL_S)
    return value


def _measure_as_client(a: int, b: int, host: str, port: int) -> MeasuredLink:
    try:
        with socket.create_connection((host, port), timeout=PAIR_TIMEOUT_S / 2) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(ROUND_TRIPS):
                sent, began = time.time(), time.perf_counter()
                connection.sendall(b"?")
                (remote_time,) = struct.unpack("d", _read(connection, 8))
                trip = time.perf_counter() - began
                trips.append((trip, remote_time - sent - trip / 2))
            shortest, skew = min(trips)
            chunk = bytes(CHUNK)
            began = time.perf_counter()
            for _ in range(PAYLOAD // CHUNK):
                connection.sendall(chunk)
            _read(connection, 1)
            seconds = time.perf_counter() - began
    except OSError as error:
        return MeasuredLink(a, b, error=f"rank {a} cannot connect to rank {b} at {host}:{port}: {error.strerror or error}")
    return MeasuredLink(a, b, round(PAYLOAD / 1e6 / seconds, 1), round(1000 * shortest, 3), round(skew, 6))


def _serve_measurement(store: Store, listener: socket.socket, key: str) -> None:
    """Answer the client of one pair; return when it is done or when it has written its result under `key`."""
    listener.settimeout(ACCEPT_POLL_S)
    while store.get(key) is None:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            try:
                connection.settimeout(PAIR_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(ROUND_TRIPS):
                    _read(connection, 1)
                    connection.sendall(struct.pack("d", time.time()))
                _read(connection, PAYLOAD)
                connection.sendall(b"!")
            except OSError:
                continue
        return


def _read(connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes and return the last few. Raises ConnectionResetError at end of stream."""
    last = b""
    while count:
        chunk = connection.recv(min(count, CHUNK))
        if not chunk:
            raise ConnectionResetError("connection closed by peer")
        count -= len(chunk)
        last = last + chunk if len(last) < 8 else chunk
    return last
