"""A small recipe on real recordings: all stages, skipping of finished stages, decoding, exporting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from command import Jobs
from paths import DATA
from safetensors.numpy import load_file

from benchmarks import speech_speed
from roundelay import config
from roundelay.cli import main
from roundelay.errors import UsageError
from roundelay.recipes import FOLDER as RECIPES
from roundelay.recipes import config as recipe_config
from roundelay.recipes import names
from roundelay.recipes.pipeline import STAGES, stage_fingerprints
from roundelay.speech.corpora.kaldi_dir import read_data_dir, write_data_dir
from roundelay.speech.corpora.utterance import Utterance
from roundelay.speech.features.kaldi_ark import read_matrices

DIGITS = DATA / "fsdd"
needs_digits = pytest.mark.skipif(not DIGITS.is_dir(), reason="the fsdd recordings are missing (ROUNDELAY_DATA)")

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
    """Run the recipe once with the command."""
    folder = tmp_path_factory.mktemp("recipe")
    for part, takes in (("train", 8), ("test", 2)):
        corpus = read_data_dir(DIGITS / part, root=DIGITS)
        by_word: dict[tuple[str, tuple[str, ...]], list] = {}
        for u in corpus.utterances:
            by_word.setdefault((u.speaker, u.words), []).append(u)
        chosen = [u for key, same in by_word.items() if key[0] in ("jackson", "theo") for u in same[:takes]]
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
def test_recipe_produces_word_error_rates_from_recordings(done: tuple[Jobs, Path]) -> None:
    _, folder = done
    result = json.loads((folder / "run" / "result.json").read_text())
    assert [(r["name"], r["set"]) for r in result["systems"]] == [("mono", "test"), ("tri", "test"), ("lstm", "test")]
    for r in result["systems"]:
        assert 0 <= r["low"] <= r["wer"] <= r["high"]
        assert (r["words"], r["speakers"]) == (40, 2)
        assert r["wer"] < 40, "ten digits by speakers of the training set: chance is 90 %"
        assert r["line"].startswith("%WER ")
    words = result["language_model"]
    assert (words["order"], words["words"], words["sentences"], words["unknown"]) == (2, 10, 10, {"test": 0.0})
    first, second = (training_alignments(folder / "run" / name) for name in ("network", "network-2"))
    assert (first, second) == ("alignments", "alignments-2"), "the second network is trained on the alignments of the first"


def training_alignments(network: Path) -> str:
    """Return the name of the alignments that a network was trained on."""
    return Path(config.load(network / "config.toml").settings.task_options["alignments"]).parent.name


@needs_digits
@pytest.mark.timeout(240)
def test_benchmark_measures_the_speed_of_every_stage(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = done
    assert speech_speed.main([str(folder / "run"), "--repeats", "1", "--utterances", "10", "--json"]) == 0
    rows = {(r["stage"], r["system"]): r for r in json.loads(capsys.readouterr().out)["results"]}
    stages = [("features", ""), ("align", "mono"), ("align", "tri"), ("decode", "mono"), ("decode", "tri"), ("decode", "lstm")]
    assert [key for key in rows if key[0] != "synthesis"] == stages
    assert all(r["rate"] > 0 for r in rows.values())


@needs_digits
@pytest.mark.timeout(240)
def test_finished_stages_are_skipped(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = done
    before = (folder / "run" / "lstm" / "model.safetensors").stat().st_mtime_ns
    assert main.main(["run", str(folder / "mini"), f"run={folder / 'run'}"]) == 0
    captured = capsys.readouterr()
    skipped = [line for line in captured.err.splitlines() if "done before" in line]
    assert skipped == [f"{stage.name}: done before" for stage in STAGES if stage.name != "sat"]
    assert "lstm" in captured.out
    assert (folder / "run" / "lstm" / "model.safetensors").stat().st_mtime_ns == before


@needs_digits
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_network_is_initialized_from_another_recipe_that_runs_first(
    done: tuple[Jobs, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    _, folder = done
    runs, second = folder / "runs", folder / "second"
    shutil.copytree(folder / "run", runs / "mini", dirs_exist_ok=True)
    second.mkdir(exist_ok=True)
    text = (folder / "mini" / "recipe.toml").read_text().replace("[network]", '[network]\ninit_from = "../mini"')
    (second / "recipe.toml").write_text(text.replace("realign_passes = 1", "").replace("epochs = 6.0", "epochs = 0.2"))
    shutil.copy(folder / "mini" / "lexicon.txt", second)
    command = ["run", str(second), f"run={runs / 'second'}", "--until", "network"]
    assert main.main(command) == 0
    lines = capfd.readouterr().err.splitlines()
    start = next(n for n, line in enumerate(lines) if "initialized from the network of mini" in line)
    assert lines[start + 1 : start + 7] == [f"{stage.name}: done before" for stage in STAGES if stage.name != "sat"][:6]
    initial = config.load(runs / "second" / "network" / "config.toml").settings.task_options["init_from"]
    assert Path(initial) == runs / "mini" / "lstm"
    before, after = (load_file(runs / name / "lstm" / "model.safetensors") for name in ("mini", "second"))
    moved = [np.abs(before[name] - after[name]).max() for name in before if not name.startswith("outputs.")]
    assert 0 < max(moved) < 0.2, "a fifth of an epoch changes little"

    assert main.main(command) == 0
    assert "network: done before" in capfd.readouterr().err
    assert main.main(["run", str(second), f"run={folder / 'elsewhere'}", "--until", "network"]) == 2
    assert "would overwrite the directory of a recipe" in capfd.readouterr().err
    (folder / "mini" / "recipe.toml").write_text((folder / "mini" / "recipe.toml").read_text() + "momentum = 0.1\n")
    recipe = recipe_config.load(second)
    stamp = json.loads((runs / "second" / "stages" / "network.json").read_text())["fingerprint"]
    assert fingerprints_of(recipe)["network"] != stamp, "other initial weights give another network"
    assert (
        fingerprints_of(recipe)["align"] == json.loads((runs / "second" / "stages" / "align.json").read_text())["fingerprint"]
    )
    (folder / "mini" / "recipe.toml").write_text(RECIPE.format(root=folder / "data"))


@needs_digits
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_speaker_adapted_systems_decode_align_and_export(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    jobs, folder = done
    adapted, run = folder / "adapted", folder / "run-adapted"
    shutil.copytree(folder / "run", run, dirs_exist_ok=True)  # the stages up to the alignments are skipped
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
    assert (shape["adapted"], shape["shape"]["inputs"]) == (True, 160), "40 adapted values in addition to 120"
    data = str(folder / "data" / "test")
    for system in ("sat", "lstm"):  # from recordings, with both passes
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
    ("overrides", "message"),
    [
        (["network.adapted=true"], 'add "sat" to systems'),
        (['systems=["sat","tri"]'], 'put "tri" before'),
        (["sat.prior_frames=0"], "prior_frames must be"),
        (['systems=["tri","sat","lstm"]', "network.adapted=true", "network.vtlp=0.1"], "adapted cannot be combined"),
    ],
)
def test_contradictory_settings_of_adaptation_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe_config.load("librispeech", overrides)


def fingerprints_of(recipe: recipe_config.Recipe) -> dict[str, str]:
    return {stage.name: fingerprint for stage, fingerprint in stage_fingerprints(recipe, STAGES)}


def test_recipes_that_initialize_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        text = f'[[source]]\nkind = "fsdd"\n[network]\ninit_from = "../{other}"\n'
        (tmp_path / name / "recipe.toml").write_text(text)
    assert main.main(["run", str(tmp_path / "a"), f"run={tmp_path / 'run'}"]) == 2
    assert "sets init_from itself" in capsys.readouterr().err


@needs_digits
@pytest.mark.timeout(240)
def test_decoding_needs_only_the_run_directory(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = done
    run, data = str(folder / "run"), str(folder / "data" / "test")
    hypotheses = folder / "hyp.txt"
    assert main.main(["decode", run, "--data", data, "--jobs", "1", "--out", str(hypotheses), "--json"]) == 0
    decoded = json.loads(capsys.readouterr().out)
    row = json.loads((folder / "run" / "result.json").read_text())["systems"][2]
    assert decoded["wer"] == row["wer"]
    assert main.main(["score", f"{data}/text", str(hypotheses), "--utt2spk", f"{data}/utt2spk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wer"] == row["wer"]

    other = folder / "other.txt"
    other.write_text((folder / "mini" / "lexicon.txt").read_text().replace("NINE N AY N", "NINE N IY N"))
    assert main.main(["decode", run, "--data", data, "--lexicon", str(other)]) == 3
    assert "lexicon" in capsys.readouterr().err
    assert main.main(["decode", str(folder / "nowhere"), "--data", data]) == 3
    assert "the run directory does not exist" in capsys.readouterr().err


@needs_digits
@pytest.mark.timeout(240)
def test_alignments_and_exports_are_written(done: tuple[Jobs, Path], capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("name", names())
def test_every_recipe_loads(name: str) -> None:
    recipe = recipe_config.load(name)
    assert recipe.title
    assert recipe.train["epochs"] > 0


def test_a_changed_setting_invalidates_its_stage_and_all_later_ones() -> None:
    def changed(*overrides: str) -> list[str]:
        plain, other = (fingerprints_of(recipe_config.load("spoken", list(over))) for over in ((), overrides))
        return [name for name in other if other[name] != plain.get(name)]

    stages = list(fingerprints_of(recipe_config.load("spoken")))
    assert changed() == []
    assert changed("tri.leaves=77") == stages[stages.index("tri") :]
    systems = 'systems=["mono","tri","sat","lstm"]'
    assert changed(systems) == ["sat", "decode", "score"], "the network does not depend on the adapted features"
    assert changed(systems, "network.adapted=true") == ["sat", *stages[stages.index("network") :]]


def write_small_recipe(folder: Path, settings: str = "") -> None:
    """Write a recipe with a Kaldi source of five short recordings in `folder`."""
    for part, ids in (("train", "abc"), ("dev", "d"), ("test", "e")):
        utterances = []
        for name in ids:
            write_recording(folder / f"{name}.wav")
            utterances.append(
                Utterance(name, f"of-{name}", ("ONE", "TWO") if name == "a" else ("TWO",), folder / f"{name}.wav")
            )
        write_data_dir(folder / "data" / part, utterances)
    (folder / "lexicon.txt").write_text("ONE W AH N\nTWO T UW\n")
    (folder / "recipe.toml").write_text(
        f'{settings}[[source]]\nkind = "kaldi"\nroot = "{folder / "data"}"\n'
        '[language]\nlexicon = "lexicon.txt"\ntext = "train"\n'
    )


def write_recording(path: Path, samples: int = 4000) -> None:
    soundfile.write(path, np.full(samples, 0.1), 8000)


def test_speed_perturbed_copies_do_not_count_in_the_language_model(tmp_path: Path) -> None:
    write_small_recipe(tmp_path, "speed_perturb = [0.9, 1.1]\n")
    run = tmp_path / "run"
    assert main.main(["run", str(tmp_path), f"run={run}", "--until", "data", "--jobs", "1"]) == 0
    assert len(read_data_dir(run / "data" / "train").utterances) == 9
    assert (run / "data" / "lm.txt").read_text().splitlines() == ["ONE TWO", "TWO", "TWO"]


def test_changed_source_files_invalidate_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_recipe(tmp_path)

    def stages_run() -> list[str]:
        assert main.main(["run", str(tmp_path), f"run={tmp_path / 'run'}", "--until", "features", "--jobs", "1"]) == 0
        return [line.removesuffix(" …") for line in capsys.readouterr().err.splitlines() if line.endswith(" …")]

    assert stages_run() == ["data", "features"]
    assert stages_run() == [], "nothing has changed"
    write_recording(tmp_path / "a.wav", 6000)
    assert stages_run() == ["data", "features"], "another recording, the same settings"
    text = tmp_path / "data" / "train" / "text"
    text.write_text(text.read_text().replace("b TWO", "b ONE"))
    assert stages_run() == ["data", "features"], "another transcript"
    (tmp_path / "lexicon.txt").write_text("ONE W AH N\nTWO T UH\n")
    assert stages_run() == ["data", "features"], "another lexicon"
    assert stages_run() == []


def test_mistakes_in_a_recipe_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.toml"

    def error_of(text: str, *overrides: str) -> str:
        file.write_text(text)
        assert main.main(["run", str(tmp_path), f"run={tmp_path / 'run'}", *overrides]) in (2, 3)
        return capsys.readouterr().err

    assert "the recipe has no corpus" in error_of('title = "x"')
    assert "did you mean 'features'" in error_of("[feature]\nrate = 8000")
    assert "did you mean 'leaves'" in error_of('[[source]]\nkind = "fsdd"\n[tri]\nleavs = 5')
    assert "not valid TOML" in error_of("[")
    assert "is not of the form key=value" in error_of('[[source]]\nkind = "fsdd"', "train")
    assert "the corpus folder does not exist" in error_of('[[source]]\nkind = "fsdd"\nroot = "/nowhere"')
    assert main.main(["run", str(tmp_path / "none")]) == 2
    assert "unknown recipe" in capsys.readouterr().err
