"""The loader: settings survive a round trip, later sources win, and errors name the section and the origin."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.config import (
    TrainConfig,
    apply,
    build,
    build_task,
    dumps,
    explain,
    load,
    read_toml,
    resolved_rows,
    split_items,
)
from roundelay.core.settings import help_of, satisfies, setting
from roundelay.errors import UsageError

DECLARED = {f.name: f for f in fields(TrainConfig)}
SECTIONS = ("task_options", "strategy_options")
BOUNDED = [name for name, f in DECLARED.items() if f.metadata["minimum"] is not None and name != "batch"]

# ------------------------------------------------------------------------------------------------------ round trip

words = st.text(max_size=12)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
scalars = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), words)
sections = st.dictionaries(names, st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=4)


def values(name: str) -> st.SearchStrategy[Any]:
    rules, kind = DECLARED[name].metadata, str(DECLARED[name].type)
    if rules["choices"]:
        return st.sampled_from(rules["choices"])
    if name in SECTIONS:
        return sections
    if name == "batch":
        return st.one_of(st.integers(1, 4096), st.sampled_from(["auto", "hostA:128,hostB:32"]), st.just((8, 16)))
    if kind == "bool":
        return st.booleans()
    if kind == "int":
        return st.integers(int(rules["minimum"] or 0), int(rules["maximum"] or 2**31))
    if kind == "float":
        return st.floats(rules["minimum"] or 0.0, rules["maximum"] or 1e9, allow_nan=False)
    return words


any_settings = st.builds(TrainConfig, **{name: values(name) for name in DECLARED})


@given(any_settings)
def test_written_settings_load_back_equal(tmp_path_factory: pytest.TempPathFactory, settings: TrainConfig) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(dumps(settings), encoding="utf-8")
    assert load(path).settings == settings


@given(any_settings)
def test_overrides_give_the_same_settings_as_a_file(settings: TrainConfig) -> None:
    chosen = [n for n in DECLARED if n not in SECTIONS and "\x7f" not in str(getattr(settings, n))]
    loaded = load(None, [f"{n}={json.dumps(getattr(settings, n), ensure_ascii=False)}" for n in chosen]).settings
    for name in chosen:
        assert getattr(loaded, name) == getattr(settings, name)


def test_no_file_gives_the_defaults() -> None:
    resolved = load(None)
    assert resolved.settings == TrainConfig()
    assert {row["from"] for row in resolved_rows(resolved).values()} == {"default"}


def test_every_setting_has_help_and_an_allowed_default() -> None:
    for name, declaration in DECLARED.items():
        assert help_of(declaration).endswith("."), name
        value = getattr(TrainConfig(), name)
        assert satisfies(declaration, value)
        assert not isinstance(value, float) or math.isfinite(value)


# --------------------------------------------------------------------------------------------------------- origins


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.toml"
    path.write_text('# a comment\nstrategy = "kstep"\n\nlr = 1\n[strategy_options]\nK = 4\nreject = 0.5\n')
    return path


def test_later_sources_win_and_each_key_has_an_origin(file: Path) -> None:
    resolved = load(file, ["lr=0.5", "strategy_options.K=9", "topology=ring"])
    assert resolved.settings.lr == 0.5
    assert resolved.settings.strategy_options == {"K": 9, "reject": 0.5}
    assert resolved.origin("strategy") == f"{file}:2"
    assert resolved.origin("strategy_options.K") == "command line"
    assert resolved.origin("strategy_options.reject") == f"{file}:7"
    assert resolved.origin("lr") == resolved.origin("topology") == "command line"
    assert resolved.origin("epochs") == "default"
    assert resolved.folder == file.parent
    assert load(file).origin("lr") == f"{file}:4"


def test_the_explanation_lists_every_setting_once(file: Path) -> None:
    lines = explain(load(file, ["lr=0.5"])).splitlines()
    keys = [line.split()[0] for line in lines]
    assert len(set(keys)) == len(keys)
    assert {key.partition(".")[0] for key in keys} == set(DECLARED)
    assert next(line for line in lines if line.startswith("lr ")).endswith("# command line")
    assert next(line for line in lines if line.startswith("strategy ")).endswith("some.toml:2")


def test_text_on_the_command_line_needs_no_quotes() -> None:
    items = ["strategy=hierarchical(adpsgd)", 'topology="ring"', "run=runs/a b", "deterministic_reduce=true", "batch=auto"]
    settings = load(None, items).settings
    assert settings.strategy == "hierarchical(adpsgd)"
    assert settings.topology == "ring"
    assert settings.run == "runs/a b"
    assert settings.deterministic_reduce is True
    assert settings.batch == "auto"
    assert load(None, ["batch=16"]).settings.batch == 16
    assert load(None, ["run=7"]).settings.run == "7"
    assert load(None, ["epochs=3"]).settings.epochs == 3.0
    assert load(None, ["seed=1e6"]).settings.seed == 1_000_000
    assert load(None, ["run=a=b"]).settings.run == "a=b"


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("strateggy=sync", "unknown key 'strateggy'", "did you mean 'strategy'?"),
        ("zzz=1", "unknown key 'zzz'", "choose one of: anneal_after_epochs"),
        ("backend=smh", "backend must be one of: auto, shm, torch, mpi, threads (got 'smh')", "did you mean 'shm'?"),
        ("schedule=cosinus", "schedule must be one of: constant, cosine, sqrt2_decay (got 'cosinus')", "'cosine'?"),
        ("optimizer=sdg", "optimizer must be one of: sgd, adam, adamw, ngsgd (got 'sdg')", "did you mean 'sgd'?"),
        ("progress=loud", "progress must be one of: auto, rich, plain, none (got 'loud')", "choose one of: auto"),
        ("learners=1.5", "learners must be an integer (got 1.5)", "for example learners=1"),
        ("learners=two", "learners must be an integer (got 'two')", "for example learners=1"),
        ("deterministic_reduce=1", "deterministic_reduce must be true or false (got 1)", "deterministic_reduce=false"),
        ("epochs=true", "epochs must be a number (got true)", "for example epochs=1.0"),
        ("lr=[1]", "lr must be a number (got [1])", "for example lr=0.1"),
        ("run={}", "run must be a string (got {})", ""),
        ("lr=-1", "lr must be >= 0 (got -1)", "give a number >= 0"),
        ("learners=0", "learners must be >= 1 (got 0)", ">= 1"),
        ("batch=0", "batch must be >= 1 (got 0)", ">= 1"),
        ("store_port=70000", "store_port must be >= 0 and <= 65535 (got 70000)", "<= 65535"),
        ("timeout_s=0.5", "timeout_s must be >= 1 (got 0.5)", ">= 1"),
        ("strategy_options=4", "strategy_options must be a section (got 4)", ""),
        ("lr", "'lr' is not of the form key=value", "strategy=kstep"),
        ("=1", "'=1' is not of the form key=value", "strategy=kstep"),
        ("optimizer.lr=1", "optimizer must be a string (got {'lr': 1})", ""),
    ],
)
def test_errors_on_the_command_line(override: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(None, [override])
    assert caught.value.message == message
    assert caught.value.where == "command line"
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_and_infinity_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError):
        load(None, [f"{name}={value}"])


def test_errors_in_a_file_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('strategy = "sync"\nlearning_rate = 0.1\n')
    with pytest.raises(UsageError) as caught:
        load(path)
    assert caught.value.where == f"{path}:2"
    path.write_text("lr = 0.1\n\nlearners = true\n")
    with pytest.raises(UsageError, match=r"learners must be an integer \(got true\)") as caught:
        load(path)
    assert caught.value.where == f"{path}:3"


def test_unreadable_files(tmp_path: Path) -> None:
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


# ------------------------------------------------------------------------------------------------- nested settings


@dataclass(frozen=True)
class Corpus:
    kind: str = setting("", help="Kind.")
    speeds: tuple[float, ...] = setting((), help="Speeds.")


@dataclass(frozen=True)
class Network:
    window: int = setting(21, minimum=1, help="Window.")
    layers: int | None = setting(None, minimum=1, help="Layers.")
    mode: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Graph:
    path: str = setting(help="Path.")


@dataclass(frozen=True)
class Pipeline:
    title: str = ""
    corpora: tuple[Corpus, ...] = setting((), key="corpus", help="Corpora.")
    network: Network = setting(factory=Network, help="Network.")
    snr: tuple[float, float] = (0.0, 20.0)
    train: dict[str, Any] = setting(factory=dict, schema=TrainConfig, reserved=("run",), help="Training.")
    graph: Graph | None = None


NESTED = """title = "x"
[[corpus]]
kind = "first"
[[corpus]]
kind = "second"
speeds = [1, 0.9]
[network]
window = 9
[train]
lr = 1
"""


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    path = tmp_path / "nested.toml"
    path.write_text(NESTED)
    return path


def test_sections_lists_and_partial_settings(nested: Path) -> None:
    resolved = load(nested, ["corpus.kind=changed", "corpus[1].speeds=[2]", "train.batch=8", "network.layers=3"], Pipeline)
    settings = resolved.settings
    assert settings.corpora == (Corpus("changed"), Corpus("second", (2.0,)))
    assert settings.network == Network(9, 3)
    assert settings.train == {"lr": 1.0, "batch": 8}
    rows = resolved_rows(resolved)
    assert rows["corpus.kind"] == {"value": "changed", "from": "command line"}
    assert rows["corpus[1].kind"] == {"value": "second", "from": f"{nested}:5"}
    assert rows["corpus[1].speeds"] == {"value": [2.0], "from": "command line"}
    assert rows["train.momentum"] == {"value": 0.9, "from": "default"}
    assert "train.run" not in rows
    nested.write_text(dumps(settings))
    assert load(nested, [], Pipeline).settings == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.windw=3", "unknown key 'windw' in [network]"),
        ("network.window=0", "[network] window must be >= 1 (got 0)"),
        ("network.layers=0", "[network] layers must be >= 1 (got 0)"),
        ("network.mode=c", "[network] mode must be one of: a, b (got 'c')"),
        ("network=3", "network must be a section (got 3)"),
        ("corpus[1].knd=3", "unknown key 'knd' in [corpus[1]]"),
        ("corpus[2].kind=x", "[[corpus]] has no element 2"),
        ("corpus=3", "corpus must be a list of sections (got 3)"),
        ("snr=[1]", "snr must be a list of 2 values (got [1])"),
        ("train.lr=-1", "[train] lr must be >= 0 (got -1)"),
        ("train.run=x", "'run' must not be set in [train]: it is derived"),
        ("graph={}", "missing key 'path' in [graph]"),
        ("title.x=1", "'title' is not a section"),
    ],
)
def test_messages_name_the_section(nested: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(nested, [override], Pipeline)
    assert caught.value.message == message


def test_items_are_divided_by_schema() -> None:
    own, rest = split_items(["window=3", "lr=1", "layers=2"], Network)
    assert (own, rest) == (["window=3", "layers=2"], ["lr=1"])


def test_a_tree_is_built_and_changed_like_a_file(nested: Path) -> None:
    tree, origins = read_toml(nested)
    apply(tree, origins, ["network.window=5"], Pipeline)
    assert build(Pipeline, tree, "here", origins).network.window == 5
    with pytest.raises(UsageError) as caught:
        build(Pipeline, {"network": {"window": -1}}, "here")
    assert caught.value.where == "here"


# ------------------------------------------------------------------------------------------------------------ tasks


def test_a_task_next_to_its_file_gets_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    (tmp_path / "task_next_to_a_file.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    size: int = 1\n    seed: int = 0\n"
    )
    path = tmp_path / "some.toml"
    path.write_text('task = "task_next_to_a_file:Mine"\nseed = 7\n[task_options]\nsize = 3\n')
    task = build_task(load(path))
    assert (task.size, task.seed) == (3, 7)
    assert build_task(load(path, ["task_options.seed=1"])).seed == 1
    with pytest.raises(UsageError, match=r"unknown key 'siez' in \[task_options\][\s\S]*did you mean 'size'"):
        build_task(load(path, ["task_options.siez=1"]))
    with pytest.raises(UsageError, match="cannot be loaded"):
        build_task(load(path, ["task=task_next_to_a_file:Yours"]))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("", "task must be set"),
        ("there.is.no.such:Task", "cannot be loaded"),
        ("json", "cannot be loaded"),
        (":Task", "cannot be loaded"),
    ],
)
def test_tasks_that_cannot_be_built(task: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_task(load(None, [f"task={json.dumps(task)}"]))
