"""Start-up checks between ranks, before any collective: all ranks start or none.

Every rank listens at its bind_address, publishes who and where it is, and compares versions and settings. If the ranks are on
several machines, every pair that may communicate is tested in both directions. The result is a vote (`roundelay.fleet.vote`):
each rank ends with the same error, which names the ranks, the pair or the setting.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import os
import platform
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from roundelay.core.contracts import Store
from roundelay.errors import PeerLost, RoundelayError, UsageError
from roundelay.fleet.membership import FIRST_INCARNATION, StoreMembership
from roundelay.fleet.vote import gather, refuse, vote
from roundelay.version import __version__

ALL_PAIRS_UP_TO = 64
"""With more ranks, only the neighbors on the ring and the first ranks of the machines test each other."""
PROBE_S = 5.0
"""Seconds for one connection of the test."""
LISTED = 4
"""Failed connections that one rank lists in its error."""
VOTE = "start"
SETTINGS = "settings/"
"""Prefix of the keys with the settings of each rank."""
REACH_HINT = "open the ephemeral ports between the machines, and set bind_address=auto or an address that all machines reach"

logger = logging.getLogger(__name__)


class ProbeServer:
    """Answers the connection tests of other ranks in a thread, until it is closed.

    Raises UsageError if it cannot listen at the address.
    """

    def __init__(self, address: str, rank: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=512)
        except OSError as error:
            raise UsageError(
                f"bind_address must be an address of this machine (rank {rank} cannot listen on {address}: "
                f"{error.strerror or error})",
                where=f"rank {rank} on {socket.gethostname()}, bind_address",
                hint="set bind_address=auto, or an address of each machine that the other machines reach",
            ) from error
        self.address, self.token = [address, self._listener.getsockname()[1]], secrets.token_hex(8)
        self._thread = threading.Thread(target=self._serve, name="start-up probes", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(PROBE_S)
            if _receive(connection, len(self.token)) == self.token:
                connection.sendall(self.token.encode())

    def close(self) -> None:
        with suppress(OSError):  # wakes accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _receive(connection: socket.socket, count: int) -> str:
    """Read `count` bytes, or less at the end of the stream."""
    text = b""
    while len(text) < count and (chunk := connection.recv(count - len(text))):
        text += chunk
    return text.decode(errors="replace")


def network_name() -> str:
    """Return a name of this machine's network: processes with equal names reach each other over loopback."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as JSON; each value as text, so that values of different types can be compared."""
    return json.dumps({key: json.dumps(value, sort_keys=True, default=str) for key, value in sorted(settings.items())})


