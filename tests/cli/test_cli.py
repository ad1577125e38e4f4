"""The installed command, as people type it."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path

import pytest
from command import ROUNDELAY, TORCHRUN, Jobs
from paths import ROOT

import roundelay
from benchmarks import BENCHES
from roundelay.cli import main

NAMES = [
    "single",
    "sync",
    "asgd",
    "kstep",
    "adaptive_kstep",
    "kaldi_averaging",
    "bmuf",
    "dpsgd",
    "adpsgd",
    "delay_by_one",
    "hierarchical",
]
TRAITS = {"sharding", "deterministic", "conserves_mean", "contracts", "survives_failures", "optimizer_state"}


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """The command's exit code, output and error output, run inside this process."""
    try:
        code = main.main(argv)
    except SystemExit as end:  # argparse leaves this way
        code = int(end.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


# ----------------------------------------------------------------------------------------------------- lists and help


def test_list_strategies_as_an_installed_command(jobs: Jobs) -> None:
    found = jobs.run("list", "strategies", "--json").expect(0).json
    assert list(found) == NAMES
    for page in found.values():
        assert page["equation"]
        assert set(page["traits"]) >= TRAITS


def test_list_topologies_with_their_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "list", "topologies", "--size", "6", "--json")
    found = json.loads(out)
    assert code == 0
    assert {"ring", "random_ring", "exponential", "complete"} <= set(found)
    assert all(0 < page["gap"] <= 1 and page["size"] == 6 for page in found.values())


@pytest.mark.parametrize("what", main.LISTS)
def test_lists_for_people_name_everything(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, plain, _ = said(capsys, "list", what)
    assert code == 0
    names = json.loads(said(capsys, "list", what, "--json")[1])
    assert names
    assert all(name in plain for name in names)


def commands() -> list[str]:
    """Every command there is, benchmarks too."""
    made = next(a for a in main.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return ["", *made.choices, *(f"bench {name}" for name in BENCHES)]


@pytest.mark.parametrize("command", commands())
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, *command.split(), "--help")
    assert code == 0
    _, found, examples = out.partition("\nexample")
    assert found
    assert f"roundelay {command}".strip() in examples


@pytest.mark.parametrize("command", [c for c in commands() if c and not c.startswith("bench")])
def test_every_argument_that_is_not_plain_says_what_it_is(command: str) -> None:
    made = next(a for a in main.parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in made.choices[command]._actions:
        if "--json" in action.option_strings:
            assert action.help
        if action.metavar == "key=value":
            assert action.help, f"{command} takes settings and does not say which"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version")[1] == f"roundelay {roundelay.__version__}\n"


def test_config_shows_values_and_where_they_come_from(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    file = jobs.task()
    rows = json.loads(said(capsys, "config", file, "lr=0.25", "--json")[1])
    assert rows["lr"] == {"value": 0.25, "from": "command line"}
    assert rows["batch"] == {"value": 4, "from": "dots.toml:3"}
    assert rows["epochs"] == {"value": 1.0, "from": "default"}
    assert "command line" in said(capsys, "config", file, "lr=0.25")[1]


def test_settings_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(ROOT / "recipes" / "spoken")
    code, out, _ = said(capsys, "config", folder, "train.batch=8", "--json", "train.lr=0.25")
    assert code == 0
    assert [json.loads(out)[f"train.{key}"]["value"] for key in ("batch", "lr")] == [8, 0.25]
    for argv in (["config", folder, "--json", "what"], ["list", "strategies", "--json", "size=3"], ["check", "--jason"]):
        with pytest.raises(SystemExit) as ended:
            main.main(argv)
        assert ended.value.code == 2
        assert f"unrecognized arguments: {argv[-1]}" in capsys.readouterr().err


def test_config_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(ROOT / "recipes" / "spoken")
    code, out, _ = said(capsys, "config", folder, "train.learners=4", "--json")
    assert code == 0
    rows = json.loads(out)
    assert rows["train.learners"] == {"value": 4, "from": "command line"}
    assert rows["tri.leaves"] == {"value": 500, "from": "recipe.toml"}
    assert rows["source.options.snr"] == {"value": [0, 20], "from": "recipe.toml"}
    assert rows["train.topology"] == {"value": "ring", "from": "default"}
    assert "# command line" in said(capsys, "config", folder, "train.learners=4")[1]
    assert said(capsys, "config", folder, "train.lerners=4")[0] == 2


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("strategy=adspgd", "did you mean 'adpsgd'"),
        ("strateggy=sync", "did you mean 'strategy'"),
        ("topology=rign", "did you mean 'ring'"),
        ("backend=smh", "did you mean 'shm'"),
        ("optimizer=adamax", "did you mean 'adam'"),
        ("strategy=kstep strategy_options.k=4", "did you mean 'K'"),
        ("task_options.sampels=4", "did you mean 'samples'"),
        ("strategy=hierarchical(nothing)", "unknown strategy 'nothing'"),
        ("strategy=nowhere.to.be.found:Mine", "failed to load"),
        ("task=nowhere:Task", "cannot be loaded"),
        ("epochs=many", "must be float"),
        ("learners=0", "at least 1"),
        ("learners", "is not key=value"),
        ("batch=0", "at least 1"),
        ("batch=somewhere:8", "says nothing about the machine of rank 0"),
        ("batch=somewhere:none", "is not host:batch"),
        ("straggler=1:2", "ranks are 0 to 0"),
        ("straggler=fast", "is not rank:factor"),
        ("device=abacus", "there is no device"),
        ("resume=nowhere", "nowhere"),
        ("backend=threads learners=2 simulate_nodes=3", "cannot be split"),
        ("strategy=single backend=threads learners=2", "'single' must run on one rank (got 2)"),
    ],
)
def test_mistakes_end_in_a_sentence(override: str, complaint: str, jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"run={jobs.folder / 'run'}"
    code, _, err = said(capsys, "train", jobs.task(trace=""), run, *override.split())
    assert code in (2, 3)
    assert err.startswith("roundelay: ")
    assert complaint in err
    assert "what to do: " in err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot read"),
        ("lr = ", "is not valid TOML"),
        ("learning_rate = 1", "there is no setting 'learning_rate'"),
        ("", "no task is named"),
    ],
)
def test_bad_files_end_in_a_sentence(
    text: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    if text is not None:
        file.write_text(text)
    code, _, err = said(capsys, "train", str(file), f"run={tmp_path / 'run'}")
    assert code == 2
    assert complaint in err


def test_no_command_and_unknown_commands_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys)[0] == 2
    assert said(capsys, "trian")[0] == 2
    assert said(capsys, "list", "colours")[0] == 2


