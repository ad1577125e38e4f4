"""The command `roundelay check`: alone, between ranks, and its failures."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from command import TORCHRUN, Jobs

from roundelay.cli import check, main
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
