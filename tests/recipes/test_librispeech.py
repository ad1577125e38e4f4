"""The recipe librispeech on a small corpus in the publisher's layout: real digits, concatenated into sentences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from command import Jobs
from paths import DATA

from roundelay.cli import main
from roundelay.recipes.pipeline import STAGES
from roundelay.speech.corpora.kaldi_dir import read_data_dir, write_data_dir
from roundelay.speech.corpora.utterance import Utterance
from roundelay.speech.features.audio import read_audio

DIGITS = DATA / "fsdd"
needs_digits = pytest.mark.skipif(not DIGITS.is_dir(), reason="the fsdd recordings are missing (ROUNDELAY_DATA)")

pytestmark = pytest.mark.timeout(240)  # the first test runs a whole recipe

RATE = 16_000
SMALL = (
    "mono.passes=8", "mono.gaussians=2", "tri.leaves=60", "tri.passes=6", "tri.gaussians=2",
    "network.model=tiny", "network.hidden=32", "train.batch=8", "train.epochs=5", "train.lr=0.3",
)  # fmt: skip
"""Size only: layout, rate, pronunciations, language model, strategy and learners are those of the recipe."""
READERS = {"jackson": ("19", "198"), "theo": ("26", "495")}
"""Speaker and chapter, as LibriSpeech numbers them."""


def write_part(folder: Path, source: str, sentences: int, length: int, seed: int) -> None:
    """Write SUBSET/SPEAKER/CHAPTER/*.flac and *.trans.txt."""
    rng = np.random.default_rng(seed)
    corpus = read_data_dir(DIGITS / source, root=DIGITS)
    for reader, (speaker, chapter) in READERS.items():
        own = [u for u in corpus.utterances if u.speaker == reader]
        directory = folder / speaker / chapter
        directory.mkdir(parents=True)
        lines = []
        for number in range(sentences):
            chosen = [own[n] for n in rng.integers(len(own), size=length)]
            pieces = [np.zeros(800, np.float32)]
            for utterance in chosen:
                pieces += [read_audio(utterance, 8000), np.zeros(int(rng.integers(400, 1200)), np.float32)]
            samples = np.concatenate(pieces)
            samples += 1e-3 * rng.normal(size=len(samples)).astype(np.float32)
            name = f"{speaker}-{chapter}-{number:04d}"
            soundfile.write(directory / f"{name}.flac", soxr.resample(samples, 8000, RATE), RATE)
            lines.append(f"{name} {' '.join(word for u in chosen for word in u.words)}\n")
        (directory / f"{speaker}-{chapter}.trans.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the recipe once with the command. Return the directory of the corpus and the run."""
    folder = tmp_path_factory.mktemp("librispeech")
    corpus = folder / "LibriSpeech"
    write_part(corpus / "train-clean-5", "train", sentences=22, length=4, seed=0)
    write_part(corpus / "dev-clean-2", "test", sentences=6, length=3, seed=1)
    (corpus / "SPEAKERS.TXT").write_text("; 19 | F | train-clean-5 | 0.1 | A Reader\n")
    with Jobs(folder) as jobs:
        command = ["run", "librispeech", f"source.root={corpus}", "run=run", *SMALL, "--jobs", "1", "--json"]
        jobs.run(*command, timeout_s=200).expect(0)
    return folder


@needs_digits
@pytest.mark.slow
@pytest.mark.dist
def test_recipe_runs_on_the_publishers_layout(done: Path) -> None:
    run = done / "run"
    assert sorted(p.stem for p in (run / "stages").iterdir()) == sorted(stage.name for stage in STAGES if stage.name != "sat")
    result = json.loads((run / "result.json").read_text())
    assert [(r["name"], r["words"], r["speakers"]) for r in result["systems"]] == [
        ("mono", 36, 2), ("tri", 36, 2), ("lstm", 36, 2),
    ]  # fmt: skip
    for r in result["systems"]:
        assert r["wer"] < 50, "digits of training speakers with an uninformative language model: chance is 90 %"
    dev = read_data_dir(run / "data" / "dev")
    assert 0 < len(dev) < 10, "dev-clean-2 is the test set, so dev is held out from train"
    assert json.loads((run / "features" / "train" / "features.json").read_text())["options"]["rate"] == RATE


@needs_digits
def test_a_run_decodes_without_its_corpus(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = done / "new"
    audio = done / "recordings"
    shutil.copytree(done / "LibriSpeech" / "dev-clean-2", audio)
    texts = dict(line.split(" ", 1) for path in sorted(audio.rglob("*.trans.txt")) for line in path.read_text().splitlines())
    write_data_dir(
        new,
        [Utterance(p.stem, p.stem.rsplit("-", 1)[0], tuple(texts[p.stem].split()), p) for p in audio.rglob("*.flac")],
    )
    (done / "LibriSpeech").rename(done / "moved")
    try:
        assert main.main(["decode", str(done / "run"), "--data", str(new), "--jobs", "1", "--json"]) == 0
    finally:
        (done / "moved").rename(done / "LibriSpeech")
    decoded = json.loads(capsys.readouterr().out)
    row = json.loads((done / "run" / "result.json").read_text())["systems"][2]
    assert row["name"] == "lstm"
    assert (decoded["wer"], decoded["words"]) == (row["wer"], row["words"])
