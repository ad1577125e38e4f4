"""The command: alone, with local learners, or as one rank under a launcher."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import asdict

from roundelay import config
from roundelay.errors import PeerLost, UsageError
from roundelay.fleet.store import JobStore, connect_store, serve_store
from roundelay.launch.context import exchange_rank_info, host_towards, under_launcher
from roundelay.launch.local import start_learners
from roundelay.preflight.links import MeasuredLink, measure_links
from roundelay.preflight.machine import CheckResult, check_address, check_machine, check_store

GREATEST_SKEW_S = 1.0


def as_rank(settings: config.TrainConfig) -> tuple[int, list[CheckResult], list[MeasuredLink]]:
    """This process is one rank: meets the others and measures; rank 0 comes back with everybody's findings."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    keep = [serve_store(address, port)] if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" else []
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = JobStore(connect_store(address, port, settings.timeout_s), f"check/{restart}/")
    machine = os.environ.get("GROUP_RANK") or socket.gethostname()
    cards = exchange_rank_info(store, rank, size, machine, settings.timeout_s, {})
    here = host_towards(address, port) if settings.bind_address == "auto" else settings.bind_address
    rows = [check_address(here, address, port)]
    if rows[0].state == "failure":
        raise UsageError(f"no door can be opened at {rows[0].detail}", where=f"rank {rank}, host", hint=rows[0].hint)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        rows = [*check_machine(settings), *rows]
    links = measure_links(store, rank, size, here, settings.timeout_s)
    store.set(f"found/{rank}", json.dumps([asdict(row) for row in rows]))
    if rank != 0:
        wait_for(store, "read", settings.timeout_s)
        return rank, [], []
    everybody = [CheckResult("store", f"{address}:{port}, {size} ranks on {len({c['machine'] for c in cards})} machine(s)")]
    for other in range(size):
        said = json.loads(wait_for(store, f"found/{other}", settings.timeout_s))
        everybody += [CheckResult(**{**row, "name": f"rank {other}: {row['name']}"}) for row in said]
    everybody += judged(links)
    store.set("read", "1")
    time.sleep(0.2 * bool(keep))  # the others read this from the store that ends with this process
    return rank, everybody, links


def wait_for(store: JobStore, key: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while (found := store.get(key)) is None:
        if time.monotonic() > deadline:
            raise PeerLost(
                f"nothing came for '{key}' in {timeout_s:.0f} s", where="store", hint="see the other ranks' messages"
            )
        time.sleep(0.01)
    return found


def judged(links: list[MeasuredLink]) -> list[CheckResult]:
    rows = []
    for link in links:
        name = f"ranks {link.a} and {link.b}"
        if link.error:
            do = "open the ephemeral ports between the machines, and set bind_address=auto or the address that the others can reach"
            rows.append(CheckResult(name, link.error, "failure", do, PeerLost.exit_code))
            continue
        said = f"{link.megabytes_per_s:.0f} MB/s, {link.round_trip_ms:.2f} ms there and back"
        if abs(link.skew_s) > GREATEST_SKEW_S:
            do = "set the clocks (chrony or ntp): times in events and reports would not fit together"
            rows.append(CheckResult(name, f"{said}, clocks {link.skew_s:+.1f} s apart", "warning", do))
        else:
            rows.append(CheckResult(name, f"{said}, clocks {1000 * link.skew_s:+.1f} ms apart"))
    return rows


# -- the command -------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    settings = config.load(None, args.overrides).settings
    links: list[MeasuredLink] = []
    if under_launcher():
        rank, rows, links = as_rank(settings)
        if rank != 0:
            return 0
    elif settings.learners > 1:
        command = [sys.executable, "-m", "roundelay", "check", *args.overrides, *(["--json"] if args.json else [])]
        host = "127.0.0.1" if settings.bind_address == "auto" else settings.bind_address
        return start_learners(
            command, lambda: run(args), settings.learners, bind_address=host, port=settings.store_port, run=None, survives_death=False
        )  # fmt: skip
    else:
        host = "127.0.0.1" if settings.bind_address == "auto" else settings.bind_address
        rows = [
            *check_machine(settings),
            check_address(settings.bind_address, "127.0.0.1", 0),
            check_store(host, settings.store_port),
        ]
    print(as_json(rows, links) if args.json else as_text(rows), flush=True)
    return max((row.code for row in rows if row.state == "failure"), default=0)


def as_json(rows: list[CheckResult], links: list[MeasuredLink]) -> str:
    ok = all(row.state != "failure" for row in rows)
    return json.dumps({"ok": ok, "findings": [asdict(row) for row in rows], "links": [asdict(link) for link in links]})


def as_text(rows: list[CheckResult]) -> str:
    signs = {"ok": "ok", "warning": "WARNING", "failure": "FAILED"}
    lines = []
    for row in rows:
        lines.append(f"{signs[row.state]:<8} {row.name}: {row.detail}")
        if row.hint:
            lines.append(f"{'':<8} what to do: {row.hint}")
    bad = sum(row.state == "failure" for row in rows)
    lines.append("a run will work here" if not bad else f"{bad} thing{'s' * (bad > 1)} to mend first")
    return "\n".join(lines)
