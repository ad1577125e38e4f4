"""The installed command: lists, help, error messages, and training."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROUNDELAY, TORCHRUN, Jobs
from paths import ROOT

import roundelay
from roundelay.cli import list as lists
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


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run a command in this process and return its exit code, stdout and stderr."""
    try:
        code = main.main(argv)
    except SystemExit as end:  # argparse exits this way
        code = int(end.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


# ----------------------------------------------------------------------------------------------------- lists and help


def test_list_strategies_as_an_installed_command(jobs: Jobs) -> None:
    rows = jobs.run("list", "strategies", "--json").expect(0).json
    assert list(rows) == NAMES
    for page in rows.values():
        assert page["equation"]
        assert set(page["traits"]) >= TRAITS


def test_list_topologies_with_their_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "topologies", "--size", "6", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {"ring", "random_ring", "exponential", "complete"} <= set(rows)
    assert all(0 < page["gap"] <= 1 and page["size"] == 6 for page in rows.values())


@pytest.mark.parametrize("what", lists.LISTS)
def test_lists_name_everything(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, plain, _ = call(capsys, "list", what)
    assert code == 0
    names = json.loads(call(capsys, "list", what, "--json")[1])
    assert names
    assert all(name in plain for name in names)


PARSED = [name for name in main.COMMANDS if name not in main.FORWARDED]


@pytest.mark.parametrize("command", ["", "bench", *PARSED])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *command.split(), "--help")
    assert code == 0
    _, marker, examples = out.partition("\nexample")
    assert marker
    assert f"roundelay {command}".strip() in examples


@pytest.mark.parametrize("command", PARSED)
def test_every_argument_has_a_help_text(command: str) -> None:
    parser, _ = main.command_parser(command)
    for action in parser._actions:
        assert action.help, f"{command}: {action.dest}"


@pytest.mark.parametrize("command", ["--help", "train --help", "decode --help", "list recipes", "list schedules"])
def test_help_and_lists_do_not_import_torch(command: str) -> None:
    code = f"import sys; from roundelay.cli.main import main\ntry: main({command.split()!r})\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'numba', 'kaldifst', 'soundfile', 'tensorboard'} & set(sys.modules), sorted(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_importing_the_package_imports_no_dependency() -> None:
    code = "import sys, roundelay; assert not {'torch', 'numba', 'rich', 'kaldifst', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_a_usage_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise ModuleNotFoundError("No module named 'kaldifst'", name="kaldifst")

    monkeypatch.setattr("roundelay.cli.decode.run", fail)
    code, _, err = call(capsys, "decode", "run", "--data", "x")
    assert code == 2
    assert "this command needs the speech extra" in err
    assert "pip install 'roundelay[speech]'" in err


def test_completion_scripts_come_from_shtab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("shtab")
    code, out, _ = call(capsys, "--print-completion", "bash")
    assert code == 0
    assert "simulate" in out
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = call(capsys, "--print-completion", "bash")
    assert code == 2
    assert "roundelay[completion]" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[1] == f"roundelay {roundelay.__version__}\n"


def test_config_shows_values_and_origins(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    file = jobs.task()
    rows = json.loads(call(capsys, "config", file, "lr=0.25", "--json")[1])
    assert rows["lr"] == {"value": 0.25, "from": "command line"}
    assert rows["batch"] == {"value": 4, "from": f"{file}:3"}
    assert rows["epochs"] == {"value": 1.0, "from": "default"}
    assert "command line" in call(capsys, "config", file, "lr=0.25")[1]


def test_settings_may_follow_options(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(ROOT / "src" / "roundelay" / "recipes" / "spoken")
    code, out, _ = call(capsys, "config", folder, "train.batch=8", "--json", "train.lr=0.25")
    assert code == 0
    assert [json.loads(out)[f"train.{key}"]["value"] for key in ("batch", "lr")] == [8, 0.25]
    for argv in (["list", "strategies", "--json", "size=3"], ["check", "--jason"]):
        with pytest.raises(SystemExit) as ended:
            main.main(argv)
        assert ended.value.code == 2
        assert f"unrecognized arguments: {argv[-1]}" in capsys.readouterr().err


def test_config_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(ROOT / "src" / "roundelay" / "recipes" / "spoken")
    code, out, _ = call(capsys, "config", folder, "train.learners=4", "--json")
    assert code == 0
    rows = json.loads(out)
    assert rows["train.learners"] == {"value": 4, "from": "command line"}
    assert rows["tri.leaves"]["value"] == 500
    assert "recipe.toml:" in rows["tri.leaves"]["from"]
    assert rows["source.options.snr"]["value"] == [0, 20]
    assert "recipe.toml:" in rows["source.options.snr"]["from"]
    assert rows["train.topology"] == {"value": "ring", "from": "default"}
    assert "# command line" in call(capsys, "config", folder, "train.learners=4")[1]
    code, _, err = call(capsys, "config", "spoken", "train.lerners=4")
    assert code == 2
    assert "unknown key 'lerners' in [train]" in err


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
        ("epochs=many", "epochs must be a number"),
        ("learners=0", "learners must be >= 1 (got 0)"),
        ("learners", "is not of the form key=value"),
        ("batch=0", "batch must be >= 1 (got 0)"),
        ("batch=somewhere:8", "batch must list the host of every rank (rank 0 is missing)"),
        ("batch=somewhere:none", "batch must be a number, auto, or a list of host:number"),
        ("straggler=1:2", "straggler must name ranks 0 to 0"),
        ("straggler=fast", "straggler must be a list of rank:factor"),
        ("device=abacus", "device must be auto, cpu or cuda"),
        ("resume=nowhere", "nowhere"),
        ("backend=threads learners=2 simulate_nodes=3", "simulate_nodes must be at most the number of learners"),
        ("strategy=single backend=threads learners=2", "'single' must run on one rank (got 2)"),
    ],
)
def test_usage_errors_name_the_mistake_and_a_hint(
    override: str, complaint: str, jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"run={jobs.folder / 'run'}"
    code, _, err = call(capsys, "train", jobs.task(trace=""), run, *override.split())
    assert code in (2, 3)
    assert err.startswith("roundelay: ")
    assert complaint in err
    assert "what to do: " in err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot read"),
        ("lr = ", "is not valid TOML"),
        ("learning_rate = 1", "unknown key 'learning_rate'"),
        ("", "task must be set"),
    ],
)
def test_bad_files_are_usage_errors(
    text: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    if text is not None:
        file.write_text(text)
    code, _, err = call(capsys, "train", str(file), f"run={tmp_path / 'run'}")
    assert code == 2
    assert complaint in err


def test_no_command_and_unknown_commands_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys)[0] == 2
    assert call(capsys, "trian")[0] == 2
    assert call(capsys, "list", "colors")[0] == 2


