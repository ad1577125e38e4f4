"""Invalid data at the command line: the error names utterance and file, or the utterance is skipped and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from roundelay.cli import main
from roundelay.errors import DataError
from roundelay.recipes.systems import NetworkSystem
from roundelay.speech import memory_guard
from roundelay.speech.features.feature_store import FeatureStore, from_spec
from roundelay.speech.features.kaldi_ark import read_matrices, write_matrices
from roundelay.speech.nnet.lstm import AcousticModel, ModelShape

RATE = 8000
WORDS = {"u1": "ONE TWO", "u2": "TWO", "u3": "ONE"}
RECIPE = """
[[source]]
kind = "kaldi"
root = "{root}"
[features]
resample = false
[language]
lexicon = "lexicon.txt"
text = "train"
"""

RunRecipe = Callable[..., tuple[int, str]]


def noise(path: Path, seconds: float = 0.6, rate: int = RATE) -> None:
    soundfile.write(path, 0.1 * np.random.default_rng(0).normal(size=round(seconds * rate)), rate)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write a recipe with valid data directories and return the one for training."""
    for part in ("train", "dev", "test"):
        folder = tmp_path / "corpus" / part
        folder.mkdir(parents=True)
        for id in WORDS:
            noise(folder / f"{id}.wav")
        (folder / "wav.scp").write_text("".join(f"{id} {folder / f'{id}.wav'}\n" for id in WORDS))
        (folder / "text").write_text("".join(f"{id} {words}\n" for id, words in WORDS.items()))
        (folder / "utt2spk").write_text("".join(f"{id} s\n" for id in WORDS))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(root=tmp_path / "corpus"))
    (tmp_path / "lexicon.txt").write_text("ONE W AH N\nTWO T UW\n")
    return tmp_path / "corpus" / "train"


@pytest.fixture
def run_recipe(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunRecipe:
    """Return a function that runs the recipe up to the features and returns the exit code and stderr."""

    def run(*overrides: str) -> tuple[int, str]:
        code = main.main(["run", str(tmp_path), f"run={tmp_path / 'run'}", *overrides, "--until", "features", "--jobs", "1"])
        return code, capsys.readouterr().err

    return run


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_valid_data_gives_no_warning(run_recipe: RunRecipe) -> None:
    code, stderr = run_recipe()
    assert code == 0
    assert "left out" not in stderr


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:30] + b"noise" * 50), "the audio cannot be read"),
        (lambda path: path.write_bytes(b""), "the audio cannot be read"),
        (lambda path: noise(path, 0.0), "the audio is empty"),
        (lambda path: noise(path, rate=16_000), "must have 8000 samples per second (got 16000)"),
    ],
    ids=["corrupt", "empty file", "no samples", "wrong rate"],
)
def test_unusable_audio_is_named(data: Path, run_recipe: RunRecipe, make: Callable[[Path], object], what: str) -> None:
    make(data / "u2.wav")
    code, stderr = run_recipe()
    assert code == 3
    assert what in stderr
    assert f"utterance u2, file {data / 'u2.wav'}" in stderr


def test_another_rate_is_resampled_on_request(data: Path, run_recipe: RunRecipe) -> None:
    noise(data / "u2.wav", rate=16_000)
    assert run_recipe("features.resample=true")[0] == 0


def test_a_missing_transcript_is_named(data: Path, run_recipe: RunRecipe) -> None:
    edit(data / "text", "u2 TWO\n", "")
    code, stderr = run_recipe()
    assert code == 3
    assert "utterance u2 has no transcript" in stderr
    assert str(data / "text") in stderr


def test_a_word_without_pronunciation_is_named(data: Path, run_recipe: RunRecipe) -> None:
    edit(data / "text", "u1 ONE TWO", "u1 ONE ELEVENTEEN")
    code, stderr = run_recipe()
    assert code == 3
    assert "have no pronunciation: ELEVENTEEN" in stderr
    assert f"utterance u1, {data / 'u1.wav'}" in stderr


