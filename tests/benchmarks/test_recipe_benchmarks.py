"""Benchmarks on the run of a recipe: errors if there is no such run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from paths import ROOT

from roundelay.cli import main
from roundelay.errors import UsageError
from roundelay.recipes.config import NetworkConfig, settings_hash

RECIPE = str(ROOT / "src" / "roundelay" / "recipes" / "spoken")


@pytest.mark.parametrize("bench", [["speech", RECIPE], ["averaging", RECIPE], ["feeding", RECIPE], ["speech_speed"]])
def test_a_missing_run_directory_is_an_error(bench: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--systems", "overlap"] if bench[0] == "averaging" else []
    with pytest.raises(UsageError, match="run directory") as error:
        importlib.import_module(f"benchmarks.{bench[0]}").main([*bench[1:], "missing", *options])
    assert "missing" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_hash_of_settings_depends_on_every_setting() -> None:
    same = settings_hash({"lr": 1.0, "batch": 8}, NetworkConfig(hidden=16))
    assert same == settings_hash({"batch": 8, "lr": 1.0}, NetworkConfig(hidden=16))
    assert same != settings_hash({"batch": 8, "lr": 1.0}, NetworkConfig(hidden=17))
    assert same != settings_hash({"batch": 8, "lr": 2.0}, NetworkConfig(hidden=16))


def test_a_missing_pretrained_network_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["run", RECIPE, "run=mine", "network.init_from=nowhere"]) == 2
    message = capsys.readouterr().err
    assert "init_from must be a recipe, a run or a model folder (got 'nowhere')" in message
    assert "network.init_from" in message
    assert not list(tmp_path.iterdir())
