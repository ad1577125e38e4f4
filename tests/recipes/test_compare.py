"""Comparison of runs: groups of equal settings, pairs of equal seeds, confidence intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from events import steps, whole, write_recipe, write_run

from roundelay.cli import main
from roundelay.errors import UsageError
from roundelay.recipes.compare import compare, over_seeds
from roundelay.recipes.hypotheses import report, word_errors


def settings(strategy: str, seed: int, more: str = "") -> str:
    return f'strategy = "{strategy}"\nseed = {seed}\nrun = "somewhere/{strategy}-{seed}"\n{more}'


def runs(folder: Path, losses: dict[str, list[float]]) -> list[Path]:
    paths = []
    for strategy, values in losses.items():
        for seed, loss in enumerate(values):
            events = whole(2, 4 if strategy == "adpsgd" else 8)
            events[-2]["metrics"] = {"loss": loss}
            paths.append(write_run(folder / f"{strategy}-{seed}", events, settings=settings(strategy, seed)))
    return paths


def test_runs_are_grouped_by_settings_and_paired_by_seed(tmp_path: Path) -> None:
    result = compare(runs(tmp_path, {"sync": [0.5, 0.6, 0.7], "adpsgd": [0.51, 0.63, 0.72]}))
    assert [(g["name"], g["seeds"]) for g in result["groups"]] == [("sync", [0, 1, 2]), ("adpsgd", [0, 1, 2])]
    loss = next(p for p in result["paired"] if p["metric"] == "loss")
    # differences 0.01, 0.03, 0.02: mean 0.02, standard deviation 0.01; Student's t with 2 degrees of freedom is 4.303
    assert loss["difference"] == pytest.approx(0.02)
    assert loss["high"] - loss["difference"] == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    seconds = next(p for p in result["paired"] if p["metric"] == "seconds")
    assert (seconds["difference"], seconds["ratio"], seconds["count"]) == (pytest.approx(-4.0), pytest.approx(0.5), 3)


def test_only_common_seeds_are_paired_and_one_pair_has_no_interval(tmp_path: Path) -> None:
    result = compare(runs(tmp_path, {"sync": [0.5, 9.0], "adpsgd": [0.4]}))
    loss = next(p for p in result["paired"] if p["metric"] == "loss")
    assert (loss["difference"], loss["low"], loss["count"]) == (pytest.approx(-0.1), None, 1)


def test_other_settings_form_groups(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"r{seed}-{k}", whole(2), settings=settings("kstep", seed, f"[strategy_options]\nK = {k}\n"))
        for seed in (0, 1)
        for k in (4, 16)
    ]
    names = [g["name"] for g in compare(paths)["groups"]]
    assert names == ["kstep strategy_options.K=4", "kstep strategy_options.K=16"]


def test_an_unfinished_run_is_listed_and_not_counted(tmp_path: Path) -> None:
    paths = runs(tmp_path, {"sync": [0.5], "adpsgd": [0.4]})
    paths.append(write_run(tmp_path / "adpsgd-1", [steps(0, 1.0, 0), steps(1, 1.0, 0)], settings=settings("adpsgd", 1)))
    result = compare(paths)
    assert result["groups"][1]["unfinished"] == [str(tmp_path / "adpsgd-1")]
    assert all(p["seeds"] == 1 for p in result["paired"])


def test_runs_of_one_group_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must differ in at least one setting"):
        compare(runs(tmp_path, {"sync": [0.5, 0.6]}))


def test_word_errors_are_paired_over_speakers(tmp_path: Path) -> None:
    a = write_recipe(tmp_path / "a", whole(2), errors=2, settings=settings("sync", 0))
    b = write_recipe(tmp_path / "b", whole(2), errors=5, settings=settings("adpsgd", 0))
    result = compare([a, b])
    words = next(p for p in result["paired"] if p["metric"] == "wer test")
    assert (words["over"], words["count"]) == ("speakers", 4)
    assert words["difference"] == pytest.approx(100 * 3 / 40)
    assert words["low"] <= words["difference"] <= words["high"]


def test_report_of_two_recipes_shows_their_difference(tmp_path: Path) -> None:
    a, b = (write_recipe(tmp_path / name, whole(2), errors=n) for name, n in (("a", 2), ("b", 5)))
    page, views = report([a, b], tmp_path / "both.html")
    (pair,) = views[1].words.paired
    assert (pair["from"], pair["to"], pair["difference"]) == ("a", "b", pytest.approx(7.5))
    assert "b minus a · test" in page.read_text()
    assert "+7.50" in page.read_text()


def test_network_of_a_benchmark_is_scored_with_the_recipe_transcripts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r", whole(2), errors=2)
    sub_run = recipe / "strategies" / "sync-2-0"
    write_run(sub_run / "network", whole(2), settings=settings("sync", 0))
    (sub_run / "hypotheses").mkdir()
    (sub_run / "hypotheses" / "test.txt").write_text(
        (recipe / "decode" / "lstm" / "test.txt").read_text().replace("yeast", "yes")
    )
    words = word_errors(sub_run)
    assert words is not None
    assert [row["wer"] for row in words.systems] == [0.0]
    own = word_errors(recipe / "network")
    assert own is not None
    assert [row["wer"] for row in own.systems] == [5.0]
    assert own.confusions == [{"name": "lstm", "set": "test", "ref": "yes", "hyp": "yeast", "count": 2}]


def test_the_command_prints_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(p) for p in runs(tmp_path, {"sync": [0.5, 0.6], "adpsgd": [0.4, 0.5]})]
    assert main.main(["compare", *paths]) == 0
    assert "adpsgd minus sync  loss" in capsys.readouterr().out
    assert main.main(["compare", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paired"]
    assert main.main(["compare", str(tmp_path / "nothing"), *paths]) == 2


def test_many_seeds_use_the_normal_interval() -> None:
    interval = over_seeds([float(n % 2) for n in range(40)])
    assert interval["difference"] == 0.5
    assert interval["high"] - 0.5 == pytest.approx(1.96 * 0.5064 / 40**0.5, rel=1e-3)
