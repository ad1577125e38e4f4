"""Benchmarks that begin from a recipe's run say so where there is none, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT

from roundelay.cli import main
from roundelay.recipes.config import NetworkConfig, settings_hash

RECIPE = str(ROOT / "src" / "roundelay" / "recipes" / "spoken")


@pytest.mark.parametrize("bench", [["speech", RECIPE], ["averaging", RECIPE], ["feeding", RECIPE], ["road"]])
def test_a_run_that_is_not_there_is_an_error_in_words(
    bench: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--systems", "overlap"] if bench[0] == "averaging" else []
    assert main.main(["bench", *bench, "missing", *more]) == 2
    said = capsys.readouterr().err
    assert "there is no such run directory" in said
    assert "where: missing" in said
    assert "what to do:" in said
    assert not list(tmp_path.iterdir())


def test_folders_of_results_differ_where_settings_do() -> None:
    same = settings_hash({"lr": 1.0, "batch": 8}, NetworkConfig(hidden=16))
    assert same == settings_hash({"batch": 8, "lr": 1.0}, NetworkConfig(hidden=16))
    assert same != settings_hash({"batch": 8, "lr": 1.0}, NetworkConfig(hidden=17))
    assert same != settings_hash({"batch": 8, "lr": 2.0}, NetworkConfig(hidden=16))


def test_a_network_to_start_from_that_is_not_there_is_noticed_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["run", RECIPE, "run=mine", "network.init_from=nowhere"]) == 2
    said = capsys.readouterr().err
    assert "there is no recipe, run or model 'nowhere' to start from" in said
    assert "network.init_from" in said
    assert not list(tmp_path.iterdir())
