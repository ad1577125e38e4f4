"""Kaldi data directories: written directories read back, errors name file and line. Audio: errors name utterance and file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from paths import DATA

from roundelay.errors import DataError
from roundelay.speech.corpora.kaldi_dir import read_data_dir, write_data_dir
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.audio import read_audio

RATE = 8000


def tone(path: Path, seconds: float = 0.5, rate: int = RATE, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    wave = 0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    soundfile.write(path, np.stack([wave] * channels, axis=1) if channels > 1 else wave, rate)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a data directory with two speakers and three utterances."""
    data = tmp_path / "data"
    for name in ("a-1", "a-2", "b-1"):
        tone(tmp_path / "audio" / f"{name}.wav")
    data.mkdir()
    (data / "wav.scp").write_text("".join(f"{n} audio/{n}.wav\n" for n in ("a-1", "a-2", "b-1")))
    (data / "text").write_text("a-1 ONE TWO\na-2 THREE\nb-1 FOUR\n")
    (data / "utt2spk").write_text("a-1 a\na-2 a\nb-1 b\n")
    return data


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


# -------------------------------------------------------------------------------------------------- valid directories


def test_a_directory_is_read(folder: Path) -> None:
    corpus = read_data_dir(folder)
    assert [u.id for u in corpus.utterances] == ["a-1", "a-2", "b-1"]
    assert {s: [u.id for u in us] for s, us in corpus.speakers.items()} == {"a": ["a-1", "a-2"], "b": ["b-1"]}
    assert corpus.by_id["a-1"].words == ("ONE", "TWO")
    assert len(corpus) == 3
    assert read_audio(corpus.by_id["b-1"], RATE).shape == (4000,)


def test_unsorted_files_tabs_and_blank_lines_read_the_same(folder: Path) -> None:
    before = read_data_dir(folder).utterances
    for name in ("wav.scp", "text", "utt2spk"):
        lines = (folder / name).read_text().splitlines()
        (folder / name).write_text("\n\n".join(line.replace(" ", "\t", 1) + "  " for line in reversed(lines)))
    assert read_data_dir(folder).utterances == before


def test_an_empty_transcript_is_kept(folder: Path) -> None:
    (folder / "text").write_text("a-1\na-2 THREE\nb-1 FOUR\n")
    corpus = read_data_dir(folder)
    assert corpus.by_id["a-1"].words == ()
    assert len(corpus.subset(lambda u: bool(u.words))) == 2


def test_text_may_be_missing_if_it_is_not_needed(folder: Path) -> None:
    (folder / "text").unlink()
    assert "text is missing" in error_of(lambda: read_data_dir(folder))
    assert all(u.words == () for u in read_data_dir(folder, need_text=False).utterances)


def test_speakers_from_spk2utt_alone(folder: Path) -> None:
    (folder / "utt2spk").unlink()
    (folder / "spk2utt").write_text("a a-1 a-2\nb b-1\n")
    assert read_data_dir(folder).by_id["a-2"].speaker == "a"


