"""Features: equal to Kaldi's, normalized, independent of how they are read; errors name the utterance."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from roundelay.errors import DataError, UsageError
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.fbank import add_deltas, cepstra, frame_count, log_mel
from roundelay.speech.features.feature_store import ConcatFeatures, FeatureStore, from_spec
from roundelay.speech.features.kaldi_ark import write_matrices

RATE = 8000


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Return noise of changing loudness: all frames differ."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    loud = 0.05 * (1.2 + np.sin(2 * np.pi * (1 + seed % 3) * t))
    return (loud * np.convolve(rng.normal(size=len(t)), [1, 0.7, 0.3], mode="same")).astype(np.float32)


def corpus_of(folder: Path, lengths: dict[str, float], rate: int = RATE) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    utterances = []
    for seed, (id, seconds) in enumerate(lengths.items()):
        soundfile.write(folder / f"{id}.flac", sound(seconds, seed, rate), rate)
        utterances.append(Utterance(id, id.split("-")[0], ("X",), folder / f"{id}.flac"))
    return Corpus(folder, utterances)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("audio"), {"a-1": 1.0, "a-2": 0.4, "a-3": 0.03, "b-1": 0.7, "b-2": 2.0})


@pytest.fixture(scope="module")
def store(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return extract(corpus, tmp_path_factory.mktemp("feats"), FeatureOptions(), progress="none")


def reference_log_mel(samples: np.ndarray, rate: int, mels: int) -> np.ndarray:
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0
    options.mel_opts.num_bins = mels
    options.mel_opts.low_freq = 64
    options.mel_opts.high_freq = -200
    fbank = knf.OnlineFbank(options)
    fbank.accept_waveform(rate, (samples * 32768).tolist())
    fbank.input_finished()
    return np.stack([fbank.get_frame(i) for i in range(fbank.num_frames_ready)])


@pytest.mark.parametrize(("rate", "mels"), [(8000, 40), (16000, 40), (16000, 80), (8000, 23)])
def test_log_mels_equal_kaldis(rate: int, mels: int) -> None:
    for seconds in (0.025, 0.2049, 1.3):
        x = sound(seconds, rate=rate)
        theirs = reference_log_mel(x, rate, mels)
        ours = log_mel(x, rate, mels)
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() < 2e-3


def test_blocks_of_long_recordings_join_without_a_gap() -> None:
    x = sound(50.0)
    whole = log_mel(x, RATE)
    assert len(whole) == frame_count(len(x), RATE) == 4998
    assert np.allclose(whole[4090:4110], log_mel(x[4090 * 80 : 4109 * 80 + 200], RATE), atol=1e-4)


def test_digital_silence_is_floored() -> None:
    assert (log_mel(np.zeros(RATE), RATE) == 0).all()


def test_deltas_equal_kaldis() -> None:
    x = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    deltas = add_deltas(x, 2)
    assert deltas.shape == (9, 9)
    assert np.array_equal(deltas[:, :3], x)
    clamp = lambda t: x[min(max(t, 0), 8)]  # noqa: E731
    slope = {n: n / 10 for n in range(-2, 3)}
    for t in range(9):
        first = sum(slope[n] * clamp(t + n) for n in slope)
        second = sum(slope[n] * slope[m] * clamp(t + n + m) for n in slope for m in slope)
        assert np.allclose(deltas[t, 3:6], first, atol=1e-6)
        assert np.allclose(deltas[t, 6:], second, atol=1e-6)
    assert add_deltas(x, 0).shape == (9, 3)
    assert np.abs(add_deltas(x[:1], 2)[0, 3:]).max() < 1e-6


def test_cepstra_are_an_orthonormal_transform() -> None:
    x = np.random.default_rng(1).normal(size=(20, 40)).astype(np.float32)
    assert cepstra(x).shape == (20, 39)
    assert cepstra(x).dtype == np.float32
    whole = cepstra(x, keep=40, deltas=0)
    assert np.allclose(np.square(whole).sum(axis=1), np.square(x).sum(axis=1), rtol=1e-4)
    assert np.allclose(whole[:, 0], x.mean(axis=1) * np.sqrt(40), atol=1e-4)


# --------------------------------------------------------------------------------------------------------- the store


def test_the_store_reports_ids_frames_and_speakers(store: FeatureStore) -> None:
    assert store.ids == ["a-1", "a-2", "b-1", "b-2"]
    assert (store.static_dim, store.dim) == (40, 120)
    assert [store.frames(id) for id in store.ids] == [98, 38, 68, 198]
    assert store.total_frames == 402
    assert store.speaker("b-1") == "b"
    assert store["a-1"].shape == (98, 120)
    assert store["a-1"].dtype == np.float32
    assert np.array_equal(store["a-1"], add_deltas(store.static("a-1"), 2))


def test_too_short_utterances_are_skipped_and_named(store: FeatureStore) -> None:
    assert list(store.skipped) == ["a-3"]
    with pytest.raises(DataError, match=r"a-3 has no features: too short: 1 frames"):
        store["a-3"]
    with pytest.raises(DataError, match="never has no features"):
        store.frames("never")


def test_every_speaker_has_mean_zero_and_variance_one(store: FeatureStore) -> None:
    for ids in (["a-1", "a-2"], ["b-1", "b-2"]):
        x = np.concatenate([store.static(id) for id in ids])
        assert np.abs(x.mean(axis=0)).max() < 0.01
        assert np.abs(x.std(axis=0) - 1).max() < 0.01


def test_normalization_per_utterance_and_none(corpus: Corpus, tmp_path: Path) -> None:
    by_utterance = extract(corpus, tmp_path / "u", FeatureOptions(cmvn="utterance", deltas=0), progress="none")
    assert np.abs(by_utterance["a-2"].mean(axis=0)).max() < 0.01
    raw = extract(corpus, tmp_path / "n", FeatureOptions(cmvn="none", deltas=1, mels=23), progress="none")
    samples, _ = soundfile.read(corpus.by_id["a-1"].audio, dtype="float32")
    exact = log_mel(samples, RATE, 23)
    span = exact.max(axis=0) - exact.min(axis=0)
    assert (np.abs(raw.static("a-1") - exact) <= span / 255 / 2 + 1e-4).all()
    assert raw.dim == 46


def test_one_byte_per_value(store: FeatureStore) -> None:
    assert (store.folder / "features.u8").stat().st_size == store.total_frames * 40


def test_windows_are_cut_from_the_whole(store: FeatureStore) -> None:
    whole = store["a-2"]
    for start, stop in ((0, 38), (0, 1), (37, 38), (3, 24), (17, 38), (5, 5)):
        assert np.array_equal(store.window("a-2", start, stop), whole[start:stop]), (start, stop)


def test_processes_write_the_same_bytes_and_a_store_pickles(corpus: Corpus, store: FeatureStore, tmp_path: Path) -> None:
    other = extract(corpus, tmp_path, FeatureOptions(), jobs=2, progress="none")
    for name in ("features.u8", "ranges.npy", "features.json"):
        assert (tmp_path / name).read_bytes() == (store.folder / name).read_bytes()
    assert np.array_equal(pickle.loads(pickle.dumps(other))["b-1"], store["b-1"])


def test_corrupt_stores_are_rejected(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="features are missing or incomplete"):
        FeatureStore.open(tmp_path)
    extract(corpus, tmp_path, FeatureOptions(), progress="none")
    bytes_ = (tmp_path / "features.u8").read_bytes()
    (tmp_path / "features.u8").write_bytes(bytes_[:-40])
    with pytest.raises(DataError, match="have 401 frames, their index 402"):
        FeatureStore.open(tmp_path)
    (tmp_path / "features.u8").write_bytes(bytes_[:-1])
    with pytest.raises(DataError, match="cannot be read"):
        FeatureStore.open(tmp_path)
    (tmp_path / "features.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match=r"must have format 1 \(got 99\)"):
        FeatureStore.open(tmp_path)
    (tmp_path / "features.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        FeatureStore.open(tmp_path)


@pytest.mark.parametrize("jobs", [1, 2])
def test_invalid_audio_raises_and_is_named(corpus: Corpus, tmp_path: Path, jobs: int) -> None:
    bad = tmp_path / "bad.flac"
    bad.write_bytes(b"nothing of the kind")
    with_bad = Corpus(corpus.folder, [*corpus.utterances, Utterance("zz", "b", ("X",), bad)])
    with pytest.raises(DataError, match=r"cannot be read[\s\S]*utterance zz, file .*bad\.flac"):
        extract(with_bad, tmp_path / "feats", FeatureOptions(), jobs=jobs, progress="none")
    with pytest.raises(DataError, match="features are missing or incomplete"):
        FeatureStore.open(tmp_path / "feats")


def test_other_rates_and_long_utterances_are_rejected(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must have 16000 samples per second \(got 8000\)"):
        extract(corpus, tmp_path, FeatureOptions(rate=16000), progress="none")
    assert extract(corpus, tmp_path, FeatureOptions(rate=16000), resample=True, progress="none").frames("a-1") == 98
    with pytest.raises(DataError, match=r"lasts 2\.0 s, longer than the 1\.5 s allowed[\s\S]*utterance b-2"):
        extract(corpus, tmp_path, FeatureOptions(), longest_s=1.5, progress="none")


@pytest.mark.parametrize("wrong", [{"low_hz": 4000.0}, {"mels": 0}, {"deltas": 3}, {"cmvn": "spk"}, {"high_hz": 5000.0}])
def test_invalid_options_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        FeatureOptions(**wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- pasting


@pytest.fixture(scope="module")
def streams(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write Kaldi lists: features that are one frame longer, i-vectors of one row, i-vectors of one row per ten frames."""
    folder = tmp_path_factory.mktemp("kaldi")
    rng = np.random.default_rng(0)
    for name, rows, dim in (("fmllr", lambda n: n + 1, 40), ("once", lambda n: 1, 100), ("online", lambda n: -(-n // 10), 100)):
        matrices = [(id, rng.normal(size=(rows(store.frames(id)), dim)).astype(np.float32)) for id in store.ids]
        write_matrices(folder / f"{name}.ark", folder / f"{name}.scp", matrices)
    return folder


@pytest.mark.parametrize("vectors", ["once", "online"])
def test_the_260_inputs_of_the_papers_are_concatenated(store: FeatureStore, streams: Path, vectors: str) -> None:
    pasted = from_spec(f"{store.folder}+{streams}/fmllr.scp+{streams}/{vectors}.scp")
    assert isinstance(pasted, ConcatFeatures)
    assert pasted.dim == 260
    assert pasted.ids == store.ids
    assert pasted.total_frames == store.total_frames
    x = pasted["a-2"]
    assert x.shape == (38, 260)
    assert np.array_equal(x[:, :120], store["a-2"])
    assert np.array_equal(x[:, 120:160], from_spec(f"{streams}/fmllr.scp")["a-2"][:38])
    rows = from_spec(f"{streams}/{vectors}.scp")["a-2"]
    assert np.array_equal(x[17, 160:], rows[0 if vectors == "once" else 1])
    assert np.array_equal(pasted.static("a-2"), store.static("a-2"))
    assert pasted.speaker("b-1") == "b"


def test_the_spec_of_one_folder_is_a_store(store: FeatureStore) -> None:
    assert isinstance(from_spec(str(store.folder)), FeatureStore)


def test_kaldi_features_are_normalized_by_their_statistics(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = {id: (rng.normal(size=(n, 4)) * 3 + 7).astype(np.float32) for id, n in (("a-1", 50), ("a-2", 70), ("b-1", 60))}
    write_matrices(tmp_path / "f.ark", tmp_path / "feats.scp", x.items())
    (tmp_path / "utt2spk").write_text("a-1 a\na-2 a\nb-1 b\n")
    sums = []
    for speaker in "ab":
        all_ = np.concatenate([m for id, m in x.items() if id[0] == speaker]).astype(np.float64)
        top = np.append(all_.sum(axis=0), len(all_))
        sums.append((speaker, np.stack([top, np.append(np.square(all_).sum(axis=0), 0)])))
    write_matrices(tmp_path / "c.ark", tmp_path / "cmvn.scp", sums)
    features = from_spec(f"{tmp_path}/feats.scp[cmvn,deltas]")
    assert features.dim == 12
    both = np.concatenate([features["a-1"], features["a-2"]])[:, :4]
    assert np.abs(both.mean(axis=0)).max() < 1e-3
    assert np.abs(both.std(axis=0) - 1).max() < 1e-3


def test_incompatible_streams_are_rejected(store: FeatureStore, tmp_path: Path) -> None:
    rows = np.zeros((80, 3), np.float32)
    write_matrices(tmp_path / "x.ark", tmp_path / "x.scp", [("a-1", rows)])
    with pytest.raises(DataError, match=r"utterance a-1 has 80 frames in one stream and 98 in another[\s\S]*x\.scp"):
        from_spec(f"{store.folder}+{tmp_path}/x.scp")
    write_matrices(tmp_path / "x.ark", tmp_path / "x.scp", [("other", rows)])
    with pytest.raises(DataError, match="no utterance in common"):
        from_spec(f"{store.folder}+{tmp_path}/x.scp")
    for wrong in ("nowhere", f"{tmp_path}/x.scp[cmnv]", f"{tmp_path}/x.scp[deltas", ""):
        with pytest.raises(UsageError, match="is not a feature specification"):
            from_spec(wrong)


# --------------------------------------------------------------------------------------------------------------- speed


def test_extraction_is_200_times_faster_than_real_time(tmp_path: Path) -> None:
    """Includes reading, quantizing and writing. CPU time is measured, so that other load matters little."""
    corpus = corpus_of(tmp_path / "audio", {f"a-{n}": 4.0 for n in range(40)})
    extract(Corpus(tmp_path, corpus.utterances[:2]), tmp_path / "warm", FeatureOptions(), progress="none")
    start = time.thread_time()
    extract(corpus, tmp_path / "feats", FeatureOptions(), progress="none")
    assert 160.0 / (time.thread_time() - start) > 200
