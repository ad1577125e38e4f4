"""What a network learns from besides the recordings themselves: masked and warped features, other speeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import DataError, UsageError
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.features.audio import read_audio
from roundelay.speech.features.augment import Masks, Warp
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.fbank import add_deltas, log_mel
from roundelay.speech.features.speed_perturb import at_other_speeds
from roundelay.speech.hmm.align import write_alignments
from roundelay.speech.nnet.frame_task import FrameTask
from roundelay.speech.nnet.lstm import AcousticModel

RATE = 8000


@given(st.integers(0, 8), st.integers(0, 12), st.integers(1, 30), st.integers(0, 1000))
def test_masks_hide_bands_and_stretches_and_nothing_else(mels: int, frames: int, length: int, seed: int) -> None:
    x = np.ones((length, 24), np.float32)
    Masks(mels, frames, static=8).apply(x, np.random.default_rng(seed))
    hidden_frames = (x == 0).all(1)
    hidden_mels = (x[~hidden_frames] == 0).all(0) if not hidden_frames.all() else np.ones(24, bool)
    assert ((x == 0) == (hidden_frames[:, None] | hidden_mels[None, :])).all()
    if not hidden_mels.all():
        assert hidden_frames.sum() <= frames
        assert (hidden_mels.reshape(3, 8) == hidden_mels[:8]).all(), "a band is hidden in the deltas, too"
        assert hidden_mels[:8].sum() <= 2 * mels


def tone(folder: Path, hz: float, seconds: float, name: str) -> Utterance:
    return recorded(folder, 0.3 * np.sin(2 * np.pi * hz * np.arange(int(RATE * seconds)) / RATE), name)


def recorded(folder: Path, samples: np.ndarray, name: str) -> Utterance:
    soundfile.write(folder / f"{name}.wav", samples.astype(np.float32), RATE)
    return Utterance(name, f"of-{name}", ("A",), folder / f"{name}.wav")


@pytest.fixture
def task_folders(tmp_path: Path) -> dict[str, str]:
    # Noise, not tones: frames of a steady tone are all alike, and nothing is left of them once their mean is taken out.
    dice = np.random.default_rng(0)
    corpus = Corpus(tmp_path, [recorded(tmp_path, 0.1 * dice.standard_normal(RATE), f"u{n}") for n in range(3)])
    store = extract(corpus, tmp_path / "features", FeatureOptions(rate=RATE), progress="none")
    write_alignments(tmp_path / "states", {name: np.zeros(store.frames(name), np.int32) for name in store.ids}, 2)
    features, states = str(tmp_path / "features"), str(tmp_path / "states")
    return {"features": features, "alignments": states, "valid_features": features, "valid_alignments": states}


def test_masked_batches_depend_on_seed_epoch_and_window_alone(task_folders: dict[str, str]) -> None:
    plain, masked = (FrameTask(**task_folders, spec_augment_freq=m, spec_augment_time=m) for m in (0, 6))
    whole = masked.batch(1, 0, masked.samples)[0]
    again = FrameTask(**task_folders, spec_augment_freq=6, spec_augment_time=6)
    pieces = [again.batch(1, n, n + 1)[0] for n in range(again.samples)]
    assert (np.concatenate([p.numpy() for p in pieces]) == whole.numpy()).all()
    assert (masked.batch(2, 0, 1)[0].numpy() != whole.numpy()[:1]).any()
    changed = plain.batch(1, 0, plain.samples)[0].numpy() != whole.numpy()
    assert 0 < changed.mean() < 0.6
    assert (whole.numpy()[changed] == 0).all()
    with pytest.raises(UsageError, match="spec_augment_freq = 41"):
        FrameTask(**task_folders, spec_augment_freq=41)


def tone_mels(hz: float) -> np.ndarray:
    return log_mel(0.3 * np.sin(2 * np.pi * hz * np.arange(RATE) / RATE), RATE)


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.15])
@pytest.mark.parametrize("hz", [500.0, 1000.0, 2000.0])
def test_a_warped_tone_sounds_at_the_other_frequency(hz: float, factor: float) -> None:
    warp = Warp(0.2, RATE, 40, 64.0, -200.0)
    x = add_deltas(tone_mels(hz), 2)
    before = x.copy()
    warp.stretch(x, factor)
    wanted = tone_mels(hz * factor).mean(0).argmax()
    assert abs(int(x[:, :40].mean(0).argmax()) - int(wanted)) <= 1
    if factor == 1.0:
        np.testing.assert_allclose(x, before, rtol=1e-4, atol=1e-3)
    else:
        static = before[:, :40].copy()
        warp.stretch(static, factor)
        np.testing.assert_allclose(x, add_deltas(static, 2), rtol=1e-3, atol=1e-3, err_msg="deltas move along")


def test_warped_batches_depend_on_seed_epoch_and_window_alone(task_folders: dict[str, str]) -> None:
    plain, warped = (FrameTask(**task_folders, vtlp=w) for w in (0.0, 0.1))
    whole = warped.batch(1, 0, warped.samples)[0].numpy()
    again = FrameTask(**task_folders, vtlp=0.1)
    pieces = [again.batch(1, n, n + 1)[0].numpy() for n in range(again.samples)]
    assert (np.concatenate(pieces) == whole).all()
    assert (warped.batch(2, 0, 1)[0].numpy() != whole[:1]).any()
    assert (plain.batch(1, 0, plain.samples)[0].numpy() != whole).any()
    masked, both = (FrameTask(**task_folders, spec_augment_freq=6, spec_augment_time=6, vtlp=w) for w in (0.0, 0.1))
    hidden = [task.batch(1, 0, task.samples)[0].numpy() == 0 for task in (masked, both)]
    assert (hidden[0] <= hidden[1]).all(), "what is hidden stays hidden: masks come last"
    for widest in (-0.1, 0.5):
        with pytest.raises(UsageError, match="warp = "):
            FrameTask(**task_folders, vtlp=widest)


def test_copies_at_other_speeds_are_shorter_or_longer_other_voices(tmp_path: Path) -> None:
    utterance = tone(tmp_path, 400.0, 1.0, "u")
    for speed, copy in zip(
        (0.9, 1.1), at_other_speeds([utterance], (0.9, 1.1), tmp_path / "out", RATE, progress="none"), strict=True
    ):
        assert (copy.id, copy.speaker, copy.words) == (f"sp{speed:g}-u", f"sp{speed:g}-of-u", ("A",))
        samples = read_audio(copy, RATE)
        assert len(samples) == pytest.approx(RATE / speed, abs=2)
        spectrum = np.abs(np.fft.rfft(samples))
        assert spectrum.argmax() * RATE / len(samples) == pytest.approx(400.0 * speed, abs=2), "pitch moves along"
    with pytest.raises(UsageError, match="speed 1 is no use"):
        at_other_speeds([utterance], (1.0,), tmp_path / "out", RATE)


def test_a_network_starts_from_the_layers_of_another_and_has_states_of_its_own(
    task_folders: dict[str, str], tmp_path: Path
) -> None:
    shape = {"layers": 1, "hidden": 8, "bottleneck": 4}
    torch.manual_seed(1)
    trained = AcousticModel.preset("tiny", inputs=120, outputs=7, **shape)
    trained.save(tmp_path / "a-run" / "lstm")
    for named in ("a-run", "a-run/lstm"):
        made = FrameTask(**task_folders, **shape, init_from=str(tmp_path / named)).build().state_dict()
        for name, weights in trained.state_dict().items():
            assert name.startswith("outputs.") or torch.equal(made[name], weights)
        assert made["outputs.weight"].shape == (2, 4)  # as many states as the alignments have
    fresh = FrameTask(**task_folders, **shape).build().state_dict()
    assert not torch.equal(fresh["lstm.weight_ih_l0"], trained.state_dict()["lstm.weight_ih_l0"])


def test_layers_that_do_not_fit_are_named(task_folders: dict[str, str], tmp_path: Path) -> None:
    AcousticModel.preset("tiny", inputs=120, layers=1, hidden=16, bottleneck=4).save(tmp_path / "wide")
    with pytest.raises(UsageError, match="hidden 16, not 8"):
        FrameTask(**task_folders, layers=1, hidden=8, bottleneck=4, init_from=str(tmp_path / "wide")).build()
    with pytest.raises(DataError, match="not a readable acoustic model"):
        FrameTask(**task_folders, init_from=str(tmp_path / "nowhere")).build()