@pytest.mark.dist
def test_a_port_in_use_is_a_usage_error(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        ended = jobs.train("learners=2", f"store_port={port}").end().expect(2)
    assert f"cannot listen on 127.0.0.1:{port}" in ended.err
    assert "choose another port" in ended.err


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return modification time and bytes of all files below a folder."""
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "resume=nowhere",
        "straggler=5:2 resume=auto",
        "record_order=true resume=auto",
        "strategy=nothing",
        "lr=-1",
        "device=abacus",
    ],
)
def test_a_refused_run_changes_nothing_on_disk(override: str, jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = jobs.task(trace="", samples=16), jobs.folder / "run"
    assert call(capsys, "train", file, f"run={run}")[0] == 0
    before = contents(run)
    for extra in ([], ["learners=2"], ["learners=2", "backend=threads"]):
        assert call(capsys, "train", file, f"run={run}", *override.split(), *extra)[0] == 2
        assert call(capsys, "train", file, f"run={jobs.folder / 'new'}", "lr=-1", *extra)[0] == 2
    assert contents(run) == before
    assert not (jobs.folder / "new").exists()


def test_a_run_directory_with_checkpoints_is_refused(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = jobs.task(trace="", samples=16), f"run={jobs.folder / 'run'}"
    assert call(capsys, "train", file, run)[0] == 0
    code, _, err = call(capsys, "train", file, run, "seed=1")
    assert code == 2
    assert "already contains checkpoints" in err
    assert "resume=auto" in err


def test_examples_and_recipes_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["task_options.samples=64", "task_options.held_out=16", "epochs=1", "learners=1", "batch=16"]
    assert call(capsys, "train", "frames", "--json", *options)[0] == 0
    assert (tmp_path / "runs" / "frames-adpsgd-1" / "config.toml").is_file()
    assert "did you mean 'frames'" in call(capsys, "train", "frame")[2]
    assert "did you mean 'spoken'" in call(capsys, "run", "spokn")[2]
    code, _, err = call(capsys, "run", "spoken", "--until", "nothing")
    assert code == 2
    assert "unknown stage 'nothing'" in err
    assert not (tmp_path / "runs" / "spoken").exists()


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
    code, out, _ = call(capsys, "train", file, run, "backend=threads", "learners=3", "strategy=sync", "epochs=2", "--json")
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
def test_a_slow_learner_gets_fewer_batches_and_none_twice(jobs: Jobs) -> None:
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
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE must be equal on all ranks (rank 0: 2, rank 1: 3)"),
        ({"override": "lr=0.3"}, "lr must be equal on all ranks"),
    ],
)
def test_ranks_with_different_settings_stop(differ: dict[str, str], complaint: str, jobs: Jobs) -> None:
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