def test_too_short_utterances_are_skipped_and_empty_transcripts_kept(
    data: Path, run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(data / "text", "u1 ONE TWO", "u1")
    noise(data / "u3.wav", 0.03)
    code, stderr = run_recipe()
    assert code == 0
    skipped = {name: FeatureStore.open(tmp_path / "run" / "features" / name).skipped for name in ("train", "dev", "test")}
    assert [list(names) for names in skipped.values() if names] == [["u3"]]
    assert "1 utterances skipped (too short)" in stderr
    assert main.main(["prepare", str(data), str(tmp_path / "prepared"), "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert ": 2 utterances" in out
    assert "skipped u3: too short: 1 frames, 3 are needed" in out


# ----------------------------------------------------------------------------------------------------- too long


def test_an_utterance_longer_than_allowed_is_named(data: Path, run_recipe: RunRecipe) -> None:
    noise(data / "u2.wav", 121.0)
    code, stderr = run_recipe()
    assert code == 3
    assert "lasts 121.0 s, longer than the 120 s allowed" in stderr
    assert f"utterance u2, file {data / 'u2.wav'}" in stderr
    assert "features.longest_s" in stderr
    assert run_recipe("features.longest_s=200")[0] == 0


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_guard, "SMALL", 0)
    monkeypatch.setattr(memory_guard, "available_bytes", lambda: 100_000.0)


@pytest.mark.usefixtures("little_memory")
def test_audio_longer_than_memory_is_not_read(data: Path, run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(data / "u2.wav", 3.0)
    names, read = [], soundfile.SoundFile.read

    def recording_read(file: soundfile.SoundFile, *args: object, **options: object) -> np.ndarray:
        names.append(Path(file.name).name)
        return read(file, *args, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", recording_read)
    code, stderr = run_recipe()
    assert code == 3
    assert "an utterance of 3 s would take 0.0 GB of memory" in stderr
    assert f"utterance u2, file {data / 'u2.wav'}" in stderr
    assert names == ["u1.wav"]


@pytest.mark.usefixtures("little_memory")
def test_features_and_scores_longer_than_memory_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_matrices(tmp_path / "x.ark", tmp_path / "x.scp", [("u7", np.zeros((900, 30), np.float32))])
    store = from_spec(f"{tmp_path}/x.scp")
    with pytest.raises(DataError, match=r"features of 900 frames would take[\s\S]*utterance u7, .*x\.scp"):
        store["u7"]
    system = NetworkSystem(AcousticModel(ModelShape(inputs=30, layers=1, hidden=2, bottleneck=0, outputs=50)), np.zeros(50))
    monkeypatch.setattr(memory_guard, "available_bytes", lambda: 300_000.0)
    assert store["u7"].shape == (900, 30)
    with pytest.raises(DataError, match=r"scoring 900 frames would take[\s\S]*utterance u7, features .*x\.scp"):
        system.scores(store, "u7")
    monkeypatch.setattr(memory_guard, "available_bytes", lambda: 1e6)
    assert system.scores(store, "u7").shape == (900, 50)


def test_memory_is_compared_with_what_is_available() -> None:
    assert memory_guard.available_bytes() > 1e6
    memory_guard.require(1e3, "a small buffer", "here")
    with pytest.raises(DataError, match=r"would take 1000000000\.0 GB"):
        memory_guard.require(1e18, "a large buffer", "here")


def test_a_header_larger_than_its_file_allocates_no_memory(tmp_path: Path) -> None:
    (tmp_path / "x.ark").write_bytes(
        b"u7 \0BFM \x04" + (30_000_000).to_bytes(4, "little") + b"\x04" + (60).to_bytes(4, "little")
    )
    (tmp_path / "x.scp").write_text(f"u7 {tmp_path}/x.ark:3\n")
    with pytest.raises(DataError, match=r"matrix of u7 cannot be read: the file ends in the middle of a value[\s\S]*x\.ark"):
        read_matrices(tmp_path / "x.scp")["u7"]


# ------------------------------------------------------------------------------------------------- no command is run


def test_commands_in_a_data_directory_run_only_if_allowed(
    data: Path, run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "it-ran"
    edit(data / "wav.scp", f"u2 {data / 'u2.wav'}", f"u2 touch {trace}; cat {data / 'u2.wav'} |")
    code, stderr = run_recipe()
    assert code == 3
    assert "recording u2 is a command" in stderr
    assert f"{data / 'wav.scp'}, line 2" in stderr
    prepare = ["prepare", str(data), str(tmp_path / "prepared"), "--jobs", "1"]
    assert main.main(prepare) == 3
    assert not trace.exists()
    assert main.main([*prepare, "--allow-pipes"]) == 0
    assert trace.exists()
    assert ": 3 utterances" in capsys.readouterr().out
