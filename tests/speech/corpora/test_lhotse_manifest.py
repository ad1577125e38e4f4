"""lhotse manifests: supervisions become utterances, recipes read them, errors name file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from roundelay.cli import main
from roundelay.errors import DataError
from roundelay.speech.corpora import read_corpus
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.corpora.lhotse_manifest import read_cuts, read_manifests
from roundelay.speech.features.audio import read_audio

RECORDING: dict[str, Any] = {
    "id": "rec1",
    "sources": [{"type": "file", "channels": [0], "source": "audio/rec1.wav"}],
    "sampling_rate": 8000,
    "num_samples": 16000,
    "duration": 2.0,
}
SUPERVISIONS: list[dict[str, Any]] = [
    {"id": "b", "recording_id": "rec1", "start": 0.5, "duration": 1.0, "channel": 0, "text": "HELLO YOU", "speaker": "s1"},
    {"id": "a", "recording_id": "rec1", "start": 0.0, "duration": 0.5, "channel": 0},
]
CUT: dict[str, Any] = {
    "id": "cut1",
    "start": 0.25,
    "duration": 1.5,
    "channel": 0,
    "supervisions": [{**SUPERVISIONS[0], "start": 0.25}],
    "recording": RECORDING,
    "type": "MonoCut",
}
RECIPE = """
[[source]]
kind = "lhotse"
root = "manifests"
[language]
lexicon = "lexicon.txt"
text = "train"
"""


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(item) + "\n" for item in items)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "audio").mkdir()
    soundfile.write(tmp_path / "audio" / "rec1.wav", np.linspace(-0.5, 0.5, 16000), 8000)
    write(tmp_path / "recordings.jsonl.gz", [RECORDING])
    write(tmp_path / "supervisions.jsonl", SUPERVISIONS)
    return tmp_path


def test_supervisions_become_utterances(folder: Path) -> None:
    corpus = read_manifests(folder / "recordings.jsonl.gz", folder / "supervisions.jsonl")
    assert [(u.id, u.speaker, u.words) for u in corpus.utterances] == [("a", "a", ()), ("b", "s1", ("HELLO", "YOU"))]
    assert len(read_audio(corpus.by_id["b"], 8000)) == 8000


def test_supervisions_of_cuts_are_relative_to_the_cut(folder: Path) -> None:
    utterance = read_cuts(write(folder / "cuts.jsonl.gz", [CUT])).by_id["b"]
    assert (utterance.start, utterance.end) == (0.5, 1.5)
    pair = read_manifests(folder / "recordings.jsonl.gz", folder / "supervisions.jsonl").by_id["b"]
    assert np.array_equal(read_audio(utterance, 8000), read_audio(pair, 8000))


@pytest.mark.parametrize(
    ("recording", "supervision", "what"),
    [
        ({"sources": []}, {}, "must have one source with one channel"),
        ({"sources": ["rec1.wav"]}, {}, "must have one source with one channel"),
        ({"sources": [{"type": "url", "channels": [0], "source": "https://x"}]}, {}, "must be of type file (got url)"),
        ({"sources": [{"type": "command", "channels": [0], "source": "cat x"}]}, {}, "allow pipes"),
        ({"sources": [{"type": "file", "channels": [0], "source": "none.wav"}]}, {}, "no audio file none.wav"),
        ({"transforms": [{"name": "Speed", "kwargs": {"factor": 0.9}}]}, {}, "has transforms"),
        ({"id": "a b"}, {}, "'id' must be one word (got 'a b')"),
        ({}, {"recording_id": "other"}, "which is not in the recordings manifest"),
        ({}, {"duration": None}, "duration of supervision b must be in seconds (got None)"),
        ({}, {"duration": 0}, "duration > 0 (got 0.5 s and 0.0 s)"),
        ({}, {"id": "a"}, "duplicate supervision a"),
    ],
)
def test_errors_name_file_and_line(folder: Path, recording: dict[str, Any], supervision: dict[str, Any], what: str) -> None:
    recordings = write(folder / "recordings.jsonl", [{**RECORDING, **recording}])
    supervisions = write(folder / "supervisions.jsonl", [SUPERVISIONS[1], {**SUPERVISIONS[0], **supervision}])
    with pytest.raises(DataError) as caught:
        read_manifests(recordings, supervisions)
    assert what in str(caught.value)
    assert "line" in caught.value.where


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"type": "MixedCut"}, r"must be a MonoCut with a recording \(it is a MixedCut\)"),
        ({"recording": None}, "it has no recording"),
        ({"start": "now"}, "start of cut cut1 must be in seconds"),
        ({"supervisions": ["b"]}, "must be a list of objects"),
        ({"supervisions": []}, "no supervision"),
    ],
)
def test_invalid_cuts_are_named(folder: Path, change: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=what):
        read_cuts(write(folder / "cuts.jsonl", [{**CUT, **change}]))


def test_files_that_are_not_manifests_are_rejected(folder: Path) -> None:
    valid = folder / "recordings.jsonl.gz"
    (folder / "broken.jsonl").write_text('{"id": \n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "plain.jsonl.gz").write_text("{}")
    for name, what in (
        ("broken.jsonl", "cannot read the manifest"),
        ("list.jsonl", "must be a JSON object"),
        ("empty.jsonl", "no supervision"),
        ("none.jsonl", "cannot read the manifest"),
        ("plain.jsonl.gz", "cannot read the manifest"),
    ):
        with pytest.raises(DataError, match=what):
            read_manifests(valid, folder / name)


# ---------------------------------------------------------------------------------------------------------- as a corpus


def test_file_names_select_the_sets(folder: Path) -> None:
    (folder / "recordings.jsonl.gz").unlink()
    (folder / "supervisions.jsonl").unlink()
    for part in ("train-clean-5", "train-other-5"):
        write(folder / f"libri_recordings_{part}.jsonl.gz", [RECORDING])
        write(folder / f"libri_supervisions_{part}.jsonl.gz", [{**SUPERVISIONS[0], "id": part}])
    write(folder / "libri_cuts_train-clean-5.jsonl.gz", [])  # ignored: the part has recordings with supervisions
    write(folder / "cuts_dev.jsonl", [CUT])
    write(folder / "cuts_eval2000.jsonl", [CUT])
    sets = read_corpus("lhotse", folder)
    assert {part: [u.id for u in utterances] for part, utterances in sets.items()} == {
        "train": ["train-clean-5", "train-other-5"], "dev": ["b"], "test": ["b"],
    }  # fmt: skip


def test_incomplete_folders_are_rejected(folder: Path) -> None:
    (folder / "recordings.jsonl.gz").unlink()
    with pytest.raises(DataError, match=r"supervisions manifest has no recordings manifest[\s\S]*add recordings\.jsonl"):
        read_corpus("lhotse", folder)
    (folder / "supervisions.jsonl").unlink()
    with pytest.raises(DataError, match="does not have the layout of lhotse"):
        read_corpus("lhotse", folder)
    for part in ("all", "20"):
        path = write(folder / f"cuts_{part}.jsonl", [CUT])
        with pytest.raises(DataError, match=f"set of part '{part}' is unknown"):
            read_corpus("lhotse", folder)
        path.unlink()


def run_data_stage(recipe: Path) -> Path:
    """Run the recipe in a folder up to its data stage and return the data directories."""
    (recipe / "recipe.toml").write_text(RECIPE)
    (recipe / "lexicon.txt").write_text("HELLO HH AH L OW\nYOU Y UW\n")
    run = recipe / "run"
    assert main.main(["run", str(recipe), f"run={run}", "--until", "data", "--jobs", "1"]) == 0
    return run / "data"


def test_a_recipe_reads_manifests(folder: Path) -> None:
    manifests = folder / "manifests"
    manifests.mkdir()
    write(manifests / "toy_recordings_train.jsonl.gz", [RECORDING])
    write(manifests / "toy_supervisions_train.jsonl.gz", [SUPERVISIONS[0]])
    for part in ("dev", "test"):
        write(manifests / f"toy_cuts_{part}.jsonl", [CUT])
    data = run_data_stage(folder)
    for part in ("train", "dev", "test"):
        (utterance,) = read_data_dir(data / part).utterances
        assert (utterance.words, utterance.start, utterance.end) == (("HELLO", "YOU"), 0.5, 1.5)


def test_a_recipe_reads_manifests_written_by_lhotse(tmp_path: Path) -> None:
    lhotse = pytest.importorskip("lhotse")
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    for number, part in enumerate(("train", "dev", "test")):
        audio = tmp_path / f"{part}.wav"
        soundfile.write(audio, np.linspace(-0.5, 0.5, 16000), 8000)
        recordings = lhotse.RecordingSet.from_recordings([lhotse.Recording.from_file(audio)])
        segment = lhotse.SupervisionSegment(f"u{number}", part, 0.5, 1.0, text="HELLO YOU", speaker=f"s{number}")
        supervisions = lhotse.SupervisionSet.from_segments([segment])
        if part == "test":
            cuts = lhotse.CutSet.from_manifests(recordings=recordings, supervisions=supervisions).cut_into_windows(1.75)
            cuts.to_file(manifests / "toy_cuts_test.jsonl.gz")
        else:
            recordings.to_file(manifests / f"toy_recordings_{part}.jsonl.gz")
            supervisions.to_file(manifests / f"toy_supervisions_{part}.jsonl.gz")
    data = run_data_stage(tmp_path)
    for number, part in enumerate(("train", "dev", "test")):
        (utterance,) = read_data_dir(data / part).utterances
        assert (utterance.id, utterance.speaker, utterance.words) == (f"u{number}", f"s{number}", ("HELLO", "YOU"))
        assert (utterance.start, utterance.end) == (0.5, 1.5)
        assert utterance.audio.resolve() == (tmp_path / f"{part}.wav").resolve()
