"""Settings: what is loaded is what was said, and what cannot be is an error that says where it stands."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.config import CHOICES, MINIMUM, TABLES, TrainConfig, build_task, dumps, engine, explain, load
from roundelay.engine.config import EngineConfig
from roundelay.errors import UsageError

# ------------------------------------------------------------------------------------------------------ round trip

words = st.text(max_size=12)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
plain = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), words)
tables = st.dictionaries(names, st.one_of(plain, st.lists(plain, max_size=3)), max_size=4)


def values(name: str, kind: str) -> st.SearchStrategy[Any]:
    least = MINIMUM.get(name)
    if name in CHOICES:
        return st.sampled_from(CHOICES[name])
    if name in TABLES:
        return tables
    if name == "batch":
        return st.one_of(st.integers(1, 4096), st.sampled_from(["auto", "hostA:128,hostB:32"]))
    if kind == "bool":
        return st.booleans()
    if kind == "int":
        return st.integers(int(least or 0), 2**31)
    if kind == "float":
        return st.floats(least or 0.0, 1e9, allow_nan=False)
    return words


any_settings = st.builds(TrainConfig, **{f.name: values(f.name, str(f.type)) for f in fields(TrainConfig)})


@given(any_settings)
def test_settings_written_down_load_back(tmp_path_factory: pytest.TempPathFactory, settings: TrainConfig) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(dumps(settings), encoding="utf-8")
    assert load(path).settings == settings


@given(any_settings)
def test_overrides_say_the_same_as_a_file(settings: TrainConfig) -> None:
    overrides = [
        f"{f.name}={json.dumps(getattr(settings, f.name), ensure_ascii=False)}"
        for f in fields(TrainConfig)
        if f.name not in TABLES and "\x7f" not in str(getattr(settings, f.name))
    ]
    found = load(None, overrides).settings
    for f in fields(TrainConfig):
        if f.name not in TABLES and "\x7f" not in str(getattr(settings, f.name)):
            assert getattr(found, f.name) == getattr(settings, f.name)


def test_no_file_gives_the_defaults() -> None:
    resolved = load(None)
    assert resolved.settings == TrainConfig()
    assert set(resolved.origin.values()) == {"default"}


def test_the_engine_gets_its_part() -> None:
    settings = replace(TrainConfig(), strategy="kstep", strategy_options={"K": 3}, max_grad_norm=2.0, timeout_s=9.0)
    options = engine(settings)
    assert type(options) is EngineConfig
    assert options == EngineConfig(strategy="kstep", strategy_options={"K": 3}, max_grad_norm=2.0, timeout_s=9.0)


# --------------------------------------------------------------------------------------------------------- origins


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.toml"
    path.write_text('# a comment\nstrategy = "kstep"\n\nlr = 1\n[strategy_options]\nK = 4\nreject = 0.5\n')
    return path


def test_later_wins_and_every_setting_says_where_it_came_from(file: Path) -> None:
    resolved = load(file, ["lr=0.5", "strategy_options.K=9", "topology=ring"])
    assert resolved.settings.lr == 0.5
    assert resolved.settings.strategy_options == {"K": 9, "reject": 0.5}
    assert resolved.origin["strategy"] == "some.toml:2"
    assert resolved.origin["lr"] == "command line"
    assert resolved.origin["topology"] == "command line"
    assert resolved.origin["epochs"] == "default"
    assert resolved.folder == file.parent
    assert load(file).origin["lr"] == "some.toml:4"
    assert load(file).origin["strategy_options"] == "some.toml:5"


def test_the_explanation_names_every_setting_once(file: Path) -> None:
    lines = explain(load(file, ["lr=0.5"])).splitlines()
    assert [line.split()[0] for line in lines] == [f.name for f in fields(TrainConfig)]
    assert next(line for line in lines if line.startswith("lr ")).endswith("# command line")
    assert next(line for line in lines if line.startswith("strategy ")).endswith("# some.toml:2")


def test_text_on_the_command_line_needs_no_quotes() -> None:
    found = load(
        None, ["strategy=hierarchical(adpsgd)", 'topology="ring"', "run=runs/a b", "deterministic_reduce=true", "batch=auto"]
    )
    settings = found.settings
    assert settings.strategy == "hierarchical(adpsgd)"
    assert settings.topology == "ring"
    assert settings.run == "runs/a b"
    assert settings.deterministic_reduce is True
    assert settings.batch == "auto"
    assert load(None, ["batch=16"]).settings.batch == 16
    assert load(None, ["run=7"]).settings.run == "7"
    assert load(None, ["epochs=3"]).settings.epochs == 3.0
    assert load(None, ["run=a=b"]).settings.run == "a=b"


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("override", "what", "do"),
    [
        ("strateggy=sync", "there is no setting 'strateggy'", "did you mean 'strategy'?"),
        ("zzz=1", "there is no setting 'zzz'", "choose one of: anneal_after_epochs"),
        ("backend=smh", "backend cannot be 'smh'", "did you mean 'shm'?"),
        ("schedule=cosinus", "schedule cannot be 'cosinus'", "did you mean 'cosine'?"),
        ("optimizer=sdg", "optimizer cannot be 'sdg'", "did you mean 'sgd'?"),
        ("progress=loud", "progress cannot be 'loud'", "choose one of: auto"),
        ("learners=1.5", "learners is 1.5, but must be int", "for example learners=1"),
        ("learners=two", "learners is 'two', but must be int", "for example learners=1"),
        ("deterministic_reduce=1", "deterministic_reduce is 1, but must be bool", "for example deterministic_reduce=false"),
        ("epochs=true", "epochs is True, but must be float", "for example epochs=1.0"),
        ("lr=[1]", "lr is [1], but must be float", "for example lr=0.1"),
        ("run={}", "run is {}, but must be str", "for example run="),
        ("lr=-1", "lr is -1.0", "at least 0"),
        ("learners=0", "learners is 0", "at least 1"),
        ("keep_checkpoints=0", "keep_checkpoints is 0", "at least 1"),
        ("seed=-1", "seed is -1", "at least 0"),
        ("timeout_s=0.5", "timeout_s is 0.5", "at least 1"),
        ("strategy_options=4", "strategy_options must be a table", "strategy_options.name=value"),
        ("lr", "'lr' is not key=value", "strategy=kstep"),
        ("=1", "'=1' is not key=value", "strategy=kstep"),
        ("optimizer.lr=1", "there is no setting 'optimizer.lr'", ""),
    ],
)
def test_mistakes_on_the_command_line(override: str, what: str, do: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(None, [override])
    assert caught.value.message == what
    assert caught.value.where == "command line"
    assert do in caught.value.hint


@pytest.mark.parametrize("name", sorted(MINIMUM))
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError):
        load(None, [f"{name}={value}"])


def test_mistakes_in_a_file_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('strategy = "sync"\nlearning_rate = 0.1\n')
    with pytest.raises(UsageError) as caught:
        load(path)
    assert "wrong.toml" in caught.value.where
    assert "2" in caught.value.where
    path.write_text("lr = 0.1\n\nlearners = true\n")
    with pytest.raises(UsageError, match="learners is True, but must be int") as caught:
        load(path)
    assert "3" in caught.value.where


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)
    path = tmp_path / "wrong.toml"
    path.write_text("strategy = sync\n")
    with pytest.raises(UsageError, match="is not valid TOML") as caught:
        load(path)
    assert "quotes" in caught.value.hint
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"wrong\.toml"):
        load(path)


# ------------------------------------------------------------------------------------------------------------ tasks


def test_a_task_is_found_beside_its_file_and_gets_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    (tmp_path / "task_beside_a_file.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    size: int = 1\n    seed: int = 0\n"
    )
    path = tmp_path / "some.toml"
    path.write_text('task = "task_beside_a_file:Mine"\nseed = 7\n[task_options]\nsize = 3\n')
    task = build_task(load(path))
    assert (task.size, task.seed) == (3, 7)
    assert build_task(load(path, ["task_options.seed=1"])).seed == 1
    with pytest.raises(UsageError, match=r"has no setting 'siez'[\s\S]*did you mean 'size'"):
        build_task(load(path, ["task_options.siez=1"]))
    with pytest.raises(UsageError, match="cannot be loaded"):
        build_task(load(path, ["task=task_beside_a_file:Yours"]))


@pytest.mark.parametrize(
    ("task", "what"),
    [
        ("", "no task is named"),
        ("there.is.no.such:Task", "cannot be loaded"),
        ("json", "cannot be loaded"),
        (":Task", "cannot be loaded"),
    ],
)
def test_tasks_that_cannot_be_built(task: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        build_task(load(None, [f"task={json.dumps(task)}"]))


def test_the_defaults_are_allowed_values() -> None:
    for f in fields(TrainConfig):
        value = getattr(TrainConfig(), f.name)
        if f.name in MINIMUM:
            assert value >= MINIMUM[f.name]
            assert math.isfinite(value)
        if f.name in CHOICES:
            assert value in CHOICES[f.name]