def test_paths_relative_to_a_root(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    tone(elsewhere / "audio" / "a-1.wav", seconds=0.25)
    assert read_data_dir(folder, root=elsewhere).by_id["a-1"].audio == elsewhere / "audio" / "a-1.wav"
    assert read_data_dir(folder).by_id["a-1"].audio == tmp_path / "audio" / "a-1.wav"


def test_segments_cut_recordings(folder: Path) -> None:
    tone(folder / "long.wav", seconds=2.0)
    (folder / "wav.scp").write_text("rec long.wav\n")
    (folder / "segments").write_text("a-1 rec 0.25 0.75\na-2 rec 1 2\nb-1 rec 1.5 -1\n")
    corpus = read_data_dir(folder)
    assert [len(read_audio(u, RATE)) for u in corpus.utterances] == [4000, 8000, 4000]
    whole, _ = soundfile.read(folder / "long.wav", dtype="float32")
    assert np.array_equal(read_audio(corpus.by_id["a-1"], RATE), whole[2000:6000])


def test_a_written_directory_reads_back(folder: Path, tmp_path: Path) -> None:
    first = read_data_dir(folder)
    write_data_dir(tmp_path / "copy", first.utterances)
    assert (tmp_path / "copy" / "wav.scp").read_text().splitlines()[0] == "a-1 audio/a-1.wav"
    again = read_data_dir(tmp_path / "copy")
    assert [replace(u, audio=u.audio.resolve()) for u in again.utterances] == [
        replace(u, audio=u.audio.resolve()) for u in first.utterances
    ]
    cut = [replace(first.utterances[0], id=f"a-{n}", start=n / 4, end=n / 4 + 0.25) for n in range(2)]
    write_data_dir(tmp_path / "cut", [*cut, first.by_id["b-1"]])
    again = read_data_dir(tmp_path / "cut")
    assert [(u.id, u.start, u.end, u.words) for u in again.utterances[:2]] == [(u.id, u.start, u.end, u.words) for u in cut]
    assert len((tmp_path / "cut" / "wav.scp").read_text().splitlines()) == 2


def test_a_real_corpus_is_read() -> None:
    data = DATA
    if not (data / "fsdd").is_dir():
        pytest.skip(f"the recordings are not in {data} (set ROUNDELAY_DATA)")
    corpus = read_data_dir(data / "fsdd" / "train")
    assert len(corpus) == 1200
    assert len(corpus.speakers) == 6
    assert abs(read_audio(corpus.utterances[0], 8000)).max() > 0.01


# ------------------------------------------------------------------------------------------------ invalid directories


@pytest.mark.parametrize("name", ["wav.scp", "utt2spk", "text"])
def test_missing_files_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    message = error_of(lambda: read_data_dir(folder))
    assert f"{name} is missing" in message
    assert str(folder) in message


@pytest.mark.parametrize(
    ("name", "content", "what", "line"),
    [
        ("text", "a-1 ONE\nb-1 FOUR\n", "utterance a-2 has no transcript", 2),
        ("text", "a-1 ONE\na-2 X\nb-1 FOUR\nc-1 WHO\n", "text names utterance c-1", 4),
        ("text", "a-1 ONE\na-2 X\na-1 ONE\nb-1 FOUR\n", "duplicate entry 'a-1'", 3),
        ("wav.scp", "a-1 audio/a-1.wav\na-2 audio/none.wav\nb-1 audio/b-1.wav\n", "no audio file audio/none.wav", 2),
        ("wav.scp", "a-1 audio/a-1.wav\na-2\nb-1 audio/b-1.wav\n", "'a-2' has no value", 2),
        ("wav.scp", "a-1 audio/a-1.wav\n\na-1 audio/a-1.wav\n", "duplicate entry 'a-1'", 3),
        ("utt2spk", "a-1 a\na-2 a\n", "utterance b-1 has no speaker", 3),
        ("utt2spk", "a-1 a\na-2 a b\nb-1 b\n", "the speaker of utterance a-2 must be one word (got 'a b')", 2),
        ("utt2spk", "a-1 a\na-2 a\nb-1 b\nb-2 b\n", "utt2spk names utterance b-2", 4),
        ("spk2utt", "a a-1 a-2\nb a-1\n", "spk2utt assigns utterance a-1 to b", 2),
        ("segments", "a-1 audio/none 0 1\n", "segment a-1 refers to recording audio/none", 1),
        ("segments", "a-1 a-1 0.4 0.2\n", "segment a-1 must satisfy 0 <= start < end (got 0.4 s to 0.2 s)", 1),
        ("segments", "a-1 a-1 0.1\n", "segment a-1 must be 'RECORDING START END'", 1),
        ("segments", "a-1 a-1 nan 1\n", "(got nan s to 1.0 s)", 1),
    ],
)
def test_errors_name_file_and_line(folder: Path, name: str, content: str, what: str, line: int) -> None:
    if name == "segments":
        (folder / "text").write_text("a-1 ONE\n")
        (folder / "utt2spk").write_text("a-1 a\n")
    (folder / name).write_text(content)
    message = error_of(lambda: read_data_dir(folder))
    assert what in message
    assert str(folder / name) in message
    assert f"line {line}" in message


def test_files_that_are_not_text_are_rejected(folder: Path) -> None:
    (folder / "text").write_bytes(b"a-1 \xff\xfe\n")
    assert str(folder / "text") in error_of(lambda: read_data_dir(folder))
    assert "no data directory" in error_of(lambda: read_data_dir(folder / "none"))
    (folder / "wav.scp").write_text("")
    assert "no utterance" in error_of(lambda: read_data_dir(folder))


def test_commands_run_only_if_pipes_are_allowed(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    lines = (folder / "wav.scp").read_text().splitlines()
    lines[1] = f"a-2 touch {trace}; cat {tmp_path}/audio/a-2.wav |"
    (folder / "wav.scp").write_text("\n".join(lines) + "\n")
    message = error_of(lambda: read_data_dir(folder))
    assert "is a command" in message
    assert "line 2" in message
    assert not trace.exists()
    corpus = read_data_dir(folder, allow_pipes=True)
    assert not trace.exists()
    assert len(read_audio(corpus.by_id["a-2"], RATE)) == 4000
    assert trace.exists()
    failing = replace(corpus.by_id["a-2"], command="echo no such tape >&2; exit 3")
    assert "no such tape" in error_of(lambda: read_audio(failing, RATE))


def test_names_that_kaldi_files_cannot_contain_are_rejected(tmp_path: Path) -> None:
    good = Utterance("a", "s", ("X",), tmp_path / "a.wav")
    for wrong in (replace(good, id="a b"), replace(good, speaker=""), replace(good, words=("X Y",))):
        assert "cannot be written to a Kaldi file" in error_of(lambda wrong=wrong: write_data_dir(tmp_path / "d", [wrong]))
    assert "duplicate utterance a" in error_of(lambda: write_data_dir(tmp_path / "d", [good, good]))


# ------------------------------------------------------------------------------------------------------ invalid audio


def utterance_of(path: Path, **change: float) -> Utterance:
    return Utterance("utt7", "s", ("X",), path, **change)  # type: ignore[arg-type]


def write_truncated_flac(path: Path) -> None:
    whole = path.with_suffix(".whole.flac")
    noise = np.random.default_rng(0).normal(size=RATE) * 0.1
    soundfile.write(whole, noise, RATE)
    path.write_bytes(whole.read_bytes()[:4000])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(b"this is no audio" * 100), "cannot be read"),
        (lambda path: soundfile.write(path, np.zeros(0), RATE, format="WAV"), "the audio is empty"),
        (write_truncated_flac, "audio"),
        (lambda path: tone(path, rate=16000), "must have 8000 samples per second (got 16000)"),
        (lambda path: tone(path, channels=2), "must have 1 channel (got 2)"),
        (lambda path: None, "cannot be read"),
    ],
    ids=["empty file", "no audio", "no samples", "truncated", "other rate", "two channels", "missing"],
)
def test_invalid_audio_names_utterance_and_file(tmp_path: Path, make: Callable[[Path], object], what: str) -> None:
    path = tmp_path / "sound.flac"
    make(path)
    message = error_of(lambda: read_audio(utterance_of(path), RATE))
    assert what in message
    assert "utterance utt7" in message
    assert str(path) in message


