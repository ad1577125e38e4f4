"""roundelay check: in one process, with N local learners, or as one rank under a launcher."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from roundelay.cli.arguments import add_json, add_settings
from roundelay.errors import PeerLost

if TYPE_CHECKING:
    from roundelay.config import TrainConfig
    from roundelay.fleet.store import JobStore
    from roundelay.preflight.links import MeasuredLink
    from roundelay.preflight.machine import CheckResult

EXAMPLES = """  roundelay check
  roundelay check learners=2 run=runs/next
  torchrun --nnodes 2 --node-rank 0 --master-addr first --master-port 29500 -m roundelay check bind_address=auto"""
MAX_SKEW_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "settings of the planned run: learners, bind_address, store_port, run, device, timeout_s")
    add_json(parser)


def check_as_rank(settings: TrainConfig) -> tuple[int, list[CheckResult], list[MeasuredLink]]:
    """Check this machine and measure the links to all ranks. All ranks must call it; rank 0 returns the results of all."""
    from roundelay.fleet.heartbeat import Heartbeats
    from roundelay.launch.context import let_other_ranks_read, publish_heartbeats
    from roundelay.launch.environment import read_launcher_env
    from roundelay.launch.rendezvous import store_from_env

    variables = read_launcher_env(os.environ)
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    address, port = variables.get("MASTER_ADDR", "127.0.0.1"), int(variables.get("MASTER_PORT", "29500"))
    keep: list[Any] = []
    store = store_from_env(os.environ, rank, address, port, settings.bind_address, settings.timeout_s, keep)
    heartbeats = Heartbeats(store, rank, size, settings.failure_s)
    stop_heartbeats = publish_heartbeats(heartbeats)
    try:
        return rank, *_check_with_other_ranks(settings, store, rank, size, variables)
    finally:
        stop_heartbeats()
        heartbeats.leave(sys.exc_info()[1])
        let_other_ranks_read(store, size, serves=bool(keep))


def _check_with_other_ranks(
    settings: TrainConfig, store: JobStore, rank: int, size: int, variables: Mapping[str, str]
) -> tuple[list[CheckResult], list[MeasuredLink]]:
    """Return the results of all ranks on rank 0, nothing elsewhere. Raises PeerLost once a rank has failed."""
    from roundelay.core.settings import common_settings
    from roundelay.fleet.store import wait_for_key
    from roundelay.launch.rendezvous import local_address_towards
    from roundelay.preflight.links import agree_and_measure
    from roundelay.preflight.machine import (
        CheckResult,
        check_address,
        check_machine,
        check_shared_folder,
        shared_folder_marker,
    )

    address, port = variables.get("MASTER_ADDR", "127.0.0.1"), int(variables.get("MASTER_PORT", "29500"))
    machine = variables.get("GROUP_RANK") or socket.gethostname()
    here = local_address_towards(address, port) if settings.bind_address == "auto" else settings.bind_address
    with shared_folder_marker(store, settings.run) if rank == 0 else nullcontext():
        infos, links = agree_and_measure(store, rank, size, machine, here, settings.timeout_s, common_settings(settings))
        rows = [check_address(here, address, port)]
        if int(variables.get("LOCAL_RANK", "0")) == 0:
            rows = [*check_machine(settings), *rows]
            if rank != 0 and settings.run:
                rows.append(check_shared_folder(store, settings.run, rank, settings.timeout_s))
        store.set(f"results/{rank}", json.dumps([asdict(row) for row in rows]))
        others = set(range(size)) - {rank}
        if rank != 0:
            wait_for_key(store, "read", settings.timeout_s, rank, awaited=others)
            return [], []
        where = f"{store.client.address}, {size} ranks on {len({i['machine'] for i in infos})} machine(s)"
        results = [CheckResult("store", where)]
        for other in range(size):
            posted = json.loads(wait_for_key(store, f"results/{other}", settings.timeout_s, rank, awaited=others))
            results += [CheckResult(**{**row, "name": f"rank {other}: {row['name']}"}) for row in posted]
        store.set("read", "1")
    return results + link_results(links), links


def link_results(links: list[MeasuredLink]) -> list[CheckResult]:
    """Return one result per measured link."""
    from roundelay.launch.startup import REACH_HINT
    from roundelay.preflight.machine import CheckResult

    rows = []
    for link in links:
        name = f"ranks {link.a} and {link.b}"
        if link.error:
            rows.append(CheckResult(name, link.error, "failure", REACH_HINT, PeerLost.exit_code))
            continue
        speed = f"{link.megabytes_per_s:.0f} MB/s, round trip {link.round_trip_ms:.2f} ms"
        if abs(link.skew_s) > MAX_SKEW_S:
            hint = "synchronize the clocks (chrony or ntp): times in events and reports are inconsistent"
            rows.append(CheckResult(name, f"{speed}, clocks {link.skew_s:+.1f} s apart", "warning", hint))
        else:
            rows.append(CheckResult(name, f"{speed}, clocks {1000 * link.skew_s:+.1f} ms apart"))
    return rows


# -- the command -------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Check the environment and print one line per result; the exit code is that of the worst failure."""
    from roundelay import config
    from roundelay.launch.context import under_launcher
    from roundelay.launch.local import start_learners
    from roundelay.preflight.machine import check_address, check_machine, check_store

    settings = config.load(None, args.overrides).settings
    links: list[MeasuredLink] = []
    if under_launcher():
        rank, rows, links = check_as_rank(settings)
        if rank != 0:
            return 0
    elif settings.learners > 1:
        command = [sys.executable, "-m", "roundelay", "check", *args.overrides, *(["--json"] if args.json else [])]
        host = "127.0.0.1" if settings.bind_address == "auto" else settings.bind_address
        return start_learners(
            command,
            lambda: run(args),
            settings.learners,
            bind_address=host,
            port=settings.store_port,
            run=None,
            survives_failures=False,
        )
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
    """Return the results as JSON."""
    ok = all(row.state != "failure" for row in rows)
    return json.dumps({"ok": ok, "findings": [asdict(row) for row in rows], "links": [asdict(link) for link in links]})


def as_text(rows: list[CheckResult]) -> str:
    """Return one line per result, with a hint where something is wrong."""
    signs = {"ok": "ok", "warning": "WARNING", "failure": "FAILED"}
    lines: list[str] = []
    for row in rows:
        lines.append(f"{signs[row.state]:<8} {row.name}: {row.detail}")
        if row.hint:
            lines.append(f"{'':<8} what to do: {row.hint}")
    bad = sum(row.state == "failure" for row in rows)
    lines.append("all checks passed: a run will work here" if not bad else f"{bad} check{'s' * (bad > 1)} failed")
    return "\n".join(lines)
