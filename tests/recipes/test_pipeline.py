"""A whole recipe in miniature, on real recordings: every stage, doing nothing twice, decoding, exporting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from command import Jobs
from paths import DATA, ROOT
from safetensors.numpy import load_file

from roundelay import config
from roundelay.cli import main
from roundelay.errors import UsageError
from roundelay.recipes import config as recipe_config
from roundelay.recipes.pipeline import STAGES, planned
from roundelay.speech.corpora.kaldi_dir import read_data_dir, write_data_dir
from roundelay.speech.corpora.utterance import Utterance
from roundelay.speech.features.kaldi_ark import read_matrices

DIGITS = DATA / "fsdd"
RECIPES = ROOT / "src" / "roundelay" / "recipes"
needs_digits = pytest.mark.skipif(not DIGITS.is_dir(), reason="the recordings of fsdd are not here (ROUNDELAY_DATA)")

RECIPE = """
realign_passes = 1
[[source]]
kind = "kaldi"
root = "{root}"
[language]
lexicon = "lexicon.txt"
isolated_words = true
[mono]
passes = 10
gaussians = 2
[tri]
leaves = 60
passes = 6
gaussians = 2
[network]
model = "tiny"
hidden = 32
context = 5
[train]
strategy = "adpsgd"
learners = 2
batch = 8
epochs = 6.0
lr = 0.3
max_grad_norm = 1.0
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Jobs, Path]:
    """The recipe, run once with the command."""
    folder = tmp_path_factory.mktemp("recipe")
    for part, takes in (("train", 8), ("test", 2)):
        corpus = read_data_dir(DIGITS / part, root=DIGITS)
        kept: dict[tuple[str, tuple[str, ...]], list] = {}
        for u in corpus.utterances:
            kept.setdefault((u.speaker, u.words), []).append(u)
        chosen = [u for key, found in kept.items() if key[0] in ("jackson", "theo") for u in found[:takes]]
        write_data_dir(folder / "data" / part, chosen)
    recipe = folder / "mini"
    recipe.mkdir()
    (recipe / "recipe.toml").write_text(RECIPE.format(root=folder / "data"))
    (recipe / "lexicon.txt").write_text((RECIPES / "digits" / "lexicon.txt").read_text())
    jobs = Jobs(folder)
    with jobs:
        ended = jobs.run("run", str(recipe), f"run={folder / 'run'}", "--json", timeout_s=200).expect(0)
    result = json.loads(ended.out)
    assert result == json.loads((folder / "run" / "result.json").read_text())
    return jobs, folder


@needs_digits
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_recipe_goes_from_recordings_to_word_error_rates(done: tuple[Jobs, Path]) -> None:
    _, folder = done
    result = json.loads((folder / "run" / "result.json").read_text())
    assert [(r["name"], r["set"]) for r in result["systems"]] == [("mono", "test"), ("tri", "test"), ("lstm", "test")]
    for r in result["systems"]:
        assert 0 <= r["low"] <= r["wer"] <= r["high"]
        assert (r["language"], r["speakers"]) == (40, 2)
        assert r["wer"] < 40, "ten digits by known speakers: guessing gives 90"
        assert r["line"].startswith("%WER ")
    words = result["language_model"]
    assert (words["order"], words["language"], words["sentences"], words["unknown"]) == (2, 10, 10, {"test": 0.0})
    first, second = (read_about_training(folder / "run" / name) for name in ("network", "network-2"))
    assert (first, second) == ("alignments", "alignments-2"), "the second network learns from the first one's states"


def read_about_training(network: Path) -> str:
    """Which alignments a network was trained on."""
    return Path(config.load(network / "task.toml").settings.task_options["alignments"]).parent.name