def test_samples_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "nan.wav"
    soundfile.write(path, np.array([0.0, np.nan, 0.1]), RATE, subtype="FLOAT")
    assert "not finite" in error_of(lambda: read_audio(utterance_of(path), RATE))


def test_segments_must_lie_in_their_recording_and_be_short(tmp_path: Path) -> None:
    path = tone(tmp_path / "x.wav", seconds=1.0)
    assert len(read_audio(utterance_of(path, start=0.5, end=1.03), RATE)) == 4000, (
        "an end that exceeds the recording by rounding is accepted"
    )
    assert "exceeds its recording" in error_of(lambda: read_audio(utterance_of(path, start=0.5, end=1.5), RATE))
    assert "exceeds its recording" in error_of(lambda: read_audio(utterance_of(path, start=1.2, end=1.5), RATE))
    message = error_of(lambda: read_audio(utterance_of(path), RATE, longest_s=0.5))
    assert "lasts 1.0 s, longer than the 0.5 s allowed" in message
    assert "utt7" in message


def test_resampling_converts_the_rate(tmp_path: Path) -> None:
    path = tone(tmp_path / "x.wav", seconds=1.0, rate=16000)
    half = read_audio(utterance_of(path), RATE, resample=True)
    assert half.dtype == np.float32
    assert abs(len(half) - RATE) <= 1
    spectrum = np.abs(np.fft.rfft(half[:RATE]))
    assert abs(int(spectrum.argmax()) - 440) <= 1


def test_a_corpus_is_sorted_by_id(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, [Utterance(id, "s", (), tmp_path) for id in ("b", "a", "c")])
    assert list(corpus.by_id) == ["a", "b", "c"]
