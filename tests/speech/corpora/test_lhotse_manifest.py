"""lhotse manifests: what stands in them becomes utterances, and mistakes are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from roundelay.errors import DataError
from roundelay.speech.corpora.lhotse_manifest import import_lhotse
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


def test_manifests_become_utterances(folder: Path) -> None:
    corpus = import_lhotse(folder / "recordings.jsonl.gz", folder / "supervisions.jsonl")
    assert [(u.id, u.speaker, u.words) for u in corpus.utterances] == [("a", "a", ()), ("b", "s1", ("HELLO", "YOU"))]
    assert len(read_audio(corpus.by_id["b"], 8000)) == 8000


@pytest.mark.parametrize(
    ("recording", "supervision", "what"),
    [
        ({"sources": []}, {}, "is not one file of one channel"),
        ({"sources": [{"type": "url", "channels": [0], "source": "https://x"}]}, {}, "is a url, not a file"),
        ({"sources": [{"type": "command", "channels": [0], "source": "cat x"}]}, {}, "allow pipes"),
        ({"sources": [{"type": "file", "channels": [0], "source": "none.wav"}]}, {}, "there is no audio file"),
        ({"id": "a b"}, {}, "'id' is missing, or not one word"),
        ({}, {"recording_id": "other"}, "which the manifest lacks"),
        ({}, {"duration": None}, "no start and duration"),
        ({}, {"duration": 0}, "lasts 0.0 s"),
        ({}, {"id": "a"}, "stands there twice"),
    ],
)
def test_mistakes_are_named(folder: Path, recording: dict[str, Any], supervision: dict[str, Any], what: str) -> None:
    recordings = write(folder / "recordings.jsonl", [{**RECORDING, **recording}])
    supervisions = write(folder / "supervisions.jsonl", [SUPERVISIONS[1], {**SUPERVISIONS[0], **supervision}])
    with pytest.raises(DataError) as caught:
        import_lhotse(recordings, supervisions)
    assert what in str(caught.value)
    assert "line" in caught.value.where


def test_files_that_are_no_manifests(folder: Path) -> None:
    good = folder / "recordings.jsonl.gz"
    (folder / "broken.jsonl").write_text('{"id": \n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "plain.jsonl.gz").write_text("{}")
    for name, what in (
        ("broken.jsonl", "cannot read the manifest"),
        ("list.jsonl", "must be an object"),
        ("empty.jsonl", "no supervision"),
        ("none.jsonl", "cannot read the manifest"),
        ("plain.jsonl.gz", "cannot read the manifest"),
    ):
        with pytest.raises(DataError, match=what):
            import_lhotse(good, folder / name)
