"""The command `roundelay check`: alone, between ranks, and its failures."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROUNDELAY, TORCHRUN, Jobs

from roundelay.cli import check, main
from roundelay.errors import PeerLost, RoundelayError
from roundelay.fleet.membership import StoreMembership
from roundelay.fleet.store import LocalStore
from roundelay.preflight import links, machine
from roundelay.preflight.links import MeasuredLink


def test_all_checks_run_without_other_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check", f"run={tmp_path / 'run'}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    names = {row["name"] for row in report["findings"]}
    assert {"versions", "device", "cores", "memory", "shared memory", "disk", "writing", "address", "store"} <= names
    assert list(tmp_path.iterdir()) == [], "checks must leave no file"
    assert main.main(["check"]) == 0
    assert "a run will work here" in capsys.readouterr().out


def test_failures_come_with_hints(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        assert main.main(["check", f"store_port={occupied.getsockname()[1]}"]) == 2
    out = capsys.readouterr().out
    assert "FAILED   store: cannot listen on 127.0.0.1" in out
    assert "what to do: choose another port" in out
    assert main.main(["check", "bind_address=192.0.2.1"]) == 2, "not an address of this machine (RFC 5737)"
    assert "set bind_address to an address of this machine" in capsys.readouterr().out
    assert main.main(["check", "bind_adress=auto"]) == 2
    assert "did you mean 'bind_address'" in capsys.readouterr().err


def test_a_full_disk_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", full)
    rows = machine.check_disk(str(tmp_path / "run"))
    assert (rows[1].state, rows[1].code) == ("failure", 3)
    assert "No space left" in rows[1].detail


def test_clock_skew_warns_and_unreachable_ranks_fail() -> None:
    fine, skewed, closed = check.link_results(
        [MeasuredLink(0, 1, 500.0, 0.1, 0.002), MeasuredLink(0, 2, 90.0, 1.0, -7.5), MeasuredLink(1, 2, error="no")]
    )
    assert fine.state == "ok"
    assert "500 MB/s" in fine.detail
    assert skewed.state == "warning"
    assert "-7.5 s apart" in skewed.detail
    assert (closed.state, closed.code) == ("failure", 4)
    assert "bind_address=auto" in closed.hint


def test_many_ranks_measure_only_the_ring_and_rank_0() -> None:
    assert links.pairs(3) == [(0, 1), (0, 2), (1, 2)]
    many = links.pairs(20)
    assert {(r, r + 1) for r in range(19)} | {(0, r) for r in range(1, 20)} == set(many)


def at_once(*calls: Callable[[], object]) -> list[object]:
    """Make the calls in threads; return the result or the error of each, or None if one does not end within 30 s."""
    results: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except RoundelayError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_links_are_measured_between_threads() -> None:
    store = LocalStore()
    first, *others = at_once(*(lambda r=r: links.measure_links(store, r, 3, "127.0.0.1", 20.0) for r in range(3)))
    assert [(link.a, link.b, link.error) for link in first] == [(0, 1, ""), (0, 2, ""), (1, 2, "")]  # type: ignore[attr-defined]
    assert others == [[], []]


@pytest.mark.parametrize("died", [0, 1, 2])
def test_a_rank_that_dies_ends_the_measurement_on_the_others(died: int) -> None:
    """Rank 0 connects to both others, rank 1 serves and connects, rank 2 serves."""
    store, began = LocalStore(), time.monotonic()
    timer = threading.Timer(0.2, StoreMembership(store).report, (died, "killed by signal SIGKILL"))
    timer.start()
    living = [r for r in range(3) if r != died]
    for error in at_once(*(lambda r=r: links.measure_links(store, r, 3, "127.0.0.1", 600.0) for r in living)):
        assert isinstance(error, PeerLost)
        assert f"rank {died} (killed by signal SIGKILL) was lost" in str(error)
    assert time.monotonic() - began < 25
    timer.join()


def test_a_rank_that_stops_in_the_middle_of_a_measurement_ends_it_once_it_is_declared_failed() -> None:
    store = LocalStore()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store.set("listener/1", json.dumps(["127.0.0.1", silent.getsockname()[1]]))
        timer = threading.Timer(0.3, StoreMembership(store).report, (1, "no heartbeat"))
        timer.start()
        (error,) = at_once(lambda: links.measure_links(store, 0, 2, "127.0.0.1", 600.0))
    assert isinstance(error, PeerLost)
    assert "rank 1 (no heartbeat) was lost" in str(error)
    timer.join()


def test_a_measurement_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PAIR_TIMEOUT_S", 0.1)
    (result,) = at_once(lambda: links.measure_links(LocalStore(), 1, 2, "127.0.0.1", 0.1))
    assert result == [], "no client appears, and no failure is reported"


def test_a_run_directory_that_is_not_shared_is_a_failure(tmp_path: Path) -> None:
    store = LocalStore()
    with machine.shared_folder_marker(store, str(tmp_path / "a" / "run")):
        assert machine.check_shared_folder(store, str(tmp_path / "b" / "run"), 1, 5.0).state == "ok"
        (tmp_path / "c").mkdir()
        row = machine.check_shared_folder(store, str(tmp_path / "c" / "run"), 1, 5.0)
    assert (row.state, row.code) == ("failure", 2)
    assert "disk that all machines share" in row.hint
    assert [path.name for path in tmp_path.iterdir()] == ["c"], "no file is left"


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_learner_that_is_killed_during_a_check_is_named(jobs: Jobs) -> None:
    job = jobs.start(ROUNDELAY, "check", "learners=3", "timeout_s=100")
    job.until(lambda: 1 in job.learners(), "learner 1")
    os.kill(job.learners()[1], signal.SIGKILL)
    assert "rank 1 (killed by signal SIGKILL) was lost" in job.end(60).expect(4).err


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_check_compares_the_settings_of_all_ranks(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        jobs.start(ROUNDELAY, "check", f"momentum=0.{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in (0, 1)
    ]
    for rank in ranks:
        assert "momentum must be equal on all ranks (rank 0: 0.0, rank 1: 0.1)" in rank.end(100).expect(2).err


@pytest.mark.dist
@pytest.mark.slow
def test_local_learners_measure_their_link(jobs: Jobs) -> None:
    report = jobs.run("check", "learners=2", "--json", timeout_s=100).expect(0).json
    (link,) = report["links"]
    assert (link["a"], link["b"], link["error"]) == (0, 1, "")
    assert link["megabytes_per_s"] > 0
    assert abs(link["skew_s"]) < 1, "one machine has one clock"


@pytest.mark.dist
@pytest.mark.slow
def test_under_torchrun_rank_0_reports_for_all_ranks(jobs: Jobs) -> None:
    check = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "roundelay", "check", "--json"]
    ended = jobs.start(*check, OMP_NUM_THREADS="1").end(100).expect(0)
    report = next(json.loads(line) for line in ended.out.splitlines() if line.startswith("{"))
    assert report["ok"]
    assert len(report["links"]) == 1
    assert {"rank 0: address", "rank 1: address"} <= {row["name"] for row in report["findings"]}