def describe_rank(size: int, machine: str, digest: Mapping[str, Any], bind_address: str) -> dict[str, Any]:
    """Return what a rank publishes about itself."""
    return {
        "size": size,
        "machine": machine,
        "host": socket.gethostname(),
        "versions": {"roundelay": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": hashlib.sha256(settings_text(digest).encode()).hexdigest(),
        "pid": os.getpid(),
        "network": network_name(),
        "bind_address": bind_address,
    }


def exchange_rank_info(
    store: Store, rank: int, size: int, timeout_s: float, own: Mapping[str, Any], membership: StoreMembership | None = None
) -> list[dict[str, Any]]:
    """Publish `own` and return the entries of all ranks, by rank. Collective.

    Raises, on all ranks that have not yet voted, UsageError if world sizes differ or a rank is started twice, and PeerLost if a
    rank fails or does not appear within `timeout_s`.
    """
    membership = membership or StoreMembership(store)
    try:
        if store.add(f"incarnation/{rank}", 1) > FIRST_INCARNATION:
            raise UsageError(f"RANK must be unique (two processes have rank {rank})", where="RANK", hint="start each rank once")
        store.set(f"rank-info/{rank}", json.dumps(own))

        def compare_size(other: int, text: str) -> None:
            sizes = {rank: own["size"], other: json.loads(text)["size"]}
            if len(set(sizes.values())) > 1:
                raise UsageError(
                    f"WORLD_SIZE must be equal on all ranks ({_listed(sizes)})",
                    where="WORLD_SIZE",
                    hint="start all ranks with the same world size",
                )

        texts = gather(
            store,
            "rank-info/",
            range(size),
            rank,
            membership,
            timeout_s,
            doing="during start-up",
            on_arrival=compare_size,
            vote_name=VOTE,
        )
    except RoundelayError as error:
        raise refuse(store, VOTE, error) from error
    return [json.loads(texts[r]) for r in range(size)]


def _listed(values: Mapping[int, Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in sorted(values.items()))


def agree_to_start(
    store: Store,
    rank: int,
    size: int,
    machine: str,
    timeout_s: float,
    digest: Mapping[str, Any],
    *,
    bind_address: str = "127.0.0.1",
    test_links: bool = True,
    report_links: bool = False,
    error: Callable[[Sequence[Mapping[str, Any]]], RoundelayError | None] = lambda ranks: None,
) -> list[dict[str, Any]]:
    """Run all start-up checks and return one entry per rank; if a check of any rank fails, raise the same error on all ranks.

    Collective; blocks at most about twice `timeout_s`. `error` is a further check of the entries. Raises UsageError for
    versions, settings and addresses, and PeerLost if ranks are lost or cannot reach each other. With `report_links` pairs that
    cannot reach each other raise no error: `unreachable` of each entry maps the ranks that one cannot reach to the reasons.
    """
    membership = StoreMembership(store)
    verdict: RoundelayError | None = None
    own = describe_rank(size, machine, digest, bind_address)
    probe: ProbeServer | None = None
    try:
        if test_links:
            try:
                probe = ProbeServer(bind_address, rank)
                own |= {"probe": probe.address, "token": probe.token}
            except UsageError as failure:
                verdict = failure
        store.set(f"{SETTINGS}{rank}", settings_text(digest))
        ranks = exchange_rank_info(store, rank, size, timeout_s, own, membership)
        verdict = verdict or difference(store, ranks) or (loopback_error(ranks) if test_links else None) or error(ranks)
        if verdict is None and test_links:
            failures = unreachable(ranks, rank, timeout_s)
            if report_links:
                store.set(f"unreachable/{rank}", json.dumps(failures))
            else:
                verdict = reachability_error(failures, rank)
        vote(store, VOTE, rank, size, verdict, membership, timeout_s)
        if report_links:  # all ranks have written theirs before they voted
            for key, text in store.list("unreachable/").items():
                unreached = {int(peer): reason for peer, reason in json.loads(text).items()}
                ranks[int(key.partition("/")[2])]["unreachable"] = unreached
    finally:
        if probe is not None:
            probe.close()
    return ranks


def difference(store: Store, ranks: Sequence[Mapping[str, Any]]) -> UsageError | None:
    """Return the error that names the first version or setting in which a rank differs from rank 0, or None.

    The entries contain a checksum of the settings; the settings are read from the store only if one differs.
    """
    for other, info in enumerate(ranks):
        hint = "install the same versions on all machines"
        if error := _first_difference("versions", ranks[0]["versions"], info["versions"], other, hint):
            return error
        if info["settings"] != ranks[0]["settings"]:
            texts = store.get_many([f"{SETTINGS}0", f"{SETTINGS}{other}"])
            first, second = (json.loads(texts[f"{SETTINGS}{rank}"] or "{}") for rank in (0, other))
            if error := _first_difference("settings", first, second, other, "start all ranks with the same settings"):
                return error
    return None


def _first_difference(
    what: str, first: Mapping[str, str], second: Mapping[str, str], other: int, hint: str
) -> UsageError | None:
    for key in sorted(set(first) | set(second)):
        a, b = first.get(key), second.get(key)
        if a != b:
            return UsageError(
                f"{key} must be equal on all ranks ({_listed({0: a, other: b})})", where=f"{what}, {key}", hint=hint
            )
    return None


def loopback_error(ranks: Sequence[Mapping[str, Any]]) -> UsageError | None:
    """Return an error if the ranks are on several machines and one of them listens on loopback, or None."""
    machines = {info["network"] for info in ranks}
    local = [r for r, info in enumerate(ranks) if is_loopback(info["bind_address"])]
    if len(machines) == 1 or not local:
        return None
    return UsageError(
        f"bind_address must be reachable from {len(machines)} machines (got {ranks[local[0]]['bind_address']} on rank "
        f"{', '.join(map(str, local))})",
        where="bind_address",
        hint="set bind_address=auto, or an address of each machine that the other machines reach",
    )


def peers_to_test(networks: Sequence[str], rank: int) -> list[int]:
    """Return the ranks on other machines to which this rank tests its connection.

    With more than ALL_PAIRS_UP_TO ranks: the neighbors on the ring, and among themselves the first ranks of the machines.
    """
    size = len(networks)
    peers = set(range(size))
    if size > ALL_PAIRS_UP_TO:
        first: dict[str, int] = {}
        for r, network in enumerate(networks):
            first.setdefault(network, r)
        peers = {(rank - 1) % size, (rank + 1) % size} | (set(first.values()) if rank in first.values() else set())
    return sorted(peer for peer in peers if networks[peer] != networks[rank])


def unreachable(ranks: Sequence[Mapping[str, Any]], rank: int, timeout_s: float = PROBE_S) -> dict[int, str]:
    """Return the ranks on other machines that this rank cannot connect to, with the reason. Blocks about PROBE_S at most.

    Every rank tests its own outgoing connections, in parallel, so each pair is tested in both directions.
    """
    peers = [peer for peer in peers_to_test([info["network"] for info in ranks], rank) if "probe" in ranks[peer]]
    if not peers:
        return {}
    if len(ranks) > ALL_PAIRS_UP_TO and rank == 0:
        logger.info("with more than %d ranks only neighbors and first ranks of machines test their links", ALL_PAIRS_UP_TO)

    def reason(peer: int) -> str:
        (host, port), token = ranks[peer]["probe"], ranks[peer]["token"]
        try:
            with socket.create_connection((host, port), timeout=min(timeout_s, PROBE_S)) as connection:
                connection.sendall(token.encode())
                if _receive(connection, len(token)) == token:
                    return ""
                return f"{host}:{port} is not rank {peer}: another process answers there"
        except OSError as error:
            return f"rank {rank} cannot connect to rank {peer} at {host}:{port}: {error.strerror or error}"

    with ThreadPoolExecutor(len(peers)) as pool:
        return {peer: text for peer, text in zip(peers, pool.map(reason, peers), strict=True) if text}


def reachability_error(failures: Mapping[int, str], rank: int) -> PeerLost | None:
    """Return the error that lists the failed connections of this rank, or None if all succeeded."""
    if not failures:
        return None
    texts = list(failures.values())
    more = f"; and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return PeerLost("; ".join(texts[:LISTED]) + more, where=f"rank {rank}, bind_address", hint=REACH_HINT)
