"""roundelay check: what it finds alone and between ranks, and what it says when something will not work."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from command import TORCHRUN, Jobs

from roundelay.cli import check, main
from roundelay.preflight import links, machine
from roundelay.preflight.links import MeasuredLink


def test_alone_everything_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check", f"run={tmp_path / 'run'}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    whats = {row["what"] for row in said["findings"]}
    assert {"versions", "device", "cores", "memory", "shared memory", "disk", "writing", "address", "store"} <= whats
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"
    assert main.main(["check"]) == 0
    assert "a run will work here" in capsys.readouterr().out


def test_what_will_not_work_is_said_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main.main(["check", f"port={taken.getsockname()[1]}"]) == 2
    out = capsys.readouterr().out
    assert "FAILED   store: cannot listen on 127.0.0.1" in out
    assert "what to do: choose another port" in out
    assert main.main(["check", "host=192.0.2.1"]) == 2, "an address of nobody (RFC 5737)"
    assert "must be an address of this machine" in capsys.readouterr().out
    assert main.main(["check", "hoost=auto"]) == 2
    assert "did you mean 'host'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", full)
    rows = machine.look_at_disk(str(tmp_path / "run"))
    assert (rows[1].state, rows[1].code) == ("failure", 3)
    assert "No space left" in rows[1].found


def test_far_clocks_and_closed_doors_are_judged() -> None:
    fine, skewed, closed = check.judged(
        [MeasuredLink(0, 1, 500.0, 0.1, 0.002), MeasuredLink(0, 2, 90.0, 1.0, -7.5), MeasuredLink(1, 2, error="no")]
    )
    assert fine.state == "ok"
    assert "500 MB/s" in fine.found
    assert skewed.state == "warning"
    assert "-7.5 s apart" in skewed.found
    assert (closed.state, closed.code) == ("failure", 4)
    assert "bind_address=auto" in closed.do


def test_pairs_are_all_of_few_and_the_ring_of_many() -> None:
    assert links.pairs(3) == [(0, 1), (0, 2), (1, 2)]
    many = links.pairs(20)
    assert {(r, r + 1) for r in range(19)} | {(0, r) for r in range(1, 20)} == set(many)


@pytest.mark.dist
@pytest.mark.slow
def test_local_learners_measure_what_lies_between_them(jobs: Jobs) -> None:
    said = jobs.run("check", "learners=2", "--json", timeout_s=100).expect(0).json
    (link,) = said["links"]
    assert (link["a"], link["b"], link["error"]) == (0, 1, "")
    assert link["megabytes_per_s"] > 0
    assert abs(link["skew_s"]) < 1, "one machine has one clock"


@pytest.mark.dist
@pytest.mark.slow
def test_under_torchrun_rank_0_speaks_for_all(jobs: Jobs) -> None:
    check = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "roundelay", "check", "--json"]
    ended = jobs.start(*check, OMP_NUM_THREADS="1").end(100).expect(0)
    said = next(json.loads(line) for line in ended.out.splitlines() if line.startswith("{"))
    assert said["ok"]
    assert len(said["links"]) == 1
    assert {"rank 0: address", "rank 1: address"} <= {row["what"] for row in said["findings"]}
