"""Readers of published corpora, on miniature copies of their layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from roundelay.errors import DataError, UsageError
from roundelay.speech.corpora import CORPORA, hold_out, read_corpus
from roundelay.speech.corpora.kaldi_dir import write_data_dir
from roundelay.speech.corpora.utterance import Utterance


def write_audio(path: Path, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(0).normal(size=rate // 4) * 0.1, rate)


def test_fsdd(tmp_path: Path) -> None:
    for digit, speaker, take in ((3, "theo", 0), (3, "theo", 5), (9, "nicolas", 17)):
        write_audio(tmp_path / "recordings" / f"{digit}_{speaker}_{take}.wav")
    sets = read_corpus("fsdd", tmp_path)
    assert [(u.id, u.speaker, u.words) for u in sets["train"]] == [
        ("nicolas-9-17", "nicolas", ("NINE",)),
        ("theo-3-05", "theo", ("THREE",)),
    ]
    assert [u.id for u in sets["test"]] == ["theo-3-00"]


def test_audiomnist(tmp_path: Path) -> None:
    for speaker in ("01", "60"):
        write_audio(tmp_path / "data" / speaker / f"7_{speaker}_3.wav", 48_000)
    sets = read_corpus("audiomnist", tmp_path)
    assert [u.speaker for u in sets["train"]] == ["am01"]
    assert [(u.speaker, u.words) for u in sets["test"]] == [("am60", ("SEVEN",))]


def test_speech_commands(tmp_path: Path) -> None:
    for word, speaker in (("yes", "0a"), ("no", "0b"), ("go", "0c"), ("marvin", "0d")):
        write_audio(tmp_path / word / f"{speaker}_nohash_0.wav", 16_000)
    (tmp_path / "validation_list.txt").write_text("no/0b_nohash_0.wav\n")
    (tmp_path / "testing_list.txt").write_text("go/0c_nohash_0.wav\n")
    sets = read_corpus("speech_commands", tmp_path)
    assert {part: [u.words for u in utterances] for part, utterances in sets.items()} == {
        "train": [("YES",)], "dev": [("NO",)], "test": [("GO",)],
    }  # fmt: skip


def test_librispeech(tmp_path: Path) -> None:
    for subset, speaker in (("train-clean-5", "19"), ("dev-clean-2", "84")):
        chapter = tmp_path / subset / speaker / "198"
        write_audio(chapter / f"{speaker}-198-0000.flac", 16_000)
        (chapter / f"{speaker}-198.trans.txt").write_text(f"{speaker}-198-0000 NORTHANGER ABBEY\n")
    sets = read_corpus("librispeech", tmp_path)
    assert [(u.speaker, u.words) for u in sets["train"]] == [("19-198", ("NORTHANGER", "ABBEY"))]
    assert [u.id for u in sets["dev"]] == ["84-198-0000"]
    (tmp_path / "dev-clean-2" / "84" / "198" / "84-198.trans.txt").write_text("84-198-0000\n")
    with pytest.raises(DataError, match=r"84-198-0000 has no transcript[\s\S]*84-198.trans.txt:1"):
        read_corpus("librispeech", tmp_path)
    (tmp_path / "dev-clean-2" / "84" / "198" / "84-198.trans.txt").write_text("84-198-0001 A\n")
    with pytest.raises(DataError, match="84-198-0001 has no recording"):
        read_corpus("librispeech", tmp_path)


@pytest.mark.parametrize("kind", [kind for kind, reader in CORPORA.items() if reader.kaldi_dirs])
def test_kaldi_data_directories_replace_any_layout(kind: str, tmp_path: Path) -> None:
    write_audio(tmp_path / "audio" / "a.wav")
    write_data_dir(tmp_path / "test", [Utterance("a", "s", ("YES",), tmp_path / "audio" / "a.wav")])
    assert [(u.id, u.words) for u in read_corpus(kind, tmp_path)["test"]] == [("a", ("YES",))]


def test_errors_name_kind_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'fsdd'"):
        read_corpus("fsd", tmp_path)
    with pytest.raises(DataError, match=r"folder does not exist[\s\S]*free-spoken-digit-dataset"):
        read_corpus("fsdd", tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not have the layout of fsdd"):
        read_corpus("fsdd", tmp_path)


def test_whole_speakers_are_held_out_if_there_are_ten_or_more(tmp_path: Path) -> None:
    many = [Utterance(f"{s:02d}-{n}", f"{s:02d}", ("A",), tmp_path) for s in range(20) for n in range(3)]
    kept, held_out = hold_out(many, 0.1, seed=0)
    assert len(held_out) == 6
    assert not {u.speaker for u in kept} & {u.speaker for u in held_out}
    few = [u for u in many if u.speaker < "03"]
    kept, held_out = hold_out(few, 0.25, seed=0)
    assert len(held_out) == 2
    assert len(kept) + len(held_out) == 9
    assert hold_out(many, 0.1, seed=1)[1] != hold_out(many, 0.1, seed=0)[1]
