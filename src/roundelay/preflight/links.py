"""Measure bandwidth, round-trip time and clock offset between pairs of ranks over plain TCP sockets.

Pairs are measured one after another, so that they do not share bandwidth. The lower rank of a pair connects to the higher
rank at the address that a run would use. The clock offset is estimated as in NTP: the exchange with the shortest round trip
counts, and the remote clock is assumed to be read in the middle of it.

Every wait has a deadline and ends with PeerLost once a rank has failed.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, TypeVar

from roundelay.core.contracts import Store
from roundelay.core.wait import store_sleep, wait_until
from roundelay.fleet.membership import FAILURES, StoreMembership
from roundelay.launch.startup import agree_to_start

ALL_PAIRS_UP_TO = 6
"""With more ranks, only neighbors on the ring are measured, and rank 0 with all ranks for the clocks."""
ROUND_TRIPS = 15
PAYLOAD = 16 << 20
CHUNK = 1 << 20
PAIR_TIMEOUT_S = 20.0
"""Time that the ranks which wait for the result of a pair allow beyond the deadline of the pair."""
POLL_S = 0.25
"""Longest time between two looks at the failed ranks."""

T = TypeVar("T")


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
    store: Store, rank: int, size: int, machine: str, host: str, timeout_s: float, settings: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[MeasuredLink]]:
    """Run the start-up checks of a run, then measure the links. Collective; returns the entries of all ranks and the links.

    The links are returned on rank 0 only. Pairs that cannot connect, in either direction, are links with an error. All other
    errors of the start-up checks are raised, the same one on all ranks; `settings` must be equal on all ranks.
    """
    ranks = agree_to_start(store, rank, size, machine, timeout_s, settings, bind_address=host, report_links=True)
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

    `host` is the address at which this rank accepts connections. A pair that fails is reported in `MeasuredLink.error`. Raises
    PeerLost once a rank is reported as failed.
    """
    broken, membership = broken or {}, StoreMembership(store)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        store.set(f"listener/{rank}", json.dumps([host, listener.getsockname()[1]]))
        links = [MeasuredLink(a, b, error=reason) for (a, b), reason in sorted(broken.items())]
        for a, b in (pair for pair in pairs(size) if pair not in broken):
            key = f"link/{a}-{b}"
            if rank == a:
                address = _wait_for_key(membership, f"listener/{b}", timeout_s, rank, size)
                link = MeasuredLink(a, b, error=_silent(b))
                if address:
                    peer, port = json.loads(address)
                    link = _measure_as_client(a, b, peer, port, timeout_s, membership.failed_ranks)
                if link.error and (lost := membership.error(range(size), rank, "measuring links")) is not None:
                    raise lost
                store.set(key, json.dumps(asdict(link)))
            elif rank == b:
                _serve_measurement(membership, listener, key, 2 * timeout_s)
            # all ranks wait for every pair, so that no other rank uses the network meanwhile
            text = _wait_for_key(membership, key, 2 * timeout_s + PAIR_TIMEOUT_S, rank, size)
            links.append(MeasuredLink(**json.loads(text)) if text else MeasuredLink(a, b, error=_silent(a)))
        return links if rank == 0 else []


def _silent(rank: int) -> str:
    return f"rank {rank} did not answer in time"


def _wait_for_key(membership: StoreMembership, key: str, timeout_s: float, rank: int, size: int) -> str:
    """Return the value of a key, or an empty string after `timeout_s`. Raises PeerLost once another rank has failed."""
    store = membership.store
    value = wait_until(
        lambda: store.get(key),
        timeout_s,
        failures=membership.failed_ranks,
        awaited=set(range(size)) - {rank},
        poll_s=POLL_S,
        sleep=store_sleep(store, key, FAILURES),
    )
    if value is None and (lost := membership.error(range(size), rank, f"waiting for '{key}'")) is not None:
        raise lost
    return value or ""


class TimedSocket:
    """A socket whose operations raise TimeoutError after a deadline common to all of them, or once a rank has failed."""

    def __init__(self, sock: socket.socket, timeout_s: float, failures: Callable[[], Collection[int]]) -> None:
        self._socket, self._failures, self._deadline = sock, failures, time.monotonic() + timeout_s
        sock.settimeout(POLL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._repeat(self._socket.send, view) :]

    def read(self, count: int) -> bytes:
        """Read exactly `count` bytes and return the last few. Raises ConnectionResetError at end of stream."""
        last = b""
        while count:
            chunk = self._repeat(self._socket.recv, min(count, CHUNK))
            if not chunk:
                raise ConnectionResetError("connection closed by peer")
            count -= len(chunk)
            last = last + chunk if len(last) < 8 else chunk
        return last

    def _repeat(self, operation: Callable[[Any], T], argument: Any) -> T:
        while True:
            if time.monotonic() > self._deadline:
                raise TimeoutError("timed out")
            try:
                return operation(argument)
            except TimeoutError:
                if self._failures():
                    raise


def _measure_as_client(
    a: int, b: int, host: str, port: int, timeout_s: float, failures: Callable[[], Collection[int]]
) -> MeasuredLink:
    try:
        with socket.create_connection((host, port), timeout=min(timeout_s, PAIR_TIMEOUT_S / 2)) as sock:
            connection = TimedSocket(sock, timeout_s, failures)
            trips = []
            for _ in range(ROUND_TRIPS):
                sent, began = time.time(), time.perf_counter()
                connection.send(b"?")
                (remote_time,) = struct.unpack("d", connection.read(8))
                trip = time.perf_counter() - began
                trips.append((trip, remote_time - sent - trip / 2))
            shortest, skew = min(trips)
            chunk = bytes(CHUNK)
            began = time.perf_counter()
            for _ in range(PAYLOAD // CHUNK):
                connection.send(chunk)
            connection.read(1)
            seconds = time.perf_counter() - began
    except OSError as error:
        return MeasuredLink(a, b, error=f"rank {a} cannot connect to rank {b} at {host}:{port}: {error.strerror or error}")
    return MeasuredLink(a, b, round(PAYLOAD / 1e6 / seconds, 1), round(1000 * shortest, 3), round(skew, 6))


def _serve_measurement(membership: StoreMembership, listener: socket.socket, key: str, timeout_s: float) -> None:
    """Answer the client of one pair; return when that is done, when the client has written its result under `key`, after
    `timeout_s`, or once a rank has failed.
    """
    listener.settimeout(POLL_S)
    deadline = time.monotonic() + timeout_s

    def is_done() -> bool:
        with suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                _answer(TimedSocket(sock, deadline - time.monotonic(), membership.failed_ranks))
            return True
        return membership.store.get(key) is not None

    wait_until(is_done, timeout_s, failures=membership.failed_ranks, sleep=lambda _: None)


def _answer(connection: TimedSocket) -> None:
    """Answer one client. Raises OSError if the connection breaks."""
    for _ in range(ROUND_TRIPS):
        connection.read(1)
        connection.send(struct.pack("d", time.time()))
    connection.read(PAYLOAD)
    connection.send(b"!")