@needs_digits
@pytest.mark.timeout(240)
def test_the_speed_of_every_stage_is_measured(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = done
    assert main.main(["bench", "road", str(folder / "run"), "--repeats", "1", "--utterances", "10", "--json"]) == 0
    found = {(r["stage"], r["system"]): r for r in json.loads(capsys.readouterr().out)["results"]}
    stages = [("features", ""), ("align", "mono"), ("align", "tri"), ("decode", "mono"), ("decode", "tri"), ("decode", "lstm")]
    assert [key for key in found if key[0] != "synthesis"] == stages
    assert all(r["rate"] > 0 for r in found.values())


@needs_digits
@pytest.mark.timeout(240)
def test_what_is_done_is_not_done_again(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = done
    before = (folder / "run" / "lstm" / "model.safetensors").stat().st_mtime_ns
    assert main.main(["run", str(folder / "mini"), f"run={folder / 'run'}"]) == 0
    told = capsys.readouterr()
    skipped = [line for line in told.err.splitlines() if "done before" in line]
    assert skipped == [f"{stage.name}: done before" for stage in STAGES if stage.name != "sat"]
    assert "lstm" in told.out
    assert (folder / "run" / "lstm" / "model.safetensors").stat().st_mtime_ns == before


@needs_digits
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_network_begins_from_that_of_another_recipe_which_is_run_first(
    done: tuple[Jobs, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    _, folder = done
    runs, second = folder / "runs", folder / "second"
    shutil.copytree(folder / "run", runs / "mini", dirs_exist_ok=True)
    second.mkdir(exist_ok=True)
    text = (folder / "mini" / "recipe.toml").read_text().replace("[network]", '[network]\nstart_from = "../mini"')
    (second / "recipe.toml").write_text(text.replace("realign_passes = 1", "").replace("epochs = 6.0", "epochs = 0.2"))
    shutil.copy(folder / "mini" / "lexicon.txt", second)
    command = ["run", str(second), f"run={runs / 'second'}", "--until", "network"]
    assert main.main(command) == 0
    told = capfd.readouterr().err.splitlines()
    begun = next(n for n, line in enumerate(told) if "it begins from the network of mini" in line)
    assert told[begun + 1 : begun + 7] == [f"{stage.name}: done before" for stage in STAGES if stage.name != "sat"][:6]
    started = config.load(runs / "second" / "network" / "task.toml").settings.task_options["init_from"]
    assert Path(started) == runs / "mini" / "lstm"
    before, after = (load_file(runs / name / "lstm" / "model.safetensors") for name in ("mini", "second"))
    moved = [np.abs(before[name] - after[name]).max() for name in before if not name.startswith("outputs.")]
    assert 0 < max(moved) < 0.2, "a fifth of an epoch does not go far"

    assert main.main(command) == 0
    assert "network: done before" in capfd.readouterr().err
    assert main.main(["run", str(second), f"run={folder / 'elsewhere'}", "--until", "network"]) == 2
    assert "would stand in a recipe's own folder" in capfd.readouterr().err
    (folder / "mini" / "recipe.toml").write_text((folder / "mini" / "recipe.toml").read_text() + "momentum = 0.1\n")
    recipe = recipe_config.load(second)
    marked = json.loads((runs / "second" / "stages" / "network.json").read_text())["fingerprint"]
    assert prints_of(recipe)["network"] != marked, "another beginning is another network"
    assert prints_of(recipe)["align"] == json.loads((runs / "second" / "stages" / "align.json").read_text())["fingerprint"]
    (folder / "mini" / "recipe.toml").write_text(RECIPE.format(root=folder / "data"))


@needs_digits
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_systems_adapted_to_speakers_go_the_whole_road(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    jobs, folder = done
    adapted, run = folder / "adapted", folder / "run-adapted"
    shutil.copytree(folder / "run", run, dirs_exist_ok=True)  # up to its alignments there is nothing to do again
    adapted.mkdir(exist_ok=True)
    text = (
        (folder / "mini" / "recipe.toml")
        .read_text()
        .replace("realign_passes = 1", 'realign_passes = 1\nsystems = ["tri", "sat", "lstm"]')
    )
    text = text.replace("[network]", "[sat]\npasses = 4\n[network]\nadapted = true").replace("epochs = 6.0", "epochs = 4.0")
    (adapted / "recipe.toml").write_text(text)
    shutil.copy(folder / "mini" / "lexicon.txt", adapted)
    ended = jobs.run("run", str(adapted), f"run={run}", "--json", timeout_s=200).expect(0)
    result = {r["name"]: r for r in json.loads(ended.out)["systems"]}
    assert list(result) == ["tri", "sat", "lstm"]
    assert max(r["wer"] for r in result.values()) < 40
    shape = json.loads((run / "lstm" / "model.json").read_text())
    assert (shape["adapted"], shape["shape"]["inputs"]) == (True, 160), "forty adapted values beside 120"
    data = str(folder / "data" / "test")
    for system in ("sat", "lstm"):  # from recordings alone, both passes
        assert main.main(["decode", str(run), "--data", data, "--system", system, "--jobs", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["wer"] == result[system]["wer"]
        out = str(folder / f"adapted-{system}")
        assert main.main(["align", str(run), "--data", data, "--out", out, "--system", system, "--jobs", "1"]) == 0
        assert "40 utterances aligned" in capsys.readouterr().out
    out = folder / "exported-adapted"
    assert main.main(["export", str(run), str(out), "--posteriors", data, "--jobs", "1"]) == 0
    assert len(read_matrices(out / "post.scp")) == 40
    capsys.readouterr()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["network.adapted=true"], "nothing adapts them"),
        (['systems=["sat","tri"]'], "sat adapts to what tri has recognised"),
        (["sat.prior_frames=0"], "prior_frames must be > 0"),
        (['systems=["tri","sat","lstm"]', "network.adapted=true", "network.vtlp=0.1"], "do not fit adapted features"),
    ],
)
def test_settings_of_adaptation_that_contradict_each_other_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        recipe_config.load(RECIPES / "librispeech", overrides)


def prints_of(recipe: recipe_config.Recipe) -> dict[str, str]:
    return {stage.name: its_print for stage, its_print in planned(recipe, STAGES)}


def test_recipes_that_begin_from_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        text = f'[[source]]\nkind = "fsdd"\n[network]\nstart_from = "../{other}"\n'
        (tmp_path / name / "recipe.toml").write_text(text)
    assert main.main(["run", str(tmp_path / "a"), f"run={tmp_path / 'run'}"]) == 2
    assert "begins from another one itself" in capsys.readouterr().err


@needs_digits
@pytest.mark.timeout(240)
def test_a_run_directory_is_all_that_decoding_needs(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = done
    run, data = str(folder / "run"), str(folder / "data" / "test")
    hypotheses = folder / "hyp.txt"
    assert main.main(["decode", run, "--data", data, "--jobs", "1", "--out", str(hypotheses), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    known = json.loads((folder / "run" / "result.json").read_text())["systems"][2]
    assert told["wer"] == known["wer"]
    assert main.main(["score", f"{data}/text", str(hypotheses), "--utt2spk", f"{data}/utt2spk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wer"] == known["wer"]

    other = folder / "other.txt"
    other.write_text((folder / "mini" / "lexicon.txt").read_text().replace("NINE N AY N", "NINE N IY N"))
    assert main.main(["decode", run, "--data", data, "--lexicon", str(other)]) == 3
    assert "lexicon" in capsys.readouterr().err
    assert main.main(["decode", str(folder / "nowhere"), "--data", data]) == 3
    assert "no such run directory" in capsys.readouterr().err


@needs_digits
@pytest.mark.timeout(240)
def test_alignments_and_exports(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = done
    run, data = str(folder / "run"), str(folder / "data" / "test")
    for system in ("tri", "lstm"):
        out = folder / f"aligned-{system}"
        assert main.main(["align", run, "--data", data, "--out", str(out), "--system", system, "--jobs", "1"]) == 0
        assert len((out / "words.ctm").read_text().splitlines()) >= 36
    out = folder / "exported"
    assert main.main(["export", run, str(out), "--posteriors", data, "--jobs", "1"]) == 0
    assert "word error rate, test" in (out / "README.md").read_text()
    posteriors = read_matrices(out / "post.scp")
    assert len(posteriors) == 40
    first = posteriors[next(iter(posteriors))]
    np.testing.assert_allclose(np.exp(first).sum(1), 1.0, atol=1e-4)
    capsys.readouterr()


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", [p.parent.name for p in sorted(RECIPES.glob("*/recipe.toml"))])
def test_every_recipe_can_be_read(name: str) -> None:
    recipe = recipe_config.load(RECIPES / name)
    assert recipe.title
    assert recipe.train["epochs"] > 0


def test_a_change_of_settings_reaches_the_stages_behind_it_and_no_other() -> None:
    def changed(*overrides: str) -> list[str]:
        plain, other = (prints_of(recipe_config.load(RECIPES / "spoken", list(over))) for over in ((), overrides))
        return [name for name in other if other[name] != plain.get(name)]

    names = list(prints_of(recipe_config.load(RECIPES / "spoken")))
    assert changed() == []
    assert changed("tri.leaves=77") == names[names.index("tri") :]
    beside = 'systems=["mono","tri","sat","lstm"]'
    assert changed(beside) == ["sat", "decode", "score"], "speakers are adapted to beside the network"
    assert changed(beside, "network.adapted=true") == ["sat", *names[names.index("network") :]]


def test_copies_at_other_speeds_do_not_say_their_sentences_again_to_the_language_model(tmp_path: Path) -> None:
    for part, names in (("train", "abc"), ("dev", "d"), ("test", "e")):
        utterances = []
        for name in names:
            soundfile.write(tmp_path / f"{name}.wav", np.full(4000, 0.1), 8000)
            utterances.append(
                Utterance(name, f"of-{name}", ("ONE", "TWO") if name == "a" else ("TWO",), tmp_path / f"{name}.wav")
            )
        write_data_dir(tmp_path / "data" / part, utterances)
    (tmp_path / "lexicon.txt").write_text("ONE W AH N\nTWO T UW\n")
    (tmp_path / "recipe.toml").write_text(
        f'speeds = [0.9, 1.1]\n[[source]]\nkind = "kaldi"\nroot = "{tmp_path / "data"}"\n'
        '[words]\nlexicon = "lexicon.txt"\ntext = "train"\n'
    )
    run = tmp_path / "run"
    assert main.main(["run", str(tmp_path), f"run={run}", "--until", "data", "--jobs", "1"]) == 0
    assert len(read_data_dir(run / "data" / "train").utterances) == 9
    assert (run / "data" / "lm.txt").read_text().splitlines() == ["ONE TWO", "TWO", "TWO"]


def test_mistakes_in_a_recipe_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.toml"

    def told(text: str, *overrides: str) -> str:
        file.write_text(text)
        assert main.main(["run", str(tmp_path), f"run={tmp_path / 'run'}", *overrides]) in (2, 3)
        return capsys.readouterr().err

    assert "names no corpus" in told('title = "x"')
    assert "did you mean 'features'" in told("[feature]\nrate = 8000")
    assert "did you mean 'leaves'" in told('[[source]]\nkind = "fsdd"\n[tri]\nleavs = 5')
    assert "not valid TOML" in told("[")
    assert "is not key=value" in told('[[source]]\nkind = "fsdd"', "train")
    assert "the corpus is not there" in told('[[source]]\nkind = "fsdd"\nroot = "/nowhere"')
    assert main.main(["run", str(tmp_path / "none")]) == 2
    assert "there is no recipe" in capsys.readouterr().err