@pytest.mark.dist
def test_a_port_in_use_is_said_so(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = jobs.train("learners=2", f"port={port}").end().expect(2)
    assert f"cannot listen on 127.0.0.1:{port}" in ended.err
    assert "choose another port" in ended.err


def test_a_run_directory_with_checkpoints_is_not_overwritten(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = jobs.task(trace="", samples=16), f"run={jobs.folder / 'run'}"
    assert said(capsys, "train", file, run)[0] == 0
    before = jobs.model()
    code, _, err = said(capsys, "train", file, run, "seed=1")
    assert code == 2
    assert "already holds checkpoints" in err
    assert "resume=auto" in err
    assert jobs.model() == before


# ------------------------------------------------------------------------------------------------------- training


def test_training_alone(jobs: Jobs) -> None:
    ended = jobs.train("strategy=single", "epochs=4", "checkpoint_every_epochs=1", "--json").end().expect(0)
    metrics = ended.json["metrics"]
    assert metrics["loss"] < 0.8  # guessing gives log 3 = 1.1
    assert jobs.counts() == dict.fromkeys(range(120), 4)
    assert [e["event"] for e in jobs.events()][-1] == "run"
    evaluations = jobs.events(kind="evaluation")
    assert [e["position"] for e in evaluations] == [120, 240, 360, 480]
    assert jobs.checkpoints() == ["samples-000000000240", "samples-000000000360", "samples-000000000480"]
    assert 'strategy = "single"' in (jobs.folder / "run" / "config.toml").read_text()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [("adpsgd", "shm"), ("asgd", "torch"), ("hierarchical(adpsgd) simulate_nodes=2", "auto")],
)
def test_training_with_local_learners(strategy: str, backend: str, jobs: Jobs) -> None:
    name, *more = strategy.split()
    ended = jobs.train(f"strategy={name}", *more, f"backend={backend}", "learners=2", "epochs=2", "--json").end(90).expect(0)
    assert ended.json["metrics"]["loss"] < 1.0
    assert set(ended.json["ranks"]) == {"0", "1"}
    assert jobs.counts() == dict.fromkeys(range(120), 2)
    assert {e["rank"] for e in jobs.events(kind="summary")} == {0, 1}
    assert (jobs.folder / "run" / "log" / "rank-001.txt").exists()


def test_training_in_threads(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = jobs.task(trace=""), f"run={jobs.folder / 'run'}"
    code, out, _ = said(capsys, "train", file, run, "backend=threads", "learners=3", "strategy=sync", "epochs=2", "--json")
    assert code == 0
    assert json.loads(out)["metrics"]["loss"] < 1.0
    assert {e["rank"] for e in jobs.events(kind="summary")} == {0, 1, 2}


@pytest.mark.dist
@pytest.mark.slow
def test_training_under_torchrun(jobs: Jobs) -> None:
    arguments = ["strategy=delay_by_one", "learners=7", "epochs=2", "run=run", "--json"]
    command = [TORCHRUN, "--nproc-per-node", "2", "-m", "roundelay", "train", jobs.task(), *arguments]
    ended = jobs.start(*command, OMP_NUM_THREADS="1").end(90).expect(0)
    result = next(json.loads(line) for line in ended.out.splitlines() if line.startswith("{"))
    assert set(result["ranks"]) == {"0", "1"}, "learners= is ignored under torchrun"
    assert jobs.counts() == dict.fromkeys(range(120), 2)


@pytest.mark.dist
@pytest.mark.slow
def test_a_slow_learner_takes_fewer_batches_and_none_is_dealt_twice(jobs: Jobs) -> None:
    jobs.train("strategy=adpsgd", "learners=2", "straggler=1:3.0", "epochs=2", samples=200, pause_s=0.01).end(90).expect(0)
    assert jobs.counts() == dict.fromkeys(range(200), 2)
    steps = {rank: len(batches) for rank, batches in jobs.batches().items()}
    # A third of the speed is a third of the batches; twice as many for rank 0 leaves room for a noisy machine.
    assert steps[0] > 2 * steps[1] > 0


@pytest.mark.dist
@pytest.mark.slow
def test_batches_by_machine_and_by_probe(jobs: Jobs) -> None:
    host = socket.gethostname()
    jobs.train("learners=2", "strategy=sync", f"batch={host}:6", run="by-host").end(90).expect(0)
    assert {len(b) for batches in jobs.batches().values() for b in batches} == {6}
    ended = (
        jobs.train("learners=2", "strategy=adpsgd", "batch=auto", "progress=plain", "straggler=1:4", run="auto", pause_s=0.02)
        .end(90)
        .expect(0)
    )
    sizes = ended.err.partition("global batch ")[2].partition(",")[0]  # "128 (102+26)"
    total, first, second = (int(n) for n in sizes.replace("(", "").replace(")", "").replace("+", " ").split())
    assert total == first + second == 128
    assert first > second


# ------------------------------------------------------------------------------------------- ranks that do not agree


@pytest.mark.dist
@pytest.mark.parametrize(
    ("differ", "complaint"),
    [
        ({"WORLD_SIZE": "3"}, "rank 1 was told of 3 learners, rank 0 of 2"),
        ({"override": "lr=0.3"}, "has lr"),
    ],
)
def test_ranks_that_disagree_stop_and_say_in_what(differ: dict[str, str], complaint: str, jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    override = [differ.pop("override")] if "override" in differ else []
    base = [ROUNDELAY, "train", jobs.task(), "run=run", "timeout_s=10"]
    first = jobs.start(*base, RANK="0", **common)
    second = jobs.start(*base, *override, RANK="1", **{**common, **differ})
    ends = [first.end(60).expect(2), second.end(60).expect(2)]
    assert complaint in ends[1].err or complaint in ends[0].err
    for end in ends:
        assert "rank 0" in end.err
        assert "rank 1" in end.err
