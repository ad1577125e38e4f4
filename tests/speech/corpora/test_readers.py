"""Corpora in miniature, laid out as their publishers do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from roundelay.errors import DataError, UsageError
from roundelay.speech.corpora import readers


def speak(path: Path, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(0).normal(size=rate // 4) * 0.1, rate)


def test_free_spoken_digits(tmp_path: Path) -> None:
    for digit, speaker, take in ((3, "theo", 0), (3, "theo", 5), (9, "nicolas", 17)):
        speak(tmp_path / "recordings" / f"{digit}_{speaker}_{take}.wav")
    sets = readers.read("fsdd", tmp_path)
    assert [(u.id, u.speaker, u.words) for u in sets["train"]] == [
        ("nicolas-9-17", "nicolas", ("NINE",)),
        ("theo-3-05", "theo", ("THREE",)),
    ]
    assert [u.id for u in sets["test"]] == ["theo-3-00"]


def test_audiomnist(tmp_path: Path) -> None:
    for speaker in ("01", "60"):
        speak(tmp_path / "data" / speaker / f"7_{speaker}_3.wav", 48_000)
    sets = readers.read("audiomnist", tmp_path)
    assert [u.speaker for u in sets["train"]] == ["am01"]
    assert [(u.speaker, u.words) for u in sets["test"]] == [("am60", ("SEVEN",))]


def test_speech_commands(tmp_path: Path) -> None:
    for word, speaker in (("yes", "0a"), ("no", "0b"), ("go", "0c"), ("marvin", "0d")):
        speak(tmp_path / word / f"{speaker}_nohash_0.wav", 16_000)
    (tmp_path / "validation_list.txt").write_text("no/0b_nohash_0.wav\n")
    (tmp_path / "testing_list.txt").write_text("go/0c_nohash_0.wav\n")
    sets = readers.read("speech_commands", tmp_path)
    assert {part: [u.words for u in found] for part, found in sets.items()} == {
        "train": [("YES",)], "dev": [("NO",)], "test": [("GO",)],
    }  # fmt: skip


def test_librispeech(tmp_path: Path) -> None:
    for subset, speaker in (("train-clean-5", "19"), ("dev-clean-2", "84")):
        chapter = tmp_path / subset / speaker / "198"
        speak(chapter / f"{speaker}-198-0000.flac", 16_000)
        (chapter / f"{speaker}-198.trans.txt").write_text(f"{speaker}-198-0000 NORTHANGER ABBEY\n")
    sets = readers.read("librispeech", tmp_path)
    assert [(u.speaker, u.words) for u in sets["train"]] == [("19-198", ("NORTHANGER", "ABBEY"))]
    assert [u.id for u in sets["dev"]] == ["84-198-0000"]
    (tmp_path / "dev-clean-2" / "84" / "198" / "84-198.trans.txt").write_text("84-198-0000\n")
    with pytest.raises(DataError, match=r"84-198-0000 has no transcript[\s\S]*84-198.trans.txt:1"):
        readers.read("librispeech", tmp_path)
    (tmp_path / "dev-clean-2" / "84" / "198" / "84-198.trans.txt").write_text("84-198-0001 A\n")
    with pytest.raises(DataError, match="84-198-0001 has no recording"):
        readers.read("librispeech", tmp_path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'fsdd'"):
        readers.read("fsd", tmp_path)
    with pytest.raises(DataError, match="the corpus is not there"):
        readers.read("fsdd", tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not look like fsdd"):
        readers.read("fsdd", tmp_path)


def test_whole_speakers_are_held_out_where_there_are_enough(tmp_path: Path) -> None:
    from roundelay.speech.corpora.utterance import Utterance

    many = [Utterance(f"{s:02d}-{n}", f"{s:02d}", ("A",), tmp_path) for s in range(20) for n in range(3)]
    kept, held = readers.hold_out(many, 0.1, seed=0)
    assert len(held) == 6
    assert not {u.speaker for u in kept} & {u.speaker for u in held}
    few = [u for u in many if u.speaker < "03"]
    kept, held = readers.hold_out(few, 0.25, seed=0)
    assert len(held) == 2
    assert len(kept) + len(held) == 9
    assert readers.hold_out(many, 0.1, seed=1)[1] != readers.hold_out(many, 0.1, seed=0)[1]
