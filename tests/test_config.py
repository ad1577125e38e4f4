"""Settings: files and key=value, where each value came from, and an error that helps for every mistake."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.config import CHOICES, TABLES, Settings, build_task, dumps, engine, explain, load
from roundelay.errors import UsageError

EXAMPLES = Path(__file__).parents[1] / "examples"


def file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_all_defaults() -> None:
    resolved = load(None)
    assert resolved.settings == Settings()
    assert set(resolved.origin.values()) == {"default"}


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = file(tmp_path, '# a run\nlr = 0.5\nepochs = 3\nstrategy = "kstep"\n\n[strategy_options]\nK = 4\n')
    resolved = load(path, ["lr=0.25", "strategy_options.K=8", "task_options.hidden=32"])
    settings = resolved.settings
    assert (settings.lr, settings.epochs, settings.strategy) == (0.25, 3.0, "kstep")
    assert settings.strategy_options == {"K": 8}
    assert settings.task_options == {"hidden": 32}
    assert resolved.origin["lr"] == "command line"
    assert resolved.origin["epochs"] == "run.toml:3"
    assert resolved.origin["momentum"] == "default"


def test_a_table_on_the_command_line_adds_to_the_files(tmp_path: Path) -> None:
    path = file(tmp_path, "[strategy_options]\nK = 4\nadaptive = true\n")
    assert load(path, ["strategy_options.K=8"]).settings.strategy_options == {"K": 8, "adaptive": True}


@pytest.mark.parametrize(
    ("given_as", "key", "value"),
    [
        ("epochs=2", "epochs", 2.0),
        ("exact=true", "exact", True),
        ("strategy=hierarchical(adpsgd)", "strategy", "hierarchical(adpsgd)"),
        ("task=my.module:Mine", "task", "my.module:Mine"),
        ("batch=32", "batch", 32),
        ("batch=auto", "batch", "auto"),
        ("batch=hostA:128,hostB:32", "batch", "hostA:128,hostB:32"),
        ('slow="1:2.0"', "slow", "1:2.0"),
        ("slow=1:2.0,3:1.5", "slow", "1:2.0,3:1.5"),
        ("run=runs/a=b", "run", "runs/a=b"),
    ],
)
def test_values_are_toml_or_bare_text(given_as: str, key: str, value: Any) -> None:
    found = getattr(load(None, [given_as]).settings, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("item", "what", "do"),
    [
        ("strateg=kstep", "there is no setting 'strateg'", "did you mean 'strategy'?"),
        ("zzz=1", "there is no setting 'zzz'", "choose one of: anneal_after_epochs, batch"),
        ("lr", "'lr' is not key=value", "strategy=kstep"),
        ("=3", "'=3' is not key=value", "strategy=kstep"),
        ("epochs=many", "epochs is 'many', but must be float", "for example epochs=1.0"),
        ("learners=1.5", "learners is 1.5, but must be int", "for example learners=1"),
        ("learners=true", "learners is True, but must be int", "for example learners=1"),
        ("exact=1", "exact is 1, but must be bool", "for example exact=false"),
        ("batch=[1, 2]", "batch is [1, 2], but must be int or str", "for example batch=64"),
        ("wire=smh", "wire cannot be 'smh'", "did you mean 'shm'?"),
        ("schedule=cosin", "schedule cannot be 'cosin'", "did you mean 'cosine'?"),
        ("optimizer=lbfgs", "optimizer cannot be 'lbfgs'", "choose one of: adam, adamw, sgd"),
        ("progress=rihc", "progress cannot be 'rihc'", "did you mean 'rich'?"),
        ("epochs=-1", "epochs is -1.0", "give a number of at least 0"),
        ("epochs=nan", "epochs is nan", "give a number of at least 0"),
        ("lr=inf", "lr is inf", "give a number of at least 0"),
        ("learners=0", "learners is 0", "give a number of at least 1"),
        ("keep=0", "keep is 0", "give a number of at least 1"),
        ("task_options=3", "task_options must be a table", "task_options.name=value"),
    ],
)
def test_a_mistake_on_the_command_line_says_what_and_what_to_do(item: str, what: str, do: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(None, [item])
    assert what in caught.value.what
    assert caught.value.where == "command line"
    assert do in caught.value.do
    assert caught.value.exit_code == 2


def test_a_mistake_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    path = file(tmp_path, "lr = 0.1\nepoch = 3\n")
    with pytest.raises(UsageError, match="there is no setting 'epoch'") as caught:
        load(path)
    assert caught.value.where == f"{path}:2"
    assert caught.value.do == "did you mean 'epochs'?"


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not valid TOML") as caught:
        load(file(tmp_path, "strategy = kstep\n"))
    assert "quotes" in caught.value.do


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent\.toml: No such file") as caught:
        load(tmp_path / "absent.toml")
    assert "TOML" in caught.value.do


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="it is not text in UTF-8"):
        load(path)


# ------------------------------------------------------------------------------------------------ there and back

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.floats(min_value=1, max_value=1e9, allow_nan=False)
KEY = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
VALUE = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False), TEXT, st.lists(st.integers(0, 9)))
OPTIONS = st.dictionaries(KEY, VALUE, max_size=4)
KIND = {
    "int": st.integers(1, 10**9),
    "float": NUMBER,
    "bool": st.booleans(),
    "str": TEXT,
    "int | str": st.integers(1, 999) | TEXT,
}
SETTINGS = st.builds(
    Settings,
    **{
        f.name: st.sampled_from(CHOICES[f.name]) if f.name in CHOICES else OPTIONS if f.name in TABLES else KIND[str(f.type)]
        for f in fields(Settings)
    },
)


@given(SETTINGS)
def test_what_is_written_loads_back_equal(settings: Settings) -> None:
    with TemporaryDirectory() as folder:
        assert load(file(Path(folder), dumps(settings))).settings == settings


def test_defaults_load_back_equal(tmp_path: Path) -> None:
    assert load(file(tmp_path, dumps(Settings()))).settings == Settings()


def test_explain_gives_each_setting_a_line_with_its_origin() -> None:
    lines = explain(load(None, ["lr=0.25"])).splitlines()
    assert [line.split()[0] for line in lines] == [f.name for f in fields(Settings)]
    assert len({line.index(" = ") for line in lines}) == 1
    (rate,) = (line for line in lines if line.startswith("lr "))
    assert rate.split() == ["lr", "=", "0.25", "#", "command", "line"]


def test_the_engine_takes_its_part() -> None:
    assert engine(replace(Settings(), topology="complete", clip=2.0)).clip == 2.0


# ------------------------------------------------------------------------------------------------ the task


def test_a_task_takes_its_options_and_the_seed_of_the_run() -> None:
    named = ["task=roundelay.bench.tasks:Frames", "task_options.hidden=8", "seed=5"]
    task = build_task(load(None, named))
    assert (task.hidden, task.seed) == (8, 5)
    assert build_task(load(None, [*named, "task_options.seed=7"])).seed == 7


def test_a_task_is_found_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "task_beside_the_file.py").write_text("class Mine:\n    samples = 3\n")
    path = file(tmp_path, 'task = "task_beside_the_file:Mine"\n')
    assert build_task(load(path)).samples == 3


@pytest.mark.parametrize(
    ("items", "what", "do"),
    [
        ([], "no task is named", 'task = "importable.module:Class"'),
        (["task=no.such.module:Task"], "task 'no.such.module:Task' cannot be loaded", "importable.module:Class"),
        (
            ["task=roundelay.bench.tasks:Frame"],
            "task 'roundelay.bench.tasks:Frame' cannot be loaded",
            "importable.module:Class",
        ),
        (
            ["task=roundelay.bench.tasks:Frames", "task_options.hiden=8"],
            "task 'roundelay.bench.tasks:Frames' has no setting 'hiden'",
            "did you mean 'hidden'?",
        ),
        (["task=builtins:object", "task_options.a=1"], "does not take these settings", "see the class"),
    ],
)
def test_a_task_that_cannot_be_built(items: list[str], what: str, do: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_task(load(None, items))
    assert what in caught.value.what
    assert do in caught.value.do


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.name)
def test_the_examples_load_and_their_tasks_build(path: Path) -> None:
    assert build_task(load(path)).samples > 0
