"""`roundelay bench` and `roundelay calibrate`: real processes, small tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import TORCHRUN, Jobs

from roundelay.bench import COMMANDS, load_task, network, throughput
from roundelay.errors import PeerLost, UsageError
from roundelay.simulate import calibrate
from roundelay.simulate import cluster as clusters

SMALL = ['task="roundelay.testing.tasks:SyntheticFrames"', "task_options.samples=512", "batch=8", "learners=2"]
MACHINE = {
    "parameters": 1_000_000.0, "seconds_per_sample": 0.004, "seconds_per_step": 0.002, "step_s": 0.034, "exchange_s": 0.001,
    "gbit_per_s": 16.0, "latency_us": 40.0, "cpu_s_per_gb": 0.5,
}  # fmt: skip
LINK = {"gbit_per_s": 0.95, "latency_us": 150.0, "cpu_s_per_gb": 0.7}


def rank_record(step_s: float = 0.034, links: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"step_s": step_s, "exchange_s": 0.001, "cores": 8, "links": links or []}


def link(a: int, b: int, **values: Any) -> dict[str, Any]:
    return {"a": a, "b": b, "megabytes_per_s": 12.5, "round_trip_ms": 10.0, "skew_s": 0.0, "error": "", **values}


# -- arguments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = {"throughput": throughput, "network": network}[name]
    with pytest.raises(SystemExit) as exit_status:
        module.main(["--help"])
    assert exit_status.value.code == 0
    assert f"roundelay bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        (["a.toml", "b.toml"], "at most one file"),
        (["batch=auto"], "batch must be a number"),
        (["bach=8"], "did you mean 'batch'"),
    ],
)
def test_wrong_inputs_raise_usage_errors(inputs: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        load_task(inputs)


@pytest.mark.parametrize("main", [throughput.main, network.main])
def test_one_learner_is_rejected(main: Any) -> None:
    with pytest.raises(UsageError, match=r"learners must be >= 2 \(got 1\)"):
        main([*SMALL, "learners=1"])


@pytest.mark.parametrize("args", [["--batch", "0"], ["--repeats", "0"]])
def test_calibrate_rejects_numbers_below_one(args: list[str]) -> None:
    with pytest.raises(UsageError, match="must be > 0"):
        calibrate.main(args)


# -- predictions -----------------------------------------------------------------------------------------------------------


def test_slow_links_favor_adpsgd_and_fast_links_sync() -> None:
    def recommended(megabytes_per_s: float, trip_ms: float) -> dict[str, Any]:
        ranks = [rank_record(links=[link(0, 1, megabytes_per_s=megabytes_per_s, round_trip_ms=trip_ms)]), rank_record()]
        return network.predict(network.cluster_from(ranks, ["a", "b"], 8, 1_000_000), 1_000_000, 8)

    slow, fast = recommended(25.0, 10.0), recommended(5000.0, 0.01)
    assert slow["recommendation"] == "adpsgd"
    assert fast["recommendation"] == "sync"
    assert "Use adpsgd here" in network.format_prediction(slow)
    assert json.loads(json.dumps(slow)) == slow


def test_hierarchy_is_predicted_where_machines_have_several_learners() -> None:
    links = [link(a, b) for a in range(4) for b in range(a + 1, 4)]
    cluster = network.cluster_from([rank_record(links=links), *[rank_record()] * 3], ["a", "a", "b", "b"], 8, 1_000_000)
    names = [row["strategy"] for row in network.predict(cluster, 1_000_000, 8)["strategies"]]
    assert names == ["sync", "adpsgd", "hierarchical(adpsgd)"]


def test_a_slow_rank_becomes_a_straggler() -> None:
    ranks = [rank_record(links=[link(0, 1), link(0, 2), link(1, 2)]), rank_record(0.068), rank_record()]
    cluster = network.cluster_from(ranks, ["a", "b", "c"], 8, 1_000_000)
    assert [(s.learner, s.factor) for s in cluster.straggler] == [(1, pytest.approx(2.0))]


def test_an_unreachable_rank_is_an_error() -> None:
    ranks = [rank_record(links=[link(0, 1, error="rank 0 cannot connect to rank 1")]), rank_record()]
    with pytest.raises(PeerLost, match="cannot connect"):
        network.cluster_from(ranks, ["a", "b"], 8, 1_000_000)


@pytest.mark.parametrize("between", [None, LINK])
def test_a_written_cluster_file_loads_as_measured(between: dict[str, float] | None, tmp_path: Path) -> None:
    path = calibrate.write_cluster_file(tmp_path / "here.toml", calibrate.cluster_tree(MACHINE, between))
    cluster = clusters.load(path)
    assert cluster.learners == 2
    assert len(set(cluster.machine_names())) == (1 if between is None else 2)
    assert cluster.learner.seconds_per_sample == pytest.approx(0.004)
    assert cluster.memory.exchange_gb_per_s == pytest.approx(8.0)  # 2 x 4 MB in 1 ms
    assert cluster.link.inside.gbit_per_s == pytest.approx(16.0)
    if between is not None:
        assert cluster.link.between.gbit_per_s == pytest.approx(0.95)


def test_transfers_cost_cpu_only_on_crowded_machines() -> None:
    crowded, roomy = (calibrate.cluster_tree(MACHINE, LINK, cores=cores) for cores in (2, 8))
    assert "cpu_s_per_gb" in crowded["link"]["between"]
    assert "cpu_s_per_gb" not in roomy["link"]["between"]
    assert (crowded["memory"]["contention"], roomy["memory"]["contention"]) == (0.5, 0.0)


# -- real processes --------------------------------------------------------------------------------------------------------


@pytest.mark.dist
def test_throughput_measures_every_competitor(capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput.main([*SMALL, "--rounds", "1", "--seconds", "0.4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["competitor"] for row in record["results"]] == ["compute", "ddp", "sync", "adpsgd"]
    assert record["results"][0]["ratio"] == 1.0
    assert all(row["samples_per_s"] > 0 and row["cpu_ratio"] > 0 for row in record["results"])
    assert "times as many samples per second" in throughput.format_results(record["results"])


@pytest.mark.dist
def test_network_measures_local_learners(capsys: pytest.CaptureFixture[str]) -> None:
    assert network.main([*SMALL, "--quick", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["learners"], record["machines"]) == (2, 1)
    assert record["links"][0]["megabytes_per_s"] > 0
    assert record["step_s"] > 0
    assert record["recommendation"] in ("sync", "adpsgd")


@pytest.mark.dist
@pytest.mark.slow
def test_calibrate_writes_a_cluster_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "STEP_SECONDS", 0.2)
    assert calibrate.main(["--out", str(tmp_path / "here.toml"), "--batch", "2", "--repeats", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["file"] == str(tmp_path / "here.toml")
    cluster = clusters.load(tmp_path / "here.toml")
    assert cluster.learner.seconds_per_sample > 0
    assert cluster.memory.exchange_gb_per_s > 0
    assert cluster.link.inside.gbit_per_s > 0


@pytest.mark.dist
@pytest.mark.slow
def test_calibrate_measures_the_link_between_two_ranks(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "calibrate_rank.py"
    script.write_text(
        "import sys\nfrom roundelay.simulate import calibrate\ncalibrate.STEP_SECONDS = 0.2\n"
        "sys.exit(calibrate.main(sys.argv[1:]))\n"
    )
    launch = [TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script)]
    out = tmp_path / "two.toml"
    job = jobs.start(*launch, "--out", str(out), "--batch", "2", "--repeats", "1", OMP_NUM_THREADS="1")
    job.end(150).expect(0)
    cluster = clusters.load(out)
    assert len(set(cluster.machine_names())) == 2
    assert cluster.link.between.gbit_per_s > 0
